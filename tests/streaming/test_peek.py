"""A loop over ``epoch`` reads every epoch whole, whatever was peeked at before it, and so does a resume within it."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import IterablePackedDataset, PackedDataLoader, collate_packed
from tests.support.thread_ranks import ThreadSync, on_ranks

ROWS = [{"tokens": [i + 1] * 5, "labels": [i + 1] * 5} for i in range(48)]
EPOCHS = 2
WHOLE = Counter({(epoch, row): 1 for epoch in range(EPOCHS) for row in range(1, 49)})
Seen = Counter[tuple[int, int]]


def dataset(**settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(ROWS, max_seq_len=10, shuffle=True, num_lanes=2, **settings)


def loader_of(workers: int) -> PackedDataLoader:
    return PackedDataLoader(dataset(), batch_size=2, num_workers=workers)


def rows_of(tokens: Any) -> set[int]:
    """The rows in a pack or a batch: all tokens of a row are its number."""
    return {int(token) for token in tokens.flatten() if token}


def train(loader: Any, *, counter: Any, seen: Seen, until: int | None = None) -> None:
    """The documented loop; ``counter`` is what has ``epoch``."""
    trained = 0
    for epoch in range(counter.epoch, EPOCHS):
        for batch in loader:
            seen.update((epoch, row) for row in rows_of(batch.tokens))
            trained += 1
            if trained == until:
                return


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("until", [None, 1, 7, 11, 12, 20, 22])
def test_a_peek_and_a_resume_skip_no_epoch(workers: int, until: int | None) -> None:
    """The peek used up the first epoch, so that the last one was numbered 2 and a resume within it trained nothing."""
    seen: Seen = Counter()
    loader = loader_of(workers)
    seen.update((0, row) for row in rows_of(next(iter(loader)).tokens))
    train(loader, counter=loader, seen=seen, until=until)
    if until is not None:
        resumed = loader_of(workers)
        resumed.load_state_dict(loader.state_dict())
        train(resumed, counter=resumed, seen=seen)
    assert seen == WHOLE


def test_another_loader_reads_an_epoch_that_was_peeked_at_from_its_beginning() -> None:
    data = dataset()
    next(iter(PackedDataLoader(data)))
    next(iter(data))
    loader, seen = PackedDataLoader(data, batch_size=2), Counter[tuple[int, int]]()
    train(loader, counter=loader, seen=seen)
    assert seen == WHOLE


@pytest.mark.parametrize("until", [1, 12, 20])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_peek_through_another_loader_in_one_process_skips_no_epoch(until: int, stateful: bool) -> None:
    if stateful:
        made = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    else:
        made = DataLoader
    seen: Seen = Counter()
    data, resumed = dataset(), dataset()
    loader = made(data, batch_size=2, collate_fn=collate_packed)
    seen.update((0, row) for row in rows_of(next(iter(loader)).tokens))
    train(loader, counter=data, seen=seen, until=until)
    resumed.load_state_dict(data.state_dict())
    train(made(resumed, batch_size=2, collate_fn=collate_packed), counter=resumed, seen=seen)
    assert seen == WHOLE


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_peek_through_worker_processes_skips_no_epoch(stateful: bool) -> None:
    """They read ahead, so the peek may use up its epoch; what is read afterwards are whole epochs all the same."""
    if stateful:
        made = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    else:
        made = DataLoader
    data, seen = dataset(), Counter[tuple[int, int]]()
    loader = made(data, batch_size=2, num_workers=2, collate_fn=collate_packed)
    next(iter(loader))
    train(loader, counter=data, seen=seen)
    assert seen == WHOLE


class Moody:
    """Fails once, at one row."""

    def __init__(self, row: int) -> None:
        self.row: int | None = row

    def __call__(self, row: Any) -> Any:
        if row["tokens"][0] == self.row:
            self.row = None
            raise ValueError("not now")
        return row


@pytest.mark.parametrize("whole", [False, True])
def test_after_an_error_iterating_anew_begins_behind_what_was_handed_out(whole: bool) -> None:
    data = IterablePackedDataset(ROWS, encoder=Moody(30), max_seq_len=10, num_lanes=2)
    loader: Any = PackedDataLoader(data) if whole else data
    seen: Counter[int] = Counter()
    with pytest.raises(ValueError, match="not now"):
        for pack in loader:
            seen.update(rows_of(pack.tokens if whole else pack["tokens"]))
    assert 0 < len(seen) < len(ROWS)
    for pack in loader:
        seen.update(rows_of(pack.tokens if whole else pack["tokens"]))
    assert seen == Counter(range(1, 49))


def test_parts_of_an_epoch_follow_one_another_and_set_epoch_begins_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = loader_of(0)
    first, second = ([rows_of(batch.tokens) for batch in islice(loader, 6)] for _ in range(2))
    assert set.union(*first, *second) == set(range(1, 49))
    assert not caplog.records
    assert list(loader) == [], "the end of the epoch, as after a resume"
    assert "this iteration gave nothing: the one before was left behind the last batch" in caplog.text
    assert len(list(loader)) == 12
    data = dataset()
    assert [len(list(islice(data, 24))) for _ in range(3)] == [24, 0, 24]
    assert len(caplog.records) == 2
    loader.dataset.set_epoch(0)
    assert [rows_of(batch.tokens) for batch in loader] == first + second


def test_a_peek_on_several_ranks_skips_no_epoch() -> None:
    """Each rank knows its own lanes, and all of them are told where the others stand."""
    found: list[list[tuple[int, int]]] = on_ranks(2, _peek_and_resume)
    assert sum(map(Counter, found), Counter()) == WHOLE


def _peek_and_resume(sync: ThreadSync) -> list[tuple[int, int]]:
    seen: Seen = Counter()

    def loader() -> PackedDataLoader:
        made = PackedDataLoader(dataset(), batch_size=2)
        made.rank_sync = sync
        return made

    one, resumed = loader(), loader()
    seen.update((0, row) for row in rows_of(next(iter(one)).tokens))
    train(one, counter=one, seen=seen, until=7)
    resumed.load_state_dict(one.state_dict())
    train(resumed, counter=resumed, seen=seen)
    return [*seen.elements()]
