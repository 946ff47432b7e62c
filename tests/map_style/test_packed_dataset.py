"""`PackedDataset`: its packs against the plan and a stream's; with ``parity="torchtune"`` against torchtune's class."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import types
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from streampack import IGNORE_INDEX, IterablePackedDataset, PackedDataset, TokensEncoder, packed_dataset
from tests.oracle import packing as oracle

torchtune_datasets = pytest.importorskip("torchtune.datasets")


def rows_of(lengths: list[int], rng: np.random.Generator | None = None) -> list[dict[str, list[int]]]:
    """Samples of tokens ``1000 * (sample + 1) + place``; every third label is masked, or as ``rng`` says."""
    rows = []
    for i, length in enumerate(lengths):
        tokens = [1000 * (i + 1) + j for j in range(length)]
        masked = rng.random(length) < 0.3 if rng else [t % 3 == 0 for t in tokens]
        labels = [IGNORE_INDEX if mask else token for token, mask in zip(tokens, masked, strict=True)]
        rows.append({"tokens": tokens, "labels": labels})
    return rows


class Counted(Dataset[Any]):
    """A dataset that makes samples on demand, and counts reads."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        tokens = np.full(self.lengths[index], index)
        return {"tokens": tokens, "labels": tokens}


settings_of_all_kinds = st.fixed_dictionaries(
    {
        "max_seq_len": st.integers(1, 12),
        "strategy": st.sampled_from(sorted(oracle.CHOOSE)),
        "buffer_size": st.integers(1, 6),
        "split_across_pack": st.booleans(),
        "overlong": st.sampled_from(["drop", "truncate", "truncate_left", "split"]),
    }
).map(lambda settings: settings | ({"strategy": None} if settings["split_across_pack"] else {}))
KEYS = ("tokens", "labels", "input_pos", "seq_lens")
some_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=30)


@given(some_lengths, settings_of_all_kinds, st.sampled_from([1, 1, 2, 3]), st.booleans())
def test_the_same_packs_as_the_stream_of_one_lane(
    lengths: list[int], settings: Any, multiple: int, ended: bool
) -> None:
    """Which is compared with the oracle; and the same ledger."""
    settings = {**settings, "max_seq_len": settings["max_seq_len"] * multiple, "pad_seqs_to": multiple}
    rows = rows_of(lengths)
    eos = max((row["tokens"] for row in rows), key=len)[-1] if ended else None
    mapped = PackedDataset(rows, **settings, eos_id=eos, padding_idx=7)
    encoder = TokensEncoder(eos_id=eos)
    stream = IterablePackedDataset(rows, encoder=encoder, **settings, padding_idx=7, num_lanes=1)
    streamed = list(stream) if len(mapped) else []  # one without packs is an error
    assert len(mapped) == len(streamed)
    for ours, theirs in zip(mapped, streamed, strict=True):
        assert ours.keys() == theirs.keys()
        for key in KEYS:
            assert torch.equal(ours[key], theirs[key])
        assert ours["fragments"] == theirs["fragments"]
    assert not streamed or mapped.ledger().as_dict() == stream.ledger().as_dict()


@given(some_lengths, settings_of_all_kinds, st.integers(0, 6))
def test_max_packs_makes_the_first_of_all_packs(lengths: list[int], settings: Any, max_packs: int) -> None:
    """And its ledger is that of what was read for them."""
    data = Counted(lengths)
    every, some = (PackedDataset(data, **settings, max_packs=most) for most in (None, max_packs))
    assert len(some) == min(max_packs, len(every))
    assert [p["tokens"].tolist() for p in some] == [p["tokens"].tolist() for p in every][:max_packs]
    data.reads.clear()
    ledger = PackedDataset(data, **settings, max_packs=max_packs).ledger()
    read = [data.lengths[i] for i in data.reads]
    assert (ledger.samples, ledger.tokens_in) == (len(read), sum(read))
    # Counted from the packs themselves, token by token: none twice.
    places = {(f.row_id, i) for pack in some for f in pack["fragments"] for i in range(f.start, f.stop)}
    assert (ledger.packs, ledger.packed) == (len(some), len(places))
    assert ledger.buffered == sum(read) - len(places) - sum(ledger.dropped.values()) >= 0


# Indexing


def test_indexing_is_like_that_of_a_list() -> None:
    packed = PackedDataset(rows_of([5, 4, 2, 3, 4]), max_seq_len=8)
    firsts = [pack["tokens"][0].item() for pack in packed]
    assert firsts == [1000, 2000, 3000]
    for index in (-3, -1, np.int64(2), torch.tensor(1)):
        assert packed[index]["tokens"][0] == firsts[index]
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"there is no pack {index}: the dataset has 3 packs"):
            packed[index]
    for index in (slice(0, 2), "0"):
        with pytest.raises(TypeError):
            packed[index]


# In other tools


def test_pickles_and_copies() -> None:
    packed = PackedDataset(rows_of([5, 4, 2, 3, 4]), max_seq_len=8)
    for other in (pickle.loads(pickle.dumps(packed)), copy.copy(packed), copy.deepcopy(packed)):
        assert type(other) is PackedDataset
        assert other.ledger() == packed.ledger()
        for ours, theirs in zip(other, packed, strict=True):
            assert torch.equal(ours["tokens"], theirs["tokens"])
            assert ours["fragments"] == theirs["fragments"]


# What is refused.

GOOD: Any = {"tokens": [1, 2], "labels": [1, 2]}
PARITY = "parity='torchtune' packs as torchtune does, in order"


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "the dataset (list) is empty; it must have at least one sample"),
        (iter([GOOD]), {}, "a list_iterator has no samples by number (it needs __len__ and __getitem__); pack"),
        ([GOOD, {"tokens": [1]}], {}, "sample 1: column 'labels' is missing; the row's columns are 'tokens'"),
        ([{"tokens": [100], "labels": [1]}], {}, "sample 0: token id 100 is outside the vocabulary of 100 ids"),
        ([GOOD, {"tokens": [1] * 9, "labels": [1] * 9}], {}, "sample 1 has 9 tokens, max_seq_len is 8; set overlong"),
        ([GOOD, {"tokens": [], "labels": []}], {}, "sample 1 has 0 tokens; remove it"),
        ([GOOD], {"max_packs": -1}, "max_packs=-1 is below 0; give at least 0"),
        ([GOOD], {"parity": "torchtune", "strategy": "best_fit"}, PARITY),
        ([GOOD], {"parity": "torchtune", "pad_seqs_to": 2}, PARITY),
        ([GOOD], {"parity": "torchtune", "untrained": "drop"}, PARITY),
        ([GOOD], {"parity": "torchtune", "max_seqs_per_pack": 1}, PARITY),
        ([GOOD], {"parity": "torchtune", "overlong": "drop"}, PARITY),
    ],
)  # fmt: skip
def test_bad_rows_and_settings_are_refused_at_once(rows: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        PackedDataset(rows, **{"max_seq_len": 8, "vocab_size": 100, **settings})


def test_a_sample_that_changed_is_refused() -> None:
    rows = rows_of([3, 4])
    packed = PackedDataset(rows, max_seq_len=8)
    rows[1] = rows_of([0, 5])[1]
    with pytest.raises(
        ValueError, match=r"^sample 1 has 5 tokens and had 4 when the packs were planned; make"
    ):
        packed[0]


def test_an_error_of_the_dataset_names_the_sample() -> None:
    data = Counted([3, 4])
    data.lengths[1] = -1  # numpy refuses it
    with pytest.raises(ValueError, match="negative") as caught:
        PackedDataset(data, max_seq_len=8)
    assert caught.value.__notes__ == ["while reading sample 1"]


# As torchtune packs.

BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))]
BLOCK = 100  # data sets


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def __init__(self, **_: Any) -> None: ...
        def update(self) -> None: ...

    monkeypatch.setattr("torchtune.datasets._packed.tqdm", Silent)


def outcome(make: Any, rows: list[Any], **settings: Any) -> tuple[Any, str]:
    """(packs, error) of one packing."""
    try:
        packed = make(rows, **settings)
    except ValueError as error:
        return None, str(error)
    return [packed[i] for i in range(len(packed))], ""


def torchtunes_packs(ds: Any, **settings: Any) -> PackedDataset:
    return PackedDataset(ds, **settings, parity="torchtune")


def check_parity(rows: list[Any], seen: Counter[str], make: Any = torchtunes_packs, **settings: Any) -> None:
    theirs, their_error = outcome(torchtune_datasets.PackedDataset, rows, **settings)
    ours, our_error = outcome(make, rows, **settings)
    seen["error"] += bool(their_error)
    if their_error and not our_error:  # torchtune reads a sample behind the last pack, which may be too long
        assert len(ours) == settings["max_packs"]
        return
    if their_error:
        length, limit = re.findall(r"\d+", their_error)
        assert f" has {length} tokens, max_seq_len is {limit}; " in our_error
        return
    assert not our_error
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert set(their) == set(KEYS)
        for key in KEYS:
            assert our[key].dtype == their[key].dtype == torch.int64
            assert our[key].tolist() == their[key].tolist(), key
        seen["continues at a position above 0"] += bool(their["input_pos"][0])
        seen["padding's positions clamped"] += (
            their["input_pos"].tolist().count(settings["max_seq_len"] - 1) > 1
        )
        seen["full to the last token"] += int(their["tokens"][-1]) >= 1000
    seen["packs"] += len(theirs)
    seen["stopped early"] += len(theirs) == settings.get("max_packs") > 0
    seen["no packs"] += not theirs


def generated(rng: np.random.Generator) -> tuple[list[int], int]:
    """Lengths of one data set and ``max_seq_len``: short ones, exact fits, many packs long ones."""
    max_seq_len = int(rng.integers(1, 17))
    longest = int(rng.choice([max(1, max_seq_len // 2), max_seq_len, max_seq_len + 1, 4 * max_seq_len]))
    lengths = rng.integers(1, longest + 1, int(rng.integers(1, 25)))
    exact = rng.random(lengths.size) < 0.1
    return np.where(exact, max_seq_len, lengths).tolist(), max_seq_len


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("block", BLOCKS)
def test_generated_data_sets_give_the_same_packs(block: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(BLOCK):
        rng = np.random.default_rng((block, number))
        lengths, max_seq_len = generated(rng)
        rows = rows_of(lengths, rng)
        for split_across_pack in (False, True):
            for max_packs in (None, 0, 1, int(rng.integers(2, 6))):
                settings = {"max_seq_len": max_seq_len, "max_packs": max_packs}
                settings |= {"split_across_pack": split_across_pack, "padding_idx": int(rng.integers(3))}
                try:
                    check_parity(rows, seen, **settings)
                except AssertionError as error:
                    error.add_note(f"block {block}, data set {number}: {lengths}, {settings}")
                    raise
    # Every block covers all cases.
    assert seen["packs"] > 2000
    assert min(seen.values()) > 20, seen
    assert len(seen) == 7, seen


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("lengths", [[3, 3], [8], [7, 3]])
def test_packs_without_parity_differ(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        check_parity(rows_of(lengths), Counter(), PackedDataset, max_seq_len=8)


def test_the_ledger_counts_under_parity_too() -> None:
    packed = PackedDataset(rows_of([5, 6, 7]), max_seq_len=8, max_packs=1, parity="torchtune")
    ledger = packed.ledger()
    # The second sample closes the pack of the first, and waits; the third is never read.
    assert (ledger.samples, ledger.tokens_in, ledger.packed, ledger.buffered) == (2, 11, 5, 6)
    assert repr(packed) == ("<PackedDataset: 1 packs of 8 tokens from 2 samples, 37.5% padding, torchtune>")


# The builder.


def plain_rows(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [{"tokens": row["tokens"], "labels": row["tokens"]} for row in rows_of(lengths)]


class Tokenizer:
    """A tokenizer that truncates at ``max_seq_len`` like torchtune's."""

    pad_id = 77

    def __init__(self, max_seq_len: int | None = None) -> None:
        self.max_seq_len = max_seq_len


def provide(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    """Make this function importable as ``my_data.build``."""
    build.__module__ = "my_data"
    monkeypatch.setitem(sys.modules, "my_data", types.SimpleNamespace(build=build))
    monkeypatch.setenv("STREAMPACK_TRUST", "my_data")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def build(tokenizer: Tokenizer, *, lengths: list[int], **_: Any) -> list[Any]:
        return plain_rows([min(length, tokenizer.max_seq_len or length) for length in lengths])

    provide(monkeypatch, build)
    return {"_component_": "my_data.build", "lengths": [5, 3, 12]}


def make(node: Any, limit: int | None = 8, *, tokenizer: Any = None, **settings: Any) -> PackedDataset:
    return packed_dataset(tokenizer or Tokenizer(limit), dataset=node, **{"packed": True, **settings})


def test_the_builder_packs_what_the_node_builds(node: Any) -> None:
    tokenizer = Tokenizer(8)
    packed = make({**node, "packed": False}, tokenizer=tokenizer, overlong="drop", buffer_size=3)
    assert (packed.max_seq_len, packed.padding_idx, packed.packing.buffer_size) == (8, 77, 3)
    assert packed.ledger().dropped["overlong"] == 12, "the tokenizer did not cut it to 8"
    assert packed[0]["tokens"].tolist() == [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002]
    assert tokenizer.max_seq_len == 8, "the recipe's tokenizer is not changed"


@pytest.mark.parametrize(
    ("settings", "third"),
    [
        ({}, [*range(3000, 3007), 3011]),
        ({"eos_id": 5}, [*range(3000, 3008)]),
        ({"overlong": "truncate_left"}, [*range(3004, 3012)]),
    ],
)
def test_long_samples_are_cut_by_default(node: Any, settings: dict[str, Any], third: list[int]) -> None:
    tokenizer = Tokenizer(8)
    tokenizer.eos_id = 3011  # type: ignore[attr-defined]
    packed = make(node, tokenizer=tokenizer, **settings)
    assert packed[1]["tokens"].tolist() == third
    assert packed.ledger().dropped["truncated"] == 4


def test_settings_of_the_node_override_the_tokenizers(node: Any) -> None:
    packed = make(node, max_seq_len=16, padding_idx=5, max_packs=1, split_across_pack=True)
    assert [pack["seq_lens"].tolist() for pack in packed] == [[5, 3, 8]]
    assert packed.padding_idx == 5
    assert make(node, split_across_pack=True).ledger().packed == 20, "what is split is not cut"


def test_under_parity_the_tokenizer_cuts_and_the_padding_is_0(node: Any) -> None:
    packed = make(node, 7, parity="torchtune")
    assert [pack["seq_lens"].tolist() for pack in packed] == [[5, 2], [3, 4], [7]]
    assert packed.padding_idx == 0


INNER = "in the inner dataset node: packing is the outer node's"
NO_NODE = r"must be a node with a _component_, such as .*PackedDataset\(ds"


@pytest.mark.parametrize(
    ("inner", "settings", "message"),
    [
        ({}, {"packed": False}, "^packed=False: write `packed: True` beside `_component_: streampack.packed_dataset`"),
        ({}, {"packed": "False"}, "^packed='False': write `packed: True` .*dropped in silence"),
        ({}, {"limit": None, "max_seq_len": 8}, "sample 2 has 12 tokens, max_seq_len is 8; set overlong"),
        ({}, {"limit": None}, "^max_seq_len is None here and in the tokenizer; set max_seq_len"),
        ({"packed": True}, {}, f"^packed=True {INNER}"),
        ({"split_across_pack": True}, {}, f"^split_across_pack=True {INNER}"),
        ({"_component_": "os.system"}, {}, "^_component_ 'os.system' is not among the components that a config may"),
        ({"_component_": None}, {}, NO_NODE),
        ("torchtune.datasets.alpaca_dataset", {}, NO_NODE),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(node: Any, inner: Any, settings: Any, message: str) -> None:
    if isinstance(inner, dict):
        inner = {name: value for name, value in (node | inner).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        make(inner, **settings)


def test_an_inner_dataset_that_packs_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch, lambda _: PackedDataset(rows_of([3, 4]), max_seq_len=8))
    with pytest.raises(ValueError, match=r"^sample 0: there is a column 'seq_lens': it is a pack already"):
        make({"_component_": "my_data.build"})


def test_a_list_of_nodes_is_packed(node: Any) -> None:
    """A recipe makes a ``ConcatDataset`` of them, which is packed only if each is of torchtune's own class."""
    ours = [make(node), make(node, packed=True, overlong="drop")]
    both = torchtune_datasets.ConcatDataset(ours)
    assert both.packed
    assert len(both) == len(ours[0]) + len(ours[1]) == 3
    assert torch.equal(both[2]["tokens"], ours[1][0]["tokens"])
    theirs = torchtune_datasets.PackedDataset(rows_of([3]), max_seq_len=8)
    assert torchtune_datasets.ConcatDataset([*ours, theirs]).packed
    assert torchtune_datasets.ConcatDataset([pickle.loads(pickle.dumps(ours[0]))]).packed
