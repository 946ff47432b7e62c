"""The builder `packed_dataset`."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest

from streampack.map_style.builder import packed_dataset
from streampack.map_style.dataset import PackedDataset
from tests.map_style.test_dataset import rows_of


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
        return rows_of([min(length, tokenizer.max_seq_len or length) for length in lengths])

    provide(monkeypatch, build)
    return {"_component_": "my_data.build", "lengths": [5, 3, 12]}


def test_the_builder_packs_what_the_node_builds(node: Any) -> None:
    packed = packed_dataset(Tokenizer(8), dataset=node, packed=True, overlong="drop", buffer_size=3)
    assert (packed.max_seq_len, packed.padding_idx, packed.packing.buffer_size) == (8, 77, 3)
    assert packed.ledger().dropped["overlong"] == 12  # the tokenizer did not cut it to 8
    assert packed[0]["tokens"].tolist() == [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002]


@pytest.mark.parametrize(
    ("settings", "third"),
    [
        ({}, [*range(3000, 3007), 9]),
        ({"overlong": "truncate", "truncate_eos": 5}, [*range(3000, 3007), 5]),
        ({"overlong": "truncate", "truncate_side": "left"}, [*range(3004, 3012)]),
    ],
)
def test_long_samples_are_cut_by_default(node: Any, settings: dict[str, Any], third: list[int]) -> None:
    tokenizer = Tokenizer(8)
    tokenizer.eos_id = 9  # type: ignore[attr-defined]
    packed = packed_dataset(tokenizer, dataset=node, packed=True, **settings)
    assert [pack["tokens"].tolist() for pack in packed][1] == third
    assert packed.ledger().dropped["truncated"] == 4


def test_without_a_limit_of_the_tokenizer_a_long_sample_is_an_error(node: Any) -> None:
    with pytest.raises(ValueError, match="sample 2 has 12 tokens, max_seq_len is 8; set overlong"):
        packed_dataset(Tokenizer(None), dataset=node, packed=True, max_seq_len=8)


def test_settings_of_the_node_override_the_tokenizers(node: Any) -> None:
    packed = packed_dataset(
        Tokenizer(8),
        dataset=node,
        packed=True,
        max_seq_len=16,
        padding_idx=5,
        max_packs=1,
        split_across_pack=True,
    )
    assert len(packed) == 1
    assert packed[0]["seq_lens"].tolist() == [5, 3, 8]
    assert packed.padding_idx == 5


def test_the_recipes_tokenizer_is_not_changed(node: Any) -> None:
    tokenizer = Tokenizer(8)
    packed_dataset(tokenizer, dataset=node, packed=True, overlong="truncate")
    assert tokenizer.max_seq_len == 8


def test_under_parity_the_tokenizer_cuts_and_the_padding_is_0(node: Any) -> None:
    packed = packed_dataset(Tokenizer(7), dataset=node, packed=True, parity="torchtune")
    assert [pack["seq_lens"].tolist() for pack in packed] == [[5, 2], [3, 4], [7]]
    assert packed.padding_idx == 0


@pytest.mark.parametrize("packed", [False, "False", 1])
def test_the_builder_insists_on_packed_true(node: Any, packed: Any) -> None:
    message = (
        f"packed={packed!r}: write `packed: True` beside `_component_: streampack.packed_dataset`. The recipe"
    )
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        packed_dataset(Tokenizer(8), dataset=node, packed=packed)
    assert "boundaries between samples would be dropped in silence" in str(caught.value)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"packed": True}, "packed=True in the inner dataset node: packing is the outer node's"),
        (
            {"split_across_pack": True},
            "split_across_pack=True in the inner dataset node: packing is the outer",
        ),
        ({"max_packs": 4}, "max_packs=4 in the inner dataset node: packing is the outer node's"),
        (
            {"_component_": "os.system"},
            "_component_ 'os.system' is not among the components that a config may name",
        ),
        ({"_component_": "my_data.nothing"}, "_component_ 'my_data.nothing' leads to nothing"),
    ],
)
def test_bad_inner_nodes_are_refused(node: Any, inner: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        packed_dataset(Tokenizer(8), dataset={**node, **inner}, packed=True)


def test_packed_false_in_the_inner_node_is_fine(node: Any) -> None:
    settings: Any = {"packed": True, "overlong": "drop"}
    assert len(packed_dataset(Tokenizer(8), dataset={**node, "packed": False}, **settings)) == 1


@pytest.mark.parametrize("dataset", [{"lengths": [3]}, "torchtune.datasets.alpaca_dataset", None])
def test_a_dataset_without_component_is_refused(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a node with a _component_, such as .*PackedDataset\(ds"):
        packed_dataset(Tokenizer(8), dataset=dataset, packed=True)


def test_no_max_seq_len_anywhere_is_refused(node: Any) -> None:
    for tokenizer in (Tokenizer(None), object()):
        with pytest.raises(
            ValueError, match=r"^max_seq_len is None here and in the tokenizer; set max_seq_len"
        ):
            packed_dataset(tokenizer, dataset=node, packed=True)


def test_no_pad_id_is_refused(node: Any) -> None:
    tokenizer = types.SimpleNamespace(max_seq_len=8, pad_id=None)
    with pytest.raises(
        ValueError, match=r"^the tokenizer \(SimpleNamespace\) has no pad_id; set padding_idx"
    ):
        packed_dataset(tokenizer, dataset=node, packed=True)


def test_an_inner_dataset_that_packs_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Any) -> PackedDataset:
        return PackedDataset(rows_of([3, 4]), max_seq_len=8)

    provide(monkeypatch, build)
    with pytest.raises(ValueError, match=r"^sample 0: there is a column 'seq_lens': it is a pack already"):
        packed_dataset(Tokenizer(8), dataset={"_component_": "my_data.build"}, packed=True)
