"""`as_source` chooses the source for a user's data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    Mix,
    PackedDataLoader,
    PackedDataset,
    TextEncoder,
)
from streampack.sources.as_source import as_source
from streampack.tokenize.tokenize import tokenize
from tests.support.corpus import numbered, write


def test_each_kind_of_data_becomes_its_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(3))
    for given_, kind in (
        (path, JSONLSource),
        (str(path), JSONLSource),
        (str(tmp_path / "*.jsonl"), JSONLSource),
        (numbered(3), MapSource),
        (lambda: numbered(3), IterableSource),
        ({1: 2}.values(), IterableSource),
    ):
        assert type(as_source(given_)) is kind
    source = MapSource(numbered(3))
    assert as_source(source) is source
    for nothing in (3, None, object()):
        with pytest.raises(
            ValueError, match=f"a {type(nothing).__name__} holds no rows; give a source, a path"
        ):
            as_source(nothing)
    with pytest.raises(ValueError, match="empty"):
        as_source([])


def test_an_iterable_dataset_with_a_length_is_an_iterable() -> None:
    """torch's Dataset has a __getitem__ that raises, and an IterableDataset may have a length."""
    from torch.utils.data import IterableDataset

    class Sized(IterableDataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(numbered(3))

    assert type(as_source(Sized())) is IterableSource


@pytest.mark.parametrize("as_array", [False, True])
def test_what_a_hugging_face_tokenizer_returns_is_a_corpus(as_array: bool) -> None:
    """A batch of a tokenizer is rows by columns; rows of its kind are rows. Padding in it is refused, not packed."""
    transformers = pytest.importorskip("transformers")
    ids = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    columns: Any = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    batch = transformers.BatchEncoding(columns)
    if as_array:
        batch = [transformers.BatchEncoding({"input_ids": np.array(row)}) for row in ids]
    packs = IterablePackedDataset(batch, max_seq_len=5, num_lanes=1)
    assert [pack["tokens"].tolist() for pack in packs] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    padded = {
        "input_ids": np.array([[1, 2, 0], [4, 5, 6]]),
        "attention_mask": np.array([[1, 1, 0], [1, 1, 1]]),
    }
    with pytest.raises(ValueError, match="tokenize without padding"):
        list(IterablePackedDataset(transformers.BatchEncoding(padded), max_seq_len=5))


ROWS = [{"input_ids": [5, 6]}]


def stream(source: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(source, max_seq_len=8, **settings)


TWICE = "gives packs, not rows; give the dataset that was packed, or leave packing to one of the two"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: stream(stream()), f"IterablePackedDataset {TWICE}"),
        (lambda _: stream(PackedDataLoader(stream())), f"PackedDataLoader {TWICE}"),
        (lambda _: stream(PackedDataset(ROWS, max_seq_len=8)), f"PackedDataset {TWICE}"),
        (lambda _: Mix([{"name": "a", "source": stream(), "weight": 1}]), f"IterablePackedDataset {TWICE}"),
        (
            lambda _: stream(JSONLSource),
            "the source is the class JSONLSource; make one of it: JSONLSource(path)",
        ),
        (
            lambda _: stream(encoder=TextEncoder),
            "is the class TextEncoder; call it .* encoder=TextEncoder(tokenizer)",
        ),
        (
            lambda _: stream(Mix([{"name": "a", "source": ROWS, "weight": 1, "encoder": TextEncoder}])),
            "is the class TextEncoder; call it",
        ),
        (lambda out: tokenize(ROWS, out=out, encoder=TextEncoder), "is the class TextEncoder; call it"),
    ],
)
def test_packs_and_classes_are_refused_at_construction(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make(tmp_path / "out")
