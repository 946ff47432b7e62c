"""Rows that hold several sequences, padding or images: refused wherever rows come in, or kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    FlatteningCollator,
    IterablePackedDataset,
    PackedDataset,
    PaddedCollator,
    TokensEncoder,
    method_loader,
)
from streampack.packing.boundaries import sequence_lengths

WHOLE = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
ROW = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, -100, 9]}
PACKED = [
    {"seq_lengths": [3, 2]},
    {"position_ids": [0, 1, 2, 0, 1]},
    {"position_ids": np.array([2, 3, 4, 2, 3])},
    {"input_pos": torch.tensor([0, 1, 2, 0, 1])},
]
DOORS: dict[str, Callable[[Any], Any]] = {
    "IterablePackedDataset": lambda rows: list(
        IterablePackedDataset(rows, max_seq_len=8, encoder=TokensEncoder(tokens="input_ids"))
    ),
    "PackedDataset": lambda rows: PackedDataset(rows, max_seq_len=8),
    "method_loader": lambda rows: method_loader(rows, method="multipack", max_seq_len=8, batch_size=1),
    "PaddedCollator": lambda rows: PaddedCollator()(rows),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *((columns, "holds 2 sequences: its samples would see one another") for columns in PACKED),
    ({"attention_mask": [1, 1, 1, 2, 2]}, "the attention_mask numbers the row's sequences"),
    (
        {"attention_mask": [1, 1, 1, 1, 0]},
        r"packed like its tokens; tokenize without padding \(padding=False\)",
    ),
    ({"attention_mask": torch.tensor([0, 1, 1, 1, 1])}, "tokenize without padding"),
    (
        {"position_ids": [[0, 1, 2, 3, 4]]},
        r"column 'position_ids' has shape \[1, 5\] and type int64; it must be flat",
    ),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("columns", "message"), REFUSED)
def test_a_row_of_several_sequences_is_refused(door: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DOORS[door]([ROW | columns])


@pytest.mark.parametrize("door", ["IterablePackedDataset", "PackedDataset", "method_loader"])
@pytest.mark.parametrize("column", ["seq_lens", "encoder_input"])
def test_a_pack_or_an_image_is_refused(door: str, column: str) -> None:
    """The stream took either, in silence."""
    with pytest.raises(ValueError, match=rf"^sample 0: there is a column '{column}': it "):
        DOORS[door]([ROW | {column: [3, 2]}])


@pytest.mark.parametrize("door", DOORS)
def test_one_whole_sequence_passes(door: str) -> None:
    row = ROW | {
        "seq_lengths": [5], "position_ids": [3, 4, 5, 6, 7], "input_pos": None, "attention_mask": [1] * 5,
    }  # fmt: skip
    DOORS[door]([row])


@pytest.mark.parametrize("columns", PACKED)
@pytest.mark.parametrize("kwargs", [{}, {"return_flash_attn_kwargs": True, "max_tokens": 12, "max_seqs": 4}])
def test_the_flattening_collator_keeps_packed_rows_apart(
    columns: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    collate = FlatteningCollator(**kwargs)
    expected, found = collate([*WHOLE, WHOLE[0]]), collate([ROW | columns, WHOLE[0]])
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.array_equal(value, found[name]), name


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"seq_lengths": [3, 3]},
            r"sample 1 of the batch: .* holds \[3, 3\], and the row has 5 tokens; they must add",
        ),
        ({"seq_lengths": [5, 0]}, r"holds \[5, 0\]"),
        (
            {"position_ids": [0, 1]},
            "sample 1 of the batch: column 'position_ids' has 2 entries, and the row has 5",
        ),
        (
            {"attention_mask": [1, 1, 1, 1, 0]},
            "sample 1 of the batch: the attention_mask hides the row's padding",
        ),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatteningCollator()([WHOLE[0], ROW | columns])


def test_trl_packs_are_kept_apart() -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    rows = datasets.Dataset.from_list(
        [{"input_ids": [i] * (i % 4 + 2), "labels": [i] * (i % 4 + 2)} for i in range(9)]
    )
    packed = trl.pack_dataset(rows, 8, "bfd")
    assert max(map(len, packed["seq_lengths"])) > 1
    lengths = [n for row in packed for n in sequence_lengths(row, len(row["input_ids"]))]
    assert sorted(lengths) == sorted(map(len, rows["input_ids"]))
    batch = FlatteningCollator()(list(packed))
    assert (batch["position_ids"][0] == 0).sum() == len(rows)
    with pytest.raises(ValueError, match="column 'seq_lengths' says that the row holds 2 sequences"):
        DOORS["IterablePackedDataset"](packed)
