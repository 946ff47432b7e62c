"""A run goes on when its token shards grew, or folders of them were added: each row once an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, TokenShardSource
from streampack.sources import Reading
from streampack.tokenize.tokenize import tokenize
from tests.support.tokenizing import add, numbered, small, write_numbered

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
        write_numbered(tmp_path / "other" / "x.jsonl", 100, 40)
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


def test_a_first_shard_that_was_made_anew_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    rows = [{"tokens": [i] * 8, "labels": [i] * 8} for i in range(120)]
    for name in ("before", "now"):
        tokenize(rows, out=tmp_path / name, lanes=6, progress=False)
        rows[0] = {"tokens": [500] * 9, "labels": [500] * 9}
    old = TokenShardSource(tmp_path / "before")
    others = {int(row.data["tokens"][0]) for row in old.read(Reading()) if row.row_id[0]}

    def data(name: str) -> IterablePackedDataset:
        return IterablePackedDataset(
            TokenShardSource(tmp_path / name), max_seq_len=40, num_lanes=2, epochs=2, corpus_changes="allow",
            corpus_lists=tmp_path / "lists",
        )  # fmt: skip

    begun = data("before")
    packs = list(islice(begun, 4))
    resumed = data("now")
    with pytest.warns(UserWarning, match=r"made: 1 changed \(\S*tokens-00000-00000.bin\)"):
        resumed.load_state_dict(begun.state_dict())
    packs += resumed
    found = [Counter[int](), Counter[int]()]
    for pack in packs:
        found[pack["epoch"]].update(
            pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist()
        )
    assert 50 < len(others) < 120
    assert {i: found[0][i] for i in others} == dict.fromkeys(others, 8)
    assert found[1] == Counter({**dict.fromkeys(range(1, 120), 8), 500: 9})
