"""The doors of the package, each opened wrongly by `tests.support.mistakes`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import streampack
from streampack import IterablePackedDataset, PackedDataLoader
from streampack.cli import main


def packs(source: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(source, **({"max_seq_len": 64} | settings))


def first(source: Any, **settings: Any) -> Any:
    """Make the first pack."""
    return next(iter(packs(source, **settings)))


def texts(source: Any, **settings: Any) -> Any:
    """Make the first pack of rows of text."""
    from tests.support.hf_tokenizers import byte_level

    return first(source, encoder=streampack.TextEncoder(byte_level()), **settings)


def file(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def resumed(rows: int = 9, **settings: Any) -> None:
    """Resume a run of ten rows in packs of 64 with other rows or settings."""
    loader = PackedDataLoader(packs([{"input_ids": [5] * 9}] * 10))
    next(iter(loader))
    other = PackedDataLoader(packs([{"input_ids": [5] * 9}] * rows, **settings))
    other.load_state_dict(loader.state_dict())
    next(iter(other))


def validated(folder: Path, key: str, value: Any, *, rows: list[Any] | None = None) -> str:
    """Change one key of a small config, and return the first problem that `streampack validate` prints."""
    from streampack.training.config import to_plain
    from streampack.training.validate import validate
    from tests.support.tiny import tiny_config

    config = to_plain(tiny_config(folder, rows=100))
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config["data"].pop("encoder")
        config["validation"] = None
    node: dict[str, Any] = config
    *above, last = key.split(".")
    for each in above:
        node = node[each]
    node[last] = value
    with mock.patch.dict(os.environ, {"STREAMPACK_TRUST": "tests"}):
        return validate(config)[0]


def command(*words: str) -> str:
    """Run the command line, and return what it prints of an error."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        main(words)
    return printed.getvalue().splitlines()[0]


def trained(folder: Path, rows: list[Mapping[str, Any]], *, prepare: bool = True) -> None:
    from tests.support import hf_trainers

    trainer = hf_trainers.trainer_of(folder, train_dataset=packs(rows, epochs=None), max_steps=2)
    if prepare:
        streampack.prepare_trainer_for_packing(trainer)
    trainer.train()


def sft(folder: Path) -> None:
    from trl import SFTConfig

    from tests.support import hf_trainers

    trainer = hf_trainers.trainer_of(folder, train_dataset=packs([{"input_ids": [5] * 9}], epochs=None))
    trainer.args = hf_trainers.settings(folder, SFTConfig, packing=True, bf16=False)
    streampack.prepare_trainer_for_packing(trainer)


def without(package: str, then: Callable[[], Any]) -> Any:
    """Call a function as if a package were not installed."""
    with mock.patch.dict(sys.modules, {package: None}):
        return then()


def encoder_decoder() -> None:
    import transformers

    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    streampack.prepare_model_for_packing(transformers.T5ForConditionalGeneration(config))


def plain_model(attention: str) -> None:
    from tests.support import hf_trainers

    streampack.prepare_model_for_packing(hf_trainers.model(), attention=attention)


def tokenizer(**settings: Any) -> Any:
    from tests.support.hf_tokenizers import byte_level

    return byte_level(**settings)


def splits() -> None:
    from datasets import Dataset, DatasetDict

    first(DatasetDict(train=Dataset.from_list([{"input_ids": [5]}])))


def shuffled_stream() -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"input_ids": [5]}]).to_iterable_dataset().shuffle()
    streampack.HFSource(rows)


def torch_loader(**settings: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(packs([{"input_ids": [5]}] * 9), **settings)
