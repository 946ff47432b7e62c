"""Columns of ids and of masks at any type, by every entrance: whole numbers, zeros and ones, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    FlatteningCollator,
    IterablePackedDataset,
    MessagesEncoder,
    PackedDataset,
    ParquetSource,
    PreferenceEncoder,
    RolloutEncoder,
    TokensEncoder,
    method_loader,
)
from streampack.packing.groups import Group
from streampack.scoring.requests import read_request
from streampack.tokenize import tokenize

Row = dict[str, Any]
NAN = float("nan")


def packs_of(rows: Any, encoder: Any = None) -> list[list[int]]:
    """Return the labels of packs; the encoder for rows of tokens is the default one."""
    return [pack["labels"].tolist() for pack in IterablePackedDataset(rows, max_seq_len=6, encoder=encoder)]


def table(row: Row) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([row] * 8)


def parquet(row: Row, folder: Path) -> Any:
    table(row).to_parquet(folder / "rows.parquet")
    return packs_of(ParquetSource(folder / "*.parquet"))


class Bytes:
    """A tokenizer for rollouts and pairs of ids, which need none."""

    bos_id, eos_id = 1, 2

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [1] * add_bos + list(text.encode()) + [2] * add_eos


def rollout(row: Row) -> Any:
    given = {
        "prompt": [5],
        "completions": [row["input_ids"]],
        "mask": [row.get("completion_mask", [1, 1, 1])],
    }
    return RolloutEncoder(Bytes(), mask="mask")(given)


def pair(row: Row) -> Any:
    columns = {"prompt_ids": [5], "chosen_ids": row["input_ids"], "rejected_ids": [3]}
    return PreferenceEncoder(Bytes())(columns | {"chosen_attention_mask": row.get("attention_mask")})


ENTRANCES: dict[str, Callable[[Row, Path], Any]] = {
    "stream": lambda row, folder: packs_of([row]),
    "stream of a table": lambda row, folder: packs_of(table(row)),
    "stream of Parquet": parquet,
    "stream by an encoder": lambda row, folder: packs_of([row], encoder=lambda row: row),
    "packed dataset": lambda row, folder: PackedDataset([row], max_seq_len=6)[0],
    "packed dataset of a table": lambda row, folder: PackedDataset(table(row), max_seq_len=6)[0],
    "collator": lambda row, folder: FlatteningCollator()([row]),
    "multipack": lambda row, folder: list(
        method_loader([row], method="multipack", max_seq_len=6, batch_size=1)
    ),
    "tokenized": lambda row, folder: tokenize([row], out=folder, progress=False),
    "scored": lambda row, folder: read_request(row),
    "rollout": lambda row, folder: rollout(row),
    "pair": lambda row, folder: pair(row),
    "group": lambda row, folder: Group(row["input_ids"], row["input_ids"], lengths=[3]),
}
ANY: dict[str, Any] = {
    "texts": ["1", "0", "1"],
    "a null": [1, None, 1],
    "no number": [1.0, NAN, 1.0],
    "parts": [1.0, 0.5, 1.0],
    "nested": [[1], [0], [1]],
    "ragged": [[1, 1], [0], [1]],
    "short": [1, 1],
    "long": [1, 1, 1, 1],
    "one number": 1,
    "one text": "111",
}
BAD: dict[str, dict[str, Any]] = {
    "completion_mask": ANY
    | {"labels": [0, -100, 1], "words": ["false", "false", "true"], "counts": [0, 2, 1], "nothing": None},
    "attention_mask": ANY
    | {"hidden": [1, 0, 1], "numbered": [1, 1, 2], "of logits": [0.0, 0.0, float("-inf")]},
    "loss_mask": {"texts": ANY["texts"]},
    "mask": {"good": [0, 1, 1]},
    "input_ids": {kind: ANY[kind] for kind in ANY if kind not in ("short", "long")}
    | {
        "booleans": [True, False, True],
        "True": [7, 8, True],
        "numpy's True": [7, np.True_, 8],
        "-1": [7, -1, 8],
    },
}
TABLES = ("stream of a table", "stream of Parquet", "packed dataset of a table")
ENTERED_BY = {
    "completion_mask": ENTRANCES.keys() - {"pair", "group"},
    "attention_mask": ENTRANCES.keys() - {"rollout", "group"},
    "loss_mask": ENTRANCES.keys() - {"rollout", "pair", "group"},
    "mask": ENTRANCES.keys() - {"rollout", "pair", "group"},
    "input_ids": ENTRANCES.keys(),
}
CASES = [
    (entrance, column, kind)
    for column, values in BAD.items()
    for kind in values
    for entrance in ENTRANCES
    if entrance in ENTERED_BY[column]
    and not (entrance in TABLES and kind in ("True", "numpy's True"))  # Arrow itself refuses mixed types
    and not (entrance in ("rollout", "pair", "group") and kind == "-1")  # checked where groups are packed
]


@pytest.mark.parametrize(("entrance", "column", "kind"), CASES)
def test_what_is_no_column_is_refused(entrance: str, column: str, kind: str, tmp_path: Path) -> None:
    row = {"input_ids": [7, 8, 9], column: BAD[column][kind]}
    with pytest.raises(ValueError, match=r"mask|column|token id|ids|row is"):
        ENTRANCES[entrance](row, tmp_path)


@pytest.mark.parametrize(
    "form", [list, np.array, torch.tensor, lambda m: np.array(m, bool), lambda m: [bool(x) for x in m],
             lambda m: np.array(m, np.uint8), lambda m: [float(x) for x in m]],
)  # fmt: skip
def test_masks_are_zeros_and_ones_of_any_type(form: Callable[[list[int]], Any], tmp_path: Path) -> None:
    """And ids are whole numbers of any type; the same rows pass by every entrance."""
    row = {"input_ids": np.array([7, 8, 9], np.uint64), "attention_mask": form([1, 1, 1])}
    for column in ("completion_mask", "loss_mask"):
        masked = row | {column: form([0, 1, 1])}
        assert packs_of([masked]) == [[-100, 8, 9, -100, -100, -100]]
        for name, entrance in ENTRANCES.items():
            if name != "stream of Parquet" or form is not torch.tensor:
                entrance(masked, tmp_path / f"{name} {column}" if name == "tokenized" else tmp_path)
    assert rollout(row | {"completion_mask": form([0, 1, 1])}).labels.tolist() == [-100, -100, 8, 9]


def test_an_attention_mask_of_another_length_is_seen_in_tables() -> None:
    """All its numbers are 1, so rows of tables might be taken without a look at each."""
    rows = table({"input_ids": [7, 8, 9], "attention_mask": [1, 1]})
    with pytest.raises(ValueError, match=r"'attention_mask' has shape \[2\] for 3 tokens"):
        packs_of(rows, encoder=TokensEncoder())


@pytest.mark.parametrize("ids", [[True, 5], [False, 1], [2**40, True], (5, True), (5, np.True_)])
def test_true_is_no_token_id_nor_label(ids: Any) -> None:
    """Also where the ids do not fit into 32 bits, or the first is the odd one."""
    for row in ({"input_ids": ids}, {"tokens": [7] * len(ids), "labels": ids}):
        for take in (lambda row: packs_of([row]), lambda row: FlatteningCollator()([row])):
            with pytest.raises(ValueError, match=r"column '\w+' holds (True|False) among its numbers"):
                take(row)


def test_the_mask_of_a_tokenizer_is_checked() -> None:
    from torchtune.data import InputOutputToMessages

    class Odd(Bytes):
        def __call__(self, sample: Row) -> Row:
            return {"tokens": [7, 8], "mask": ["False", "True"]}

        def tokenize_messages(self, messages: Any) -> tuple[list[int], list[str]]:
            return [7, 8], ["False", "True"]

    encoder = MessagesEncoder(Odd(), message_transform=InputOutputToMessages())
    with pytest.raises(ValueError, match="'mask' holds a str, 'False'"):
        encoder({"input": "a", "output": "b"})
