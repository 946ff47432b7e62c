"""Rows of tokens in every form that users bring, and return values of their encoders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    FlatteningCollator,
    IterablePackedDataset,
    PackedDataset,
    Sample,
    TokensEncoder,
)
from streampack.packing.samples import sample_from_row
from streampack.sources import MapSource

IDS = [[1, 2, 3], [4, 5], [6]]
PACKED = [[1, 2, 3, 4, 5, 6]]
TRAINED = [[-100, 2, 3, -100, 5, -100]]


def packs_of(rows: Any, **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
    packs = list(IterablePackedDataset(rows, max_seq_len=6, **settings))
    return [pack["tokens"].tolist() for pack in packs], [pack["labels"].tolist() for pack in packs]


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda ids: np.array(ids, ">i4")])
def test_rows_with_input_ids_are_packed(form: Callable[[list[int]], Any]) -> None:
    rows = [{"input_ids": form(ids)} for ids in IDS]
    assert packs_of(rows) == (PACKED, TRAINED)
    assert packs_of([{**row, "labels": row["input_ids"]} for row in rows]) == (PACKED, TRAINED)
    assert packs_of(rows, encoder=TokensEncoder(tokens="input_ids")) == (PACKED, TRAINED)
    assert packs_of(rows, encoder=TokensEncoder(labels=None)) == (PACKED, TRAINED)
    assert PackedDataset(rows, max_seq_len=6)[0]["tokens"].tolist() == PACKED[0]
    masked = [{"input_ids": form([7, 8, 9]), "labels": form([-100, -100, 9])}]
    assert packs_of(masked)[1] == [[-100, -100, 9, -100, -100, -100]]


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_bare_sequences_of_ids_are_rows(form: Callable[[list[int]], Any]) -> None:
    rows = [form(ids) for ids in IDS]
    assert packs_of(rows) == (PACKED, TRAINED)
    assert PackedDataset(rows, max_seq_len=6)[0]["labels"].tolist() == TRAINED[0]
    assert FlatteningCollator()(rows)["labels"].tolist() == TRAINED


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks"])
def test_a_mask_of_trained_tokens_replaces_labels(column: str) -> None:
    row = {"input_ids": [7, 8, 9, 6], column: [0, 1, 1, 0]}
    assert packs_of([row])[1] == [[-100, 8, 9, -100, -100, -100]]
    assert FlatteningCollator()([row])["labels"].tolist() == [[-100, 8, 9, -100]]
    with pytest.raises(ValueError, match=rf"^sample 0: '{column}' has shape \[1\] for 2 tokens"):
        packs_of([{"input_ids": [1, 2], column: [1]}])


def test_a_token_is_trained_if_all_masks_train_it() -> None:
    row = {"input_ids": [7, 8, 9, 6], "completion_mask": [0, 1, 0, 1], "assistant_masks": [1, 1, 1, 1]}
    assert packs_of([row])[1] == [[-100, 8, -100, 6, -100, -100]]
    row["assistant_masks"] = [1, 0, 1, 1]
    assert packs_of([row])[1] == [[-100, -100, -100, 6, -100, -100]]
    assert FlatteningCollator()([row])["labels"].tolist() == [[-100, -100, -100, 6]]


def test_a_named_column_wins_over_the_default_one() -> None:
    row = {"tokens": [1, 2], "input_ids": [3, 4], "labels": [3, 4]}
    assert TokensEncoder(tokens="input_ids")(row).tokens.tolist() == [3, 4]
    assert TokensEncoder(tokens="tokens", labels=None)(row).tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="there are both 'tokens' and 'input_ids'"):
        TokensEncoder()(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
            "the attention_mask hides the row's padding, which would be packed like its tokens",
        ),
        (
            {"input_ids": [5, 6], "labels": 1},
            "'labels' is one number for the whole row: rows to be classified or scored cannot be packed",
        ),
        (
            {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]},
            "the row is a preference pair ('chosen_ids', 'rejected_ids')",
        ),
        (
            "some text",
            "the row is a str, 'some text'; it must be a dict, or the ids of its tokens. Texts need an",
        ),
        (7, "the row is a int, 7; it must be a dict, or the ids of its tokens"),
        ([[1, 2], [3]], "column 'input_ids' is nested; it must be a flat sequence of whole numbers"),
        (
            [0.5],
            "column 'input_ids' has shape [1] and type float64; it must be a flat sequence of whole numbers",
        ),
        (
            [True, False],
            "column 'input_ids' has shape [2] and type bool; it must be a flat sequence of whole",
        ),
        ({"tokens": [1]}, "column 'labels' is missing; the row's columns are 'tokens'"),
    ],
)
def test_rows_without_tokens_are_refused_by_every_reader(row: Any, message: str) -> None:
    readers: list[tuple[str, Callable[[], Any]]] = [
        ("sample 0: ", lambda: packs_of([row])),
        ("sample 0: ", lambda: PackedDataset([row], max_seq_len=6)),
        ("sample 0 of the batch: ", lambda: FlatteningCollator()([row])),
        ("", lambda: sample_from_row(row)),
    ]
    for place, reader in readers:
        with pytest.raises(ValueError) as error:
            reader()
        assert str(error.value).startswith(place + message)


# Return values of encoders.

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "a list": list,
    "an array": np.array,
    "a tensor": torch.tensor,
    "an array of 16 bits": lambda ids: np.array(ids, np.int16),
    "a dict": lambda ids: {"input_ids": ids},
    "a dict of tensors": lambda ids: {"tokens": torch.tensor(ids), "labels": torch.tensor(ids)},
    "a pair": lambda ids: (ids, ids),
    "a Sample of lists": lambda ids: Sample(ids, ids),  # type: ignore[arg-type]
    "a Sample of tensors": lambda ids: Sample(torch.tensor(ids), torch.tensor(ids)),  # type: ignore[arg-type]
    "a big-endian Sample": lambda ids: Sample(np.array(ids, ">i8"), np.array(ids, ">i8")),
}


@pytest.mark.parametrize("form", FORMS)
def test_encoders_may_return(form: str) -> None:
    dataset = IterablePackedDataset(
        [{"n": ids} for ids in IDS], max_seq_len=6, encoder=lambda row: FORMS[form](row["n"]), vocab_size=7
    )
    packs = list(dataset)
    assert [pack["tokens"].tolist() for pack in packs] == PACKED
    assert [pack["labels"].tolist() for pack in packs] == TRAINED
    assert dataset.trace(packs[0]["fragments"][1])["tokens"] == [4, 5]
    assert dataset.estimate().packs >= 1


@pytest.mark.parametrize("nothing", [None, {}, Sample(5, 5)])  # type: ignore[arg-type]
def test_other_return_values_of_encoders_are_refused(nothing: Any) -> None:
    with pytest.raises(ValueError, match=r"^sample 0: (the encoder gave|column 'tokens')"):
        packs_of([{"n": 1}], encoder=lambda row: nothing)


@pytest.mark.parametrize("in_sample", [True, False])
def test_encoders_may_overwrite_what_they_returned(in_sample: bool) -> None:
    """Each sample is a view of one array. It waits in the planner while the next row overwrites that array."""
    memory = np.zeros(8, np.int64)

    def encode(row: Any) -> Any:
        view = memory[: row["n"]]
        view[:] = row["n"]
        return Sample(view, view) if in_sample else view

    rows = [{"n": n} for n in (5, 4, 2, 3, 1)]
    tokens, _ = packs_of(rows, encoder=encode)
    assert sorted(token for pack in tokens for token in pack if token) == sorted(
        n for n in (5, 4, 2, 3, 1) for _ in range(n)
    )


def test_datasets_may_overwrite_the_row_they_returned() -> None:
    """The map-style dataset here fills the same dict and the same lists for every row."""

    class Reused:
        row: dict[str, list[int]] = {"tokens": [], "labels": []}  # noqa: RUF012

        def __len__(self) -> int:
            return len(IDS)

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            for column in self.row.values():
                column[:] = IDS[index]
            return self.row

    assert packs_of(Reused()) == (PACKED, TRAINED)
    assert len({row.data["tokens"][0] for row in MapSource(Reused()).probe(3)[0]}) == 3
    with_state = IterablePackedDataset(Reused(), max_seq_len=6)
    list(with_state)
    IterablePackedDataset([{"tokens": ids, "labels": ids} for ids in IDS], max_seq_len=6).load_state_dict(
        with_state.state_dict()
    )
    assert PackedDataset(Reused(), max_seq_len=6)[0]["tokens"].tolist() == PACKED[0]


@pytest.mark.parametrize("kind", ["<u8", ">u8"])
def test_ids_beyond_int64_are_refused_in_either_byte_order(kind: str) -> None:
    with pytest.raises(ValueError, match="column 'input_ids' holds 9223372036854775808, which is no int64"):
        sample_from_row({"input_ids": np.array([1, 2**63], kind)})


def test_negative_labels_are_refused_by_every_reader() -> None:
    row = {"input_ids": [5, 6], "labels": [-100, -1]}
    message = "label -1 is neither -100 nor in the vocabulary of ids from 0"
    with pytest.raises(ValueError, match=f"^sample 0: {message}"):
        packs_of([row])
    with pytest.raises(ValueError, match=f"^sample 0: {message}"):
        packs_of([row], encoder=lambda row: row)
    with pytest.raises(ValueError, match=f"^sample 0: {message}"):
        PackedDataset([row], max_seq_len=6)
    with pytest.raises(ValueError, match=f"^sample 0 of the batch: {message}"):
        FlatteningCollator()([row])


# Generators that return the same object for every row, each time with other content.


def reuse_dict() -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    for number in range(60):
        row["tokens"] = row["labels"] = [1 + number] * (1 + number % 5)
        yield row


def reuse_list() -> Iterator[dict[str, Any]]:
    tokens: list[int] = []
    for number in range(60):
        tokens[:] = [1 + number] * (1 + number % 5)
        yield {"tokens": tokens, "labels": tokens}


def reuse_array() -> Iterator[dict[str, Any]]:
    memory = np.zeros(5, np.int32)
    for number in range(60):
        view = memory[: 1 + number % 5]
        view[:] = 1 + number
        yield {"input_ids": view}


def reuse_tensor() -> Iterator[dict[str, Any]]:
    for row in reuse_array():
        yield {"input_ids": torch.from_numpy(row["input_ids"])}


def reuse_message() -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {}
    for number in range(60):
        message["ids"] = [1 + number] * (1 + number % 5)
        yield {"messages": [message]}


REUSED: dict[str, Any] = {
    rows.__name__: rows for rows in (reuse_dict, reuse_list, reuse_array, reuse_tensor, reuse_message)
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", REUSED)
def test_generators_may_overwrite_the_row_they_returned(name: str, shuffle: bool) -> None:
    """With ``shuffle`` a window of rows is held in memory, and taking a state reads several rows at once."""
    make = REUSED[name]
    settings: Any = {"max_seq_len": 8, "shuffle": shuffle, "shuffle_window": 16}
    if name == "reuse_message":
        settings["encoder"] = lambda row: row["messages"][0]["ids"]
    fresh = [copy.deepcopy(row) for row in make()]
    expected = list(IterablePackedDataset(lambda: iter(fresh), **settings))
    dataset = IterablePackedDataset(make, **settings)
    stream = iter(dataset)
    packs = [next(stream) for _ in range(5)]
    resumed = IterablePackedDataset(make, **settings)
    resumed.load_state_dict(dataset.state_dict())
    packs += list(resumed)
    assert [pack["tokens"].tolist() for pack in packs] == [pack["tokens"].tolist() for pack in expected]
    tokens = [token for pack in packs for token in pack["tokens"].tolist() if token]
    assert sorted(tokens) == [1 + number for number in range(60) for _ in range(1 + number % 5)]


def test_bare_ids_need_no_column_of_labels() -> None:
    assert TokensEncoder(labels=None)([4, 5]).labels.tolist() == [4, 5]  # type: ignore[arg-type]
    assert packs_of(IDS, encoder=TokensEncoder(labels=None)) == (PACKED, TRAINED)
