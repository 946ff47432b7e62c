"""One owner of a state: it is taken up once, by whoever iterates, and nobody gives another's."""

from __future__ import annotations

import copy
import pickle
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import IterablePackedDataset, MapSource, PackedDataLoader
from tests.support.conformance import content
from tests.support.corpus import Numbers, rows

DATA = rows(60)
SETTINGS: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 2, "buffer_size": 8, "shuffle": True}


def dataset(**settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        MapSource(DATA),
        encoder=Numbers(),
        max_seq_len=24,
        num_lanes=2,
        buffer_size=8,
        shuffle=True,
        **settings,
    )


def tokens(batches: Any) -> list[Any]:
    return [batch.tokens.tolist() for batch in batches]


PACKS = [content(pack) for pack in dataset()]
BATCHES = tokens(PackedDataLoader(dataset()))


def state_after(count: int) -> dict[str, Any]:
    loader = PackedDataLoader(dataset())
    for _ in islice(loader, count):
        pass
    return loader.state_dict()


STATE = state_after(5)
WHOLE = len(PACKS)
PEEKED = r"began from the loaded state and stopped before its end.*load it again.*state_dict\(\)\) first;.*set_epoch"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_resumes_from_a_state_that_its_dataset_loaded(workers: int) -> None:
    data = dataset()
    loader = PackedDataLoader(data, num_workers=workers)
    data.load_state_dict(STATE)
    assert loader.state_dict() == STATE == {**data.state_dict(), "slot": 5, "packs_per_step": 1}
    assert tokens(loader) == BATCHES[5:]
    assert loader.slot == WHOLE
    assert len(tokens(loader)) == pytest.approx(WHOLE, abs=2), "then comes the next epoch, a whole one"


def test_a_dataset_resumes_from_a_state_that_its_loader_loaded() -> None:
    data = dataset()
    PackedDataLoader(data).load_state_dict(STATE)
    assert [content(pack) for pack in data] == PACKS[5:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 3, len(BATCHES) - 1, len(BATCHES)])
def test_a_loader_goes_on_behind_what_an_iteration_gave_that_was_left(count: int, workers: int) -> None:
    """Whether it began at a state or an epoch's beginning; one whose last batch was taken has not ended yet either."""
    loader = PackedDataLoader(dataset(), num_workers=workers)
    assert tokens(islice(loader, count)) == BATCHES[:count]
    assert loader.epoch == 0
    assert tokens(loader) == BATCHES[count:]
    second = tokens(islice(loader, 4))
    assert second != BATCHES[:4], "the next epoch"
    resumed = PackedDataLoader(dataset(), num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert tokens(resumed) == tokens(loader)


@pytest.mark.parametrize("peeks", [0, 1])
def test_a_peek_makes_no_resume_skip_an_epoch(peeks: int) -> None:
    """The documented loop trains two epochs, also if it is resumed anywhere, and whether or not someone peeked."""
    made = PackedDataLoader(dataset())
    for _ in range(peeks):
        next(iter(made))
    states, trained = [], tokens([])
    for _ in range(made.epoch, 2):
        for batch in made:
            trained += tokens([batch])
            states.append(made.state_dict())
    whole = BATCHES + tokens(PackedDataLoader(_in_epoch_1()))
    assert trained == whole[peeks:]
    for number, state in enumerate(states, start=1):
        loader = PackedDataLoader(dataset())
        loader.load_state_dict(state)
        rest = [batch for _ in range(loader.epoch, 2) for batch in tokens(loader)]
        assert rest == trained[number:]


def _in_epoch_1() -> IterablePackedDataset:
    data = dataset()
    data.set_epoch(1)
    return data


def test_others_that_iterate_what_a_loader_left_are_refused() -> None:
    loader = PackedDataLoader(dataset())
    loader.load_state_dict(STATE)
    assert tokens(islice(loader, 1)) == BATCHES[5:6]
    with pytest.raises(ValueError, match=PEEKED):
        iter(loader.dataset)
    with pytest.raises(ValueError, match=PEEKED):
        iter(PackedDataLoader(loader.dataset))
    assert tokens(loader) == BATCHES[6:], "it goes on behind what it gave"
    loader.load_state_dict(STATE)
    assert tokens(islice(loader, 1)) == BATCHES[5:6]
    loader.load_state_dict(STATE)
    assert tokens(loader) == BATCHES[5:]
    loader.load_state_dict(STATE)
    next(iter(loader))
    loader.dataset.set_epoch(0)
    assert tokens(loader) == BATCHES


def test_a_partial_iteration_of_the_dataset_is_not_for_its_loader_to_go_on_with() -> None:
    data = dataset()
    loader = PackedDataLoader(data)
    loader.load_state_dict(STATE)
    next(iter(data))
    with pytest.raises(ValueError, match=PEEKED):
        iter(loader)
    assert [content(pack) for pack in data] == PACKS[6:], "it goes on itself"


def test_an_iterator_that_yielded_nothing_leaves_the_state() -> None:
    loader = PackedDataLoader(dataset())
    loader.load_state_dict(STATE)
    for _ in range(3):
        iter(loader)
        iter(loader.dataset)
    assert loader.state_dict() == STATE
    assert tokens(loader) == BATCHES[5:]


class Moody(Numbers):
    broken = False

    def __call__(self, row: Any, /) -> Any:
        if self.broken:
            raise ValueError("not now")
        return super().__call__(row)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_before_the_first_pack_leaves_the_state(workers: int) -> None:
    encode = Moody()
    data = IterablePackedDataset(MapSource(DATA), encoder=encode, **SETTINGS)
    loader = PackedDataLoader(data, num_workers=workers)
    loader.load_state_dict(STATE)
    encode.broken = True
    for _ in range(2):
        with pytest.raises(ValueError, match="not now"):
            next(iter(loader))
        with pytest.raises(ValueError, match="not now"):
            next(iter(data))
    encode.broken = False
    assert tokens(loader) == BATCHES[5:]


def test_without_a_state_a_partial_iteration_is_allowed() -> None:
    loader = PackedDataLoader(dataset())
    next(iter(loader))
    assert len(tokens(loader)) == pytest.approx(WHOLE, abs=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_of_torch_resume_from_a_state_once(workers: int) -> None:
    """The dataset here never knew: every later epoch began with the rest of the first."""
    data = dataset()
    data.load_state_dict(STATE)
    loader = DataLoader(data, batch_size=None, num_workers=workers, collate_fn=_same)
    assert len(list(loader)) == WHOLE - 5
    for _ in range(2):
        assert len(list(loader)) == pytest.approx(WHOLE, abs=2)
    data.load_state_dict(STATE)
    assert len(list(loader)) == WHOLE - 5


def _same(pack: Any) -> Any:
    return pack


def test_a_partial_iteration_in_worker_processes_blocks_the_next() -> None:
    data = dataset(epochs=50)
    data.load_state_dict(STATE)
    loader = DataLoader(data, batch_size=None, num_workers=1, collate_fn=_same)
    iterator = iter(loader)
    next(iterator)
    del iterator
    with pytest.raises(ValueError, match=PEEKED):
        next(iter(loader))
    with pytest.raises(ValueError, match=PEEKED):
        iter(data)


def test_a_dataset_that_a_loader_reads_refuses_to_give_a_state() -> None:
    """What it would say is where it began."""
    data = dataset()
    loader = PackedDataLoader(data)
    next(iter(loader))
    for one in (data, copy.deepcopy(data)):
        with pytest.raises(
            ValueError, match=r"a PackedDataLoader reads this dataset.*call its state_dict\(\)"
        ):
            one.state_dict()
    data.load_state_dict(loader.state_dict())
    data.state_dict()
    list(islice(data, 2))
    assert len(data.state_dict()["lanes"]) == 2


def test_a_dataset_that_worker_processes_read_refuses_to_give_a_state() -> None:
    data = dataset()
    iterator = iter(DataLoader(data, batch_size=None, num_workers=1, collate_fn=_same))
    next(iterator)
    with pytest.raises(
        ValueError, match=r"worker processes of a DataLoader read this dataset.*PackedDataLoader\("
    ):
        data.state_dict()
    del iterator
    iter(data)
    assert data.state_dict()["lanes"] == {}, "this process has begun"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_a_copy_has_the_state_of_the_original(duplicate: Any) -> None:
    data = dataset()
    list(islice(data, 5))
    other = duplicate(duplicate(data))
    assert other.state_dict() == data.state_dict()
    assert other.ledger() == data.ledger()
    list(data)
    after = dataset()
    after.load_state_dict(other.state_dict())
    assert [content(pack) for pack in after] == PACKS[5:]
    loaded = dataset()
    loaded.load_state_dict(STATE)
    assert [content(pack) for pack in duplicate(loaded)] == PACKS[5:]
    assert [content(pack) for pack in loaded] == PACKS[5:], "a copy takes up its own"


def test_persistent_workers_refuse_a_state_loaded_after_they_started() -> None:
    """They do not know it, and began the epoch from its beginning."""
    data = dataset()
    loader = DataLoader(data, batch_size=None, num_workers=1, collate_fn=_same, persistent_workers=True)
    assert len(list(loader)) == WHOLE
    data.load_state_dict(STATE)
    with pytest.raises(ValueError, match="loaded .* after this worker process .* make a new DataLoader"):
        next(iter(loader))
    data.set_epoch(1)
    assert len(list(loader)) == pytest.approx(WHOLE, abs=2), "the state is put aside"


def test_a_later_epoch_may_be_left_early() -> None:
    data = dataset(epochs=50)
    data.load_state_dict(state_after(5) | {"epoch": 0})
    data.epochs = 1
    loader = DataLoader(data, batch_size=None, num_workers=2, collate_fn=_same)
    assert len(list(loader)) == WHOLE - 5
    for epoch in (1, 2):
        assert next(iter(loader))["epoch"] == epoch


def test_more_worker_processes_do_not_resume_from_the_state_again() -> None:
    data = dataset()
    data.load_state_dict(STATE)
    for workers, packs in ((1, WHOLE - 5), (2, WHOLE)):
        loader = DataLoader(data, batch_size=None, num_workers=workers, collate_fn=_same)
        assert len(list(loader)) == pytest.approx(packs, abs=2 if workers == 2 else 0)
    assert {pack["epoch"] for pack in data} == {2}, "and this process comes behind them"


def test_two_loaders_of_one_dataset_keep_their_epochs() -> None:
    """The state of the first said that it had begun with the epoch of the second."""
    data = dataset()
    one, two = PackedDataLoader(data), PackedDataLoader(data)
    begun = tokens(islice(one, 5))
    data.set_epoch(1)
    list(islice(two, 2))
    state = one.state_dict()
    assert (state["epoch"], two.state_dict()["epoch"]) == (0, 1)
    again = PackedDataLoader(dataset())
    again.load_state_dict(state)
    assert begun + tokens(again) == BATCHES


def test_a_copy_of_a_dataset_that_worker_processes_read_refuses_to_give_a_state() -> None:
    data = dataset()
    data.load_state_dict(STATE)
    assert len(list(DataLoader(data, batch_size=None, num_workers=1, collate_fn=_same))) == WHOLE - 5
    other = copy.deepcopy(data)
    with pytest.raises(ValueError, match="worker processes of a DataLoader read this dataset"):
        other.state_dict()
    assert len(list(other)) == pytest.approx(WHOLE, abs=2), "what its original took up is taken up"


def test_a_state_loaded_in_the_middle_of_an_iteration() -> None:
    """An iterator of before goes on by itself and does not use the state up."""
    loader = PackedDataLoader(dataset())
    old = iter(loader)
    found = tokens(islice(old, 3))
    loader.load_state_dict(STATE)
    assert found + tokens(islice(old, 4)) == BATCHES[:7]
    assert loader.state_dict() == STATE
    assert tokens(loader) == BATCHES[5:]
    data = dataset()
    older = iter(data)
    next(older)
    data.load_state_dict(STATE)
    assert content(next(older)) == PACKS[1]
    assert [content(pack) for pack in data] == PACKS[5:]
