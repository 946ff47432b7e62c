"""The builder `packed_dataset`."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from streampack import PackedDataset, packed_dataset


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Samples of tokens ``1000 * (sample + 1) + place``."""
    rows = ([1000 * (i + 1) + j for j in range(length)] for i, length in enumerate(lengths))
    return [{"tokens": tokens, "labels": tokens} for tokens in rows]


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
        ({}, [*range(3000, 3007), 9]),
        ({"overlong": "truncate", "truncate_eos": 5}, [*range(3000, 3007), 5]),
        ({"overlong": "truncate", "truncate_side": "left"}, [*range(3004, 3012)]),
    ],
)
def test_long_samples_are_cut_by_default(node: Any, settings: dict[str, Any], third: list[int]) -> None:
    tokenizer = Tokenizer(8)
    tokenizer.eos_id = 9  # type: ignore[attr-defined]
    packed = make(node, tokenizer=tokenizer, **settings)
    assert packed[1]["tokens"].tolist() == third
    assert packed.ledger().dropped["truncated"] == 4


def test_settings_of_the_node_override_the_tokenizers(node: Any) -> None:
    packed = make(node, max_seq_len=16, padding_idx=5, max_packs=1, split_across_pack=True)
    assert [pack["seq_lens"].tolist() for pack in packed] == [[5, 3, 8]]
    assert packed.padding_idx == 5


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
        ({}, {"packed": 1}, "^packed=1: write `packed: True`"),
        ({}, {"limit": None, "max_seq_len": 8}, "sample 2 has 12 tokens, max_seq_len is 8; set overlong"),
        ({}, {"limit": None}, "^max_seq_len is None here and in the tokenizer; set max_seq_len"),
        ({}, {"tokenizer": object()}, "^max_seq_len is None here and in the tokenizer; set max_seq_len"),
        ({}, {"tokenizer": types.SimpleNamespace(max_seq_len=8, pad_id=None)},
         r"^the tokenizer \(SimpleNamespace\) has no pad_id; set padding_idx"),
        ({"packed": True}, {}, f"^packed=True {INNER}"),
        ({"split_across_pack": True}, {}, f"^split_across_pack=True {INNER}"),
        ({"max_packs": 4}, {}, f"^max_packs=4 {INNER}"),
        ({"_component_": "os.system"}, {}, "^_component_ 'os.system' is not among the components that a config may"),
        ({"_component_": "my_data.nothing"}, {}, "^_component_ 'my_data.nothing' leads to nothing"),
        ({"_component_": None}, {}, NO_NODE),
        ("torchtune.datasets.alpaca_dataset", {}, NO_NODE),
        (None, {}, NO_NODE),
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
