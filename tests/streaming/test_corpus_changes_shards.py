"""A run goes on when its token shards grew, or folders of them were added: each row once an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, TokenShardSource
from tests.tokenize.test_jobs import add, numbered, small, write

EPOCHS = 3


def rows_of(pack: dict[str, Any]) -> list[int]:
    """Return the numbers of the rows in a pack, whose texts are their numbers, repeated."""
    bounds = [0, *pack["seq_lens"].cumsum(0).tolist()]
    texts = [bytes(pack["tokens"][a + 1 : b - 1].tolist()) for a, b in pairwise(bounds)]
    return [int(text.split()[0]) for text in texts[: pack["num_seqs"]]]


def dataset(folders: Sequence[Path], lists: Path, *, changes: str = "error", shuffle: bool = True) -> Any:
    source = TokenShardSource(folders if len(folders) > 1 else folders[0])
    return IterablePackedDataset(
        source, max_seq_len=64, num_lanes=2, shuffle=shuffle, corpus_changes=changes, corpus_lists=lists
    )


def epochs(data: Any) -> list[Counter[int]]:
    """Return the rows of each epoch, the rest of the first one included."""
    found = [Counter[int]() for _ in range(EPOCHS)]
    for _ in range(EPOCHS):
        for pack in data:
            found[pack["epoch"]].update(rows_of(pack))
    return found


@pytest.mark.parametrize("grows", ["files", "folders"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_what_was_added_is_read_from_the_next_epoch_on(tmp_path: Path, grows: str, shuffle: bool) -> None:
    folders, lists = [tmp_path / "out"], tmp_path / "lists"
    source = add(tmp_path / "corpus", 0)
    small(source, folders[0])
    begun = dataset(folders, lists, shuffle=shuffle)
    before = Counter(row for pack in islice(begun, 4) for row in rows_of(pack))
    state = begun.state_dict()
    if grows == "files":
        small(add(tmp_path / "corpus", 1), folders[0])
    else:
        write(tmp_path / "other" / "x.jsonl", 100, 40)
        folders.insert(0, tmp_path / "new")
        small(type(source)(tmp_path / "other"), folders[0])
    with pytest.raises(
        ValueError, match=r"the corpus is not the one .*: [1-9]\d? added \(.*tokens-.*\). Resume"
    ):
        dataset(folders, lists, shuffle=shuffle).load_state_dict(state)
    resumed = dataset(folders, lists, changes="allow", shuffle=shuffle)
    with pytest.warns(
        UserWarning, match=r"added \(.*\). Added files are read from the next epoch of their source on"
    ):
        resumed.load_state_dict(state)
    after = epochs(resumed)
    assert 5 < before.total() < 40
    assert before + after[0] == Counter(numbered(0)), "of the first epoch, the old rows alone"
    assert after[1] == after[2] == Counter(numbered(0, 1))
