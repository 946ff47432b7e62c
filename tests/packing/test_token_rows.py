"""Rows of tokens in every form that users bring, and what their encoders give."""

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
    method_loader,
)
from streampack.packing.token_rows import sample_of
from streampack.sources import MapSource

IDS = [[1, 2, 3], [4, 5], [6]]
PACKED = [[1, 2, 3, 4, 5, 6]]
TRAINED = [[-100, 2, 3, -100, 5, -100]]


def packs_of(rows: Any, **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
    packs = list(IterablePackedDataset(rows, max_seq_len=6, **settings))
    return [pack["tokens"].tolist() for pack in packs], [pack["labels"].tolist() for pack in packs]


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda ids: np.array(ids, ">i4")])
def test_rows_with_input_ids_just_work(form: Callable[[list[int]], Any]) -> None:
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
def test_a_mask_of_what_is_trained_takes_the_place_of_labels(column: str) -> None:
    row = {"input_ids": [7, 8, 9, 6], column: [0, 1, 1, 0]}
    assert packs_of([row])[1] == [[-100, 8, 9, -100, -100, -100]]
    assert FlatteningCollator()([row])["labels"].tolist() == [[-100, 8, 9, -100]]
    with pytest.raises(ValueError, match=rf"^sample 0: '{column}' has shape \[1\] for 2 tokens"):
        packs_of([{"input_ids": [1, 2], column: [1]}])


def test_a_column_that_was_named_goes_before_the_other() -> None:
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
def test_what_is_no_row_of_tokens_is_refused_at_every_door(row: Any, message: str) -> None:
    doors: list[tuple[str, Callable[[], Any]]] = [
        ("sample 0: ", lambda: packs_of([row])),
        ("sample 0: ", lambda: PackedDataset([row], max_seq_len=6)),
        ("sample 0 of the batch: ", lambda: FlatteningCollator()([row])),
        ("", lambda: sample_of(row)),
    ]
    for place, door in doors:
        with pytest.raises(ValueError) as error:
            door()
        assert str(error.value).startswith(place + message)


# What encoders give.

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
def test_an_encoder_may_give(form: str) -> None:
    dataset = IterablePackedDataset(
        [{"n": ids} for ids in IDS], max_seq_len=6, encoder=lambda row: FORMS[form](row["n"]), vocab_size=7
    )
    packs = list(dataset)
    assert [pack["tokens"].tolist() for pack in packs] == PACKED
    assert [pack["labels"].tolist() for pack in packs] == TRAINED
    assert dataset.trace(packs[0]["fragments"][1])["tokens"] == [4, 5]
    assert dataset.estimate().packs >= 1


@pytest.mark.parametrize("nothing", [None, {}, Sample(5, 5)])  # type: ignore[arg-type]
def test_what_an_encoder_may_not_give_is_named(nothing: Any) -> None:
    with pytest.raises(ValueError, match=r"^sample 0: (the encoder gave|column 'tokens')"):
        packs_of([{"n": 1}], encoder=lambda row: nothing)


@pytest.mark.parametrize("as_sample", [True, False])
def test_an_encoder_may_use_its_memory_again(as_sample: bool) -> None:
    """Each sample is a view of one array, which the next overwrites, and waits meanwhile."""
    memory = np.zeros(8, np.int64)

    def encode(row: Any) -> Any:
        view = memory[: row["n"]]
        view[:] = row["n"]
        return Sample(view, view) if as_sample else view

    rows = [{"n": n} for n in (5, 4, 2, 3, 1)]
    tokens, _ = packs_of(rows, encoder=encode)
    assert sorted(token for pack in tokens for token in pack if token) == sorted(
        n for n in (5, 4, 2, 3, 1) for _ in range(n)
    )


def test_a_row_may_be_used_again() -> None:
    """A map-style dataset that fills one dict, and one list, for every row."""

    class Reused:
        row: dict[str, list[int]] = {"tokens": [], "labels": []}  # noqa: RUF012

        def __len__(self) -> int:
            return len(IDS)

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            for column in self.row.values():
                column[:] = IDS[index]
            return self.row

    assert packs_of(Reused()) == (PACKED, TRAINED)
    assert len({row["tokens"][0] for row in MapSource(Reused()).probe(3)[0]}) == 3
    with_state = IterablePackedDataset(Reused(), max_seq_len=6)
    list(with_state)
    IterablePackedDataset([{"tokens": ids, "labels": ids} for ids in IDS], max_seq_len=6).load_state_dict(
        with_state.state_dict()
    )
    assert PackedDataset(Reused(), max_seq_len=6)[0]["tokens"].tolist() == PACKED[0]


@pytest.mark.parametrize("kind", ["<u8", ">u8"])
def test_ids_beyond_int64_are_refused_in_any_order_of_bytes(kind: str) -> None:
    with pytest.raises(ValueError, match="column 'input_ids' holds 9223372036854775808, which is no int64"):
        sample_of({"input_ids": np.array([1, 2**63], kind)})


def test_labels_below_zero_are_refused_at_every_door() -> None:
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"padding_idx": 10},
            "padding_idx=10 is outside the vocabulary of 10 ids (0 to 9); give a token of the model's",
        ),
        (
            {"truncate_eos": 10},
            "truncate_eos=10 is outside the vocabulary of 10 ids (0 to 9); give a token of the",
        ),
        ({"padding_idx": True}, "padding_idx=True is not a whole number; give one of at least 0"),
        ({"truncate_eos": -1}, "truncate_eos=-1 is below 0; give at least 0"),
    ],
)
def test_settings_that_are_token_ids_are_checked_against_the_vocabulary(settings: Any, message: str) -> None:
    rows = [{"input_ids": [1]}]
    given = {"max_seq_len": 6, "vocab_size": 10, **settings}
    doors: list[Callable[[], Any]] = [
        lambda: IterablePackedDataset(rows, **given),
        lambda: PackedDataset(rows, **given),
    ]
    if "truncate_eos" not in settings:
        doors.append(lambda: method_loader(rows, method="exact_fit", batch_size=1, **given))
    for door in doors:
        with pytest.raises(ValueError) as error:
            door()
        assert str(error.value).startswith(message)


# Memory that is used again: the next row, or sample, lies where the last one did.


def one_dict() -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    for number in range(60):
        row["tokens"] = row["labels"] = [1 + number] * (1 + number % 5)
        yield row


def one_list() -> Iterator[dict[str, Any]]:
    tokens: list[int] = []
    for number in range(60):
        tokens[:] = [1 + number] * (1 + number % 5)
        yield {"tokens": tokens, "labels": tokens}


def one_array() -> Iterator[dict[str, Any]]:
    memory = np.zeros(5, np.int32)
    for number in range(60):
        view = memory[: 1 + number % 5]
        view[:] = 1 + number
        yield {"input_ids": view}


def one_tensor() -> Iterator[dict[str, Any]]:
    for row in one_array():
        yield {"input_ids": torch.from_numpy(row["input_ids"])}


def one_message() -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {}
    for number in range(60):
        message["ids"] = [1 + number] * (1 + number % 5)
        yield {"messages": [message]}


REUSED: dict[str, Any] = {
    rows.__name__: rows for rows in (one_dict, one_list, one_array, one_tensor, one_message)
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", REUSED)
def test_a_generator_may_use_its_memory_again(name: str, shuffle: bool) -> None:
    """With ``shuffle`` a window of rows is held; a state looks at some rows at once."""
    make = REUSED[name]
    settings: Any = {"max_seq_len": 8, "shuffle": shuffle, "shuffle_window": 16}
    if name == "one_message":
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
