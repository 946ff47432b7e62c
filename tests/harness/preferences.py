"""Preference pairs that a tiny model can learn, and a config of the dpo recipe on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from streampack import IGNORE_INDEX, Batch, Encoder, Group
from tests.harness.groups import segments, without_sharing
from tests.harness.tiny import WORDS, WordTokenizer, lora_config, tiny_config


class PairEncoder(Encoder):
    """Encoder of a prompt, a chosen and a rejected text; ``ref`` is a column of two numbers."""

    def __init__(self, *, share_prefix: bool = True, ref: str | None = None) -> None:
        self.share_prefix, self.ref = share_prefix, ref

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        encode = WordTokenizer().encode
        parts = [
            encode(row["prompt"], add_eos=False),
            *(encode(row[name], add_bos=False) for name in ("chosen", "rejected")),
        ]
        tokens = np.concatenate(parts)
        labels = np.where(np.arange(tokens.size) < len(parts[0]), IGNORE_INDEX, tokens)
        fields = {} if self.ref is None else {"ref_logps": [np.nan, *row[self.ref]]}
        pair = Group(tokens, labels, lengths=[*map(len, parts)], parents=[-1, 0, 0], fields=fields)
        return pair if self.share_prefix else without_sharing(pair)

    def fingerprint(self) -> str:
        return f"pairs {self.share_prefix} {self.ref}"


def pair_rows(count: int) -> list[dict[str, Any]]:
    """Prompts of words in a cyclic order; the chosen answer goes on in it, the rejected one backwards."""
    rows = []
    for i in range(count):
        size, answer = i * 5 % 7 + 1, i * 3 % 5 + 1
        words = [WORDS[(i + j) % 8] for j in range(size)]
        chosen = [WORDS[(i + size + j) % 8] for j in range(answer)]
        rejected = [WORDS[(i + size - 2 - j) % 8] for j in range(i % 4 + 1)]
        rows.append({name: " ".join(text) for name, text in zip(
            ("prompt", "chosen", "rejected"), (words, chosen, rejected), strict=True
        )})  # fmt: skip
    return rows


def dpo_config(folder: Path, *, rows: int = 300, adapters: bool = False, **changes: Any) -> Any:
    """Return a config of the dpo recipe, with dotted keys changed; write its weights and data under ``folder``."""
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.5}
    settings = {"loss": loss, "optimizer.lr": 0.005, "data.num_lanes": 4, "lr_scheduler": None}
    config = (lora_config if adapters else tiny_config)(folder, **settings | changes)
    path = folder / "pairs.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in pair_rows(rows)))
    if "data.source" not in changes:
        config.data.source.paths = str(path)
    if "data.encoder" not in changes:
        config.data.encoder = {"_component_": "tests.harness.preferences.PairEncoder"}
    return config


def whole_pairs(batch: Batch) -> Iterator[list[list[int]]]:
    """Yield the sequences of each pair of a batch with shared prompts: those of the chosen and the rejected answer."""
    found = segments(batch)
    assert len(found) % 3 == 0
    for i in range(0, len(found), 3):
        yield [
            [token for start, stop in path for token in batch.tokens[pack, start:stop].tolist()]
            for pack, _, path in found[i + 1 : i + 3]
        ]
