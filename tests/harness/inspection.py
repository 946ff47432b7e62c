"""Corpora of lengths like those of real ones, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack import ChatEncoder, IterablePackedDataset, JSONLSource
from tests.harness.hf_tokenizers import byte_level

WORDS = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "what", "is", "the", "answer",
]  # fmt: skip


def token_rows(lengths: Sequence[int], *, prompt: float = 0.3) -> list[dict[str, npt.NDArray[np.int32]]]:
    """Rows of ready tokens, the first part of each masked."""
    found = []
    for length in lengths:
        tokens = np.arange(1, length + 1, dtype=np.int32)
        labels = tokens.copy()
        labels[: int(length * prompt)] = -100
        found.append({"tokens": tokens, "labels": labels})
    return found


def log_normal(count: int, median: float, sigma: float, *, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.maximum(2, drawn).astype(int).tolist()


def chats(path: Path, count: int, *, seed: int = 0) -> Path:
    """A file of conversations of one to three turns; every fiftieth cannot be encoded."""
    rng, lines = np.random.default_rng(seed), []
    for number in range(count):
        messages = []
        for _ in range(int(rng.integers(1, 4))):
            for role, most in (("user", 12), ("assistant", 40)):
                words = rng.choice(WORDS, int(rng.integers(1, most)))
                messages.append({"role": role, "content": " ".join(words)})
        lines.append(json.dumps({"messages": messages if number % 50 != 7 else "none"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def dataset(name: str, folder: Path, **settings: Any) -> IterablePackedDataset:
    """One of the four corpora by which predictions are compared with runs."""
    if name == "chat":
        source: Any = JSONLSource(chats(folder / "chat.jsonl", 400))
        own: dict[str, Any] = {"max_seq_len": 512, "overlong": "truncate", "skip_bad": True}
        own |= {"encoder": ChatEncoder(byte_level()), "shuffle": True, "num_lanes": 4}
    elif name == "web":
        source = token_rows(log_normal(1500, 120, 1.3), prompt=0)
        own = {"max_seq_len": 1024, "overlong": "split", "shuffle": True}
    elif name == "flan":
        source = token_rows(log_normal(1500, 60, 1.0))
        own = {"max_seq_len": 1024, "overlong": "drop", "shuffle": True, "num_lanes": 2}
    else:  # bimodal, with rows that do not fit
        lengths = [*log_normal(600, 20, 0.3), *log_normal(200, 400, 0.4, seed=1)]
        order = np.random.default_rng(2).permutation(len(lengths))
        source = token_rows([lengths[i] for i in order], prompt=0.8)
        own = {"max_seq_len": 512, "overlong": "truncate", "untrained": "drop", "buffer_size": 32}
    return IterablePackedDataset(source, **{**own, **settings})


CORPORA = ("chat", "web", "flan", "bimodal")
