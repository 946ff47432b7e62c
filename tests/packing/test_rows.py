"""Rows of tokens in every form that users bring, by every door: read, kept apart from later rows, or refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    IGNORE_INDEX,
    FlatteningCollator,
    Fragment,
    IterablePackedDataset,
    PackedDataset,
    Sample,
    TokensEncoder,
    method_loader,
    score,
)
from streampack.sources import MapSource
from streampack.tokenize import tokenize

Row = dict[str, Any]
IDS = [[1, 2, 3], [4, 5], [6]]
PACKED = [[1, 2, 3, 4, 5, 6]]
TRAINED = [[-100, 2, 3, -100, 5, -100]]
NAN = float("nan")


def lists(packs: Any, *, ids: str = "tokens") -> Any:
    """The tokens and the labels of packs, or of a batch."""
    packs = packs if isinstance(packs, list) else [packs]
    return [[row for pack in packs for row in pack[name].view(-1, pack[name].shape[-1]).tolist()]
            for name in (ids, "labels")]  # fmt: skip


def packs_of(rows: Any, **settings: Any) -> Any:
    return lists(list(IterablePackedDataset(rows, max_seq_len=6, **settings)))


# Each door takes rows, and gives the tokens and labels of its packs.
DOORS: dict[str, Callable[[Any], Any]] = {
    "stream": packs_of,
    "packed dataset": lambda rows: lists(list(PackedDataset(rows, max_seq_len=6))),
    "flattening collator": lambda rows: lists(FlatteningCollator()(rows), ids="input_ids"),
    "method loader": lambda rows: list(method_loader(rows, method="multipack", max_seq_len=6, batch_size=1)),
}
PACKING = ("stream", "packed dataset", "flattening collator")


# Forms of rows, and of what encoders return.

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array": np.array,
    "tensor": torch.tensor,
    "16 bits": lambda ids: np.array(ids, np.int16),
    "big-endian": lambda ids: np.array(ids, ">i4"),
    "numpy's numbers": lambda ids: [np.int64(i) for i in ids],
    "input_ids": lambda ids: {"input_ids": ids},
    "input_ids and labels": lambda ids: {"input_ids": np.array(ids), "labels": torch.tensor(ids)},
    "tokens and labels": lambda ids: {"tokens": torch.tensor(ids, dtype=torch.int16), "labels": tuple(ids)},
}
RETURNED: dict[str, Callable[[list[int]], Any]] = FORMS | {
    "pair": lambda ids: (ids, ids),
    "Sample of lists": lambda ids: Sample(ids, ids),  # type: ignore[arg-type]
    "Sample of tensors": lambda ids: Sample(torch.tensor(ids), torch.tensor(ids)),  # type: ignore[arg-type]
    "big-endian Sample": lambda ids: Sample(np.array(ids, ">i8"), np.array(ids, ">i8")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", PACKING)
def test_rows_of_tokens_are_read_in_every_form(door: str, form: str) -> None:
    assert DOORS[door]([FORMS[form](ids) for ids in IDS]) == [PACKED, TRAINED]


@pytest.mark.parametrize("form", RETURNED)
def test_encoders_may_return_every_form(form: str) -> None:
    dataset = IterablePackedDataset(
        [{"n": ids} for ids in IDS], max_seq_len=6, encoder=lambda row: RETURNED[form](row["n"]), vocab_size=7
    )
    packs = list(dataset)
    assert lists(packs) == [PACKED, TRAINED]
    assert dataset.trace(packs[0]["fragments"][1])["tokens"] == [4, 5]
    assert dataset.estimate().packs >= 1


@pytest.mark.parametrize("nothing", [None, {}, Sample(5, 5)])  # type: ignore[arg-type]
def test_other_return_values_of_encoders_are_refused(nothing: Any) -> None:
    with pytest.raises(ValueError, match=r"^sample 0: (a NoneType, None, is no|column 'tokens')"):
        packs_of([{"n": 1}], encoder=lambda row: nothing)


def test_columns_are_read_by_their_names() -> None:
    row = {"tokens": [1, 2], "input_ids": [3, 4], "labels": [3, 4]}
    assert TokensEncoder(tokens="input_ids")(row).tokens.tolist() == [3, 4]
    assert TokensEncoder(tokens="tokens", labels=None)(row).labels.tolist() == [1, 2]
    with pytest.raises(ValueError, match="there are both 'tokens' and 'input_ids'"):
        TokensEncoder()(row)
    assert (
        TokensEncoder(tokens="ids", labels="targets")({"ids": [1, 2], "targets": [-100, 2]}).labels[0] == -100
    )
    assert packs_of(IDS, encoder=TokensEncoder(labels=None)) == [PACKED, TRAINED]


@pytest.mark.parametrize(
    ("masks", "labels"),
    [
        ({"completion_mask": [0, 1, 1, 0]}, [-100, 8, 9, -100]),
        ({"assistant_masks": [0, 1, 1, 0]}, [-100, 8, 9, -100]),
        ({"completion_mask": [0, 1, 0, 1], "assistant_masks": [1, 1, 1, 1]}, [-100, 8, -100, 6]),
        ({"completion_mask": [0, 1, 0, 1], "assistant_masks": [1, 0, 1, 1]}, [-100, -100, -100, 6]),
    ],
)
@pytest.mark.parametrize("door", PACKING)
def test_a_token_is_trained_if_all_masks_train_it(door: str, masks: Row, labels: list[int]) -> None:
    assert DOORS[door]([{"input_ids": [7, 8, 9, 6]} | masks])[1][0][:4] == labels


# Numbers.


@pytest.mark.parametrize(
    ("tokens", "labels", "vocab_size", "message"),
    [
        ([3, 10], None, 10, "token id 10 is outside the vocabulary of 10 ids (0 to 9); use the model's own"),
        ([-(2**63), 3], None, None, f"token id {-(2**63)} is outside the vocabulary of ids from 0"),
        ([3, -100], [3, 3], 10, "token id -100 is outside the vocabulary of 10 ids (0 to 9)"),
        ([3, 4], [10, 4], 10, "label 10 is neither -100 nor in the vocabulary of 10 ids (0 to 9)"),
        ([3, 4], [-101, 4], None, "label -101 is neither -100 nor in the vocabulary of ids from 0"),
        ([0, 5], [-100, 5], 6, None),
        ([0, 2**62], None, None, None),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    tokens: list[int], labels: list[int] | None, vocab_size: int | None, message: str | None
) -> None:
    row = {"input_ids": tokens} | ({"labels": labels} if labels else {})
    makers: list[Callable[..., Any]] = [
        lambda **given: packs_of([row], **given),
        lambda **given: PackedDataset([row], max_seq_len=6, **given),
    ]
    for make in makers:
        if message is None:
            make(vocab_size=vocab_size)
        else:
            with pytest.raises(ValueError) as error:
                make(vocab_size=vocab_size)
            assert str(error.value).startswith(f"sample 0: {message}")


@pytest.mark.parametrize("at", [1, 70])
@pytest.mark.parametrize("bad", [{"tokens": [9], "labels": [9]}, {"tokens": [8], "labels": [9]}])
def test_the_row_with_an_id_outside_the_vocabulary_is_named(bad: Row, at: int) -> None:
    """The ids of rows that one pack takes are checked at once; where bad records are skipped, each row is."""
    rows = [bad if number == at else {"tokens": [8], "labels": [8]} for number in range(90)]
    with pytest.raises(ValueError, match=rf"^sample {at}: (token id|label) 9 is"):
        next(iter(IterablePackedDataset(rows, max_seq_len=90, vocab_size=9)))
    skipping = IterablePackedDataset(rows, max_seq_len=90, vocab_size=9, skip_bad=True)
    assert [pack["num_seqs"] for pack in skipping] == [89]


# What is refused, by every door.

FLAT = "it must be a flat sequence of whole"
REFUSED: list[tuple[Any, str]] = [
    ("some text", "a str, 'some text', is no sample; give a dict with input_ids or tokens, the ids alone, or a "),
    (7, "a int, 7, is no sample; give a dict with input_ids or tokens, the ids alone"),
    ([[1, 2], [3]], f"column 'input_ids' is nested; {FLAT}"),
    ([0.5], f"column 'input_ids' has shape [1] and type float64; {FLAT}"),
    ([True, False], f"column 'input_ids' has shape [2] and type bool; {FLAT}"),
    (np.array([1, 2**63], "<u8"), "column 'input_ids' holds 9223372036854775808, which is no int64"),
    ({}, "column 'tokens' is missing; the row's columns are none"),
    ({"tokens": [1]}, "column 'labels' is missing; the row's columns are 'tokens'"),
    ({"tokens": [1, 2], "labels": [1]}, "'tokens' has 2 entries and 'labels' has 1; labels are unshifted, one per"),
    ({"tokens": [1, 2], "labels": [1.0, 2.0]}, "column 'labels' has shape [2] and type float64"),
    ({"tokens": "text", "labels": [1]}, "column 'tokens' has shape []"),
    ({"tokens": [1, None], "labels": [1, 2]}, "column 'tokens' has shape [2] and type object"),
    ({"input_ids": [5, 6], "labels": [-100, -1]}, "label -1 is neither -100 nor in the vocabulary of ids from 0"),
    ({"input_ids": [5, 6], "completion_mask": [1]}, "'completion_mask' has shape [1] for 2 tokens"),
    ({"input_ids": [5, 6], "labels": 1}, "'labels' is one number for the whole row: rows to be classified or scored"),
    *(({"input_ids": [5, 6], "labels": labels}, f"column 'labels' has shape [] (a {kind}, {labels!r}); {FLAT}")
      for kind, labels in (("NoneType", None), ("str", "ab"), ("bytes", b"ab"), ("set", {5}))),
    ([10**30], "column 'input_ids' holds 1" + 30 * "0" + ", which is no int64"),
    ({"input_ids": [5, 6], "labels": [-100, -(10**30)]}, "column 'labels' holds -1" + 30 * "0" + ", which is no"),
    ([2**63, -1], "column 'input_ids' holds 9223372036854775808, which is no int64"),
    (torch.tensor([5, 6]).bfloat16(), "column 'input_ids' is no array of numpy (Got unsupported ScalarType BFloat16);"),
    ({"input_ids": [5, 6], "completion_mask": torch.ones(2).bfloat16()}, "column 'completion_mask' is no array of"),
    ({"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]},
     "the row is a preference pair ('chosen_ids', 'rejected_ids'), whose answers must stay in one pack; torchtune's "
     "and TRL's trainers of pairs take no packs: leave them their dataset and collator, or pack pairs with streampack"),
]  # fmt: skip


@pytest.mark.parametrize("door", [door for door in DOORS if door != "method loader"])
@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_rows_without_tokens_are_refused(door: str, row: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        DOORS[door]([row])
    place = "sample 0 of the batch: " if "collator" in door else "sample 0: "
    assert str(error.value).startswith(place + message)


# Rows that hold several sequences, padding or images.

WHOLE = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
ROW: Row = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, -100, 9]}
SEVERAL: list[Row] = [
    {"seq_lengths": [3, 2]},
    {"position_ids": [0, 1, 2, 0, 1]},
    {"position_ids": np.array([2, 3, 4, 2, 3])},
    {"input_pos": torch.tensor([0, 1, 2, 0, 1])},
]
HIDDEN = r"padding, which would be packed like its tokens; tokenize without padding \(padding=False\)"


@pytest.mark.parametrize("door", [door for door in DOORS if door != "flattening collator"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        *((columns, r"holds 2 sequences, as .* says: its samples would see one") for columns in SEVERAL),
        ({"attention_mask": [1, 1, 1, 2, 2]}, "the attention_mask numbers the row's sequences"),
        ({"attention_mask": [1, 1, 1, 1, 0]}, HIDDEN),
        ({"attention_mask": torch.tensor([0, 1, 1, 1, 1])}, "tokenize without padding"),
        ({"position_ids": [[0, 1, 2, 3, 4]]}, r"'position_ids' has shape \[1, 5\] for 5 tokens; give one number"),
    ],
)  # fmt: skip
def test_a_row_of_several_sequences_is_refused(door: str, columns: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DOORS[door]([ROW | columns])
    DOORS[door]([ROW | {"seq_lengths": [5], "position_ids": [3, 4, 5, 6, 7], "attention_mask": [1] * 5}])


@pytest.mark.parametrize("door", ["stream", "packed dataset", "method loader"])
@pytest.mark.parametrize("column", ["seq_lens", "encoder_input"])
def test_a_pack_or_an_image_is_refused(door: str, column: str) -> None:
    with pytest.raises(ValueError, match=rf"^sample 0: there is a column '{column}': it "):
        DOORS[door]([ROW | {column: [3, 2]}])


@pytest.mark.parametrize("columns", SEVERAL)
@pytest.mark.parametrize("kwargs", [{}, {"return_flash_attn_kwargs": True, "pad_to_multiple_of": 12}])
def test_the_flattening_collator_keeps_the_sequences_of_a_row_apart(columns: Row, kwargs: Row) -> None:
    collate = FlatteningCollator(**kwargs)
    expected, found = collate([*WHOLE, WHOLE[0]]), collate([ROW | columns, WHOLE[0]])
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.array_equal(value, found[name]), name


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"seq_lengths": [3, 3]}, r".* holds \[3, 3\], and the row has 5 tokens; they must add"),
        ({"seq_lengths": [5, 0]}, r".* holds \[5, 0\]"),
        ({"position_ids": [0, 1]}, r"'position_ids' has shape \[2\] for 5 tokens"),
        ({"attention_mask": [1, 1, 1, 1, 0]}, "the attention_mask hides the row's padding"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(columns: Row, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 1 of the batch: {message}"):
        FlatteningCollator()([WHOLE[0], ROW | columns])


def test_trl_packs_are_kept_apart() -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    rows = datasets.Dataset.from_list(
        [{"input_ids": [i] * (i % 4 + 2), "labels": [i] * (i % 4 + 2)} for i in range(9)]
    )
    packed = trl.pack_dataset(rows, 8, "bfd")
    assert max(map(len, packed["seq_lengths"])) > 1
    positions = FlatteningCollator()(list(packed))["position_ids"][0].tolist()
    starts = [i for i, position in enumerate(positions) if position == 0] + [len(positions)]
    assert sorted(np.diff(starts).tolist()) == sorted(map(len, rows["input_ids"]))
    with pytest.raises(ValueError, match="the row holds 2 sequences, as seq_lengths"):
        packs_of(packed)


# Columns of any type by every entrance: whole numbers, zeros and ones, or refused.


def table(row: Row) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list([row] * 8)


@cache
def model() -> Any:
    from torchtune.models.llama3 import llama3

    return llama3(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=64)


ENTRANCES: dict[str, Callable[[Row, Path], Any]] = {
    **{door: lambda row, folder, door=door: DOORS[door]([row]) for door in DOORS},
    "stream of a table": lambda row, folder: packs_of(table(row)),
    "tokenized": lambda row, folder: tokenize([row], out=folder, progress=False),
    "scored": lambda row, folder: list(score(model(), [row], max_seq_len=8, progress=False)),
}
ANY: Row = {
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
BAD: dict[str, Row] = {
    "completion_mask": ANY
    | {"labels": [0, -100, 1], "words": ["false", "false", "true"], "counts": [0, 2, 1], "nothing": None},
    "attention_mask": ANY
    | {"hidden": [1, 0, 1], "numbered": [1, 1, 2], "of logits": [0.0, 0.0, float("-inf")]},
    "loss_mask": {"texts": ANY["texts"]},
    "mask": {"a name that nothing reads": [0, 1, 1]},
    "input_ids": {kind: ANY[kind] for kind in ANY if kind not in ("short", "long")}
    | {
        "booleans": [True, False, True], "True": [7, 8, True], "numpy's True": [7, np.True_, 8], "-1": [7, -1, 8],
    },
}  # fmt: skip


@pytest.mark.parametrize("column", BAD)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_what_is_no_column_is_refused(entrance: str, column: str, tmp_path: Path) -> None:
    passed = []
    mixed = (
        {"True", "numpy's True"} if entrance == "stream of a table" else set()
    )  # Arrow itself refuses them
    for kind in BAD[column].keys() - mixed:
        row = {"input_ids": [7, 8, 9], column: BAD[column][kind]}
        try:
            ENTRANCES[entrance](row, tmp_path / kind)
        except ValueError as error:
            assert re.search(r"mask|column|token id|ids|row is", str(error)), kind
        else:
            passed.append(kind)
    assert passed == []


@pytest.mark.parametrize(
    "form", [list, np.array, torch.tensor, lambda m: np.array(m, bool), lambda m: [bool(x) for x in m],
             lambda m: np.array(m, np.uint8), lambda m: [float(x) for x in m]],
)  # fmt: skip
def test_masks_are_zeros_and_ones_of_any_type(form: Callable[[list[int]], Any], tmp_path: Path) -> None:
    """And ids are whole numbers of any type; the same rows pass by every entrance."""
    row = {"input_ids": np.array([7, 8, 9], np.uint64), "attention_mask": form([1, 1, 1])}
    for column in ("completion_mask", "loss_mask"):
        masked = row | {column: form([0, 1, 1])}
        assert packs_of([masked])[1] == [[-100, 8, 9, -100, -100, -100]]
        for name, entrance in ENTRANCES.items():
            entrance(masked, tmp_path / f"{name} {column}")


# Rows that are overwritten by the next.


class Reused:
    """A map-style dataset that fills the same dict and the same lists for every row."""

    row: dict[str, list[int]] = {"tokens": [], "labels": []}  # noqa: RUF012

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        for column in self.row.values():
            column[:] = IDS[index]
        return self.row


def test_datasets_may_overwrite_the_row_they_returned() -> None:
    for door in ("stream", "packed dataset"):
        assert DOORS[door](Reused()) == [PACKED, TRAINED]
    assert len({row.data["tokens"][0] for row in MapSource(Reused()).sample(3)[0]}) == 3
    begun = IterablePackedDataset(Reused(), max_seq_len=6)
    list(begun)
    fresh = [{"tokens": ids, "labels": ids} for ids in IDS]
    IterablePackedDataset(fresh, max_seq_len=6).load_state_dict(begun.state_dict())


def reuse_array() -> Iterator[Row]:
    memory = np.zeros(5, np.int32)
    for number in range(60):
        view = memory[: 1 + number % 5]
        view[:] = 1 + number
        yield {"input_ids": view}


def reuse_message() -> Iterator[Row]:
    message: Row = {}
    for number in range(60):
        message["ids"] = [1 + number] * (1 + number % 5)
        yield {"messages": [message]}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", [reuse_array, reuse_message])
def test_generators_may_overwrite_the_row_they_returned(make: Any, shuffle: bool) -> None:
    """With ``shuffle`` a window of rows is held in memory, and taking a state reads several rows at once."""
    settings: Any = {"max_seq_len": 8, "shuffle": shuffle and 16}
    if make is reuse_message:
        settings["encoder"] = lambda row: row["messages"][0]["ids"]
    fresh = [copy.deepcopy(row) for row in make()]
    expected = list(IterablePackedDataset(lambda: iter(fresh), **settings))
    dataset = IterablePackedDataset(make, **settings)
    stream = iter(dataset)
    packs = [next(stream) for _ in range(5)]
    resumed = IterablePackedDataset(make, **settings)
    resumed.load_state_dict(dataset.state_dict())
    packs += list(resumed)
    assert lists(packs) == lists(expected)
    tokens = [token for pack in packs for token in pack["tokens"].tolist() if token]
    assert sorted(tokens) == [1 + number for number in range(60) for _ in range(1 + number % 5)]


# The EOS token of samples that are cut.


@pytest.mark.parametrize("eos", [2, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1])
@pytest.mark.parametrize("last", [3, IGNORE_INDEX])
def test_eos_replaces_the_last_token_and_its_label_where_trained(eos: int, last: int) -> None:
    row = {"tokens": [1, 2, 3, eos], "labels": [1, 2, last, 4]}
    encoder = TokensEncoder(eos_id=eos)
    packs = IterablePackedDataset([row], encoder=encoder, max_seq_len=3, overlong="truncate")
    assert lists(list(packs)) == [[[1, 2, eos]], [[-100, 2, eos if last == 3 else last]]]
    assert row == {"tokens": [1, 2, 3, eos], "labels": [1, 2, last, 4]}, "the row keeps its own"


def test_a_fragment_that_was_written_as_json_is_traced(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [5, 6]}\n')
    data = IterablePackedDataset(tmp_path / "rows.jsonl", max_seq_len=4)
    [fragment] = next(iter(data))["fragments"]
    assert data.trace(Fragment(*json.loads(json.dumps(fragment)))) == data.trace(fragment)
