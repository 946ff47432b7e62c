"""Epochs, peeks and loaded states: iterating again is the next epoch, or goes on behind what was handed out.

Whoever iterates, through whatever loader, with or without worker processes, after a peek, an error or a resume.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import IterablePackedDataset, PackedDataLoader, collate_packed

ROWS = [{"tokens": [i + 1] * 5, "labels": [i + 1] * 5} for i in range(48)]
WHOLE = 24  # packs of an epoch


def dataset(**settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(ROWS, **{"max_seq_len": 10, "shuffle": True, "num_lanes": 2, **settings})


def loader_of(workers: int = 0, data: IterablePackedDataset | None = None) -> PackedDataLoader:
    return PackedDataLoader(data or dataset(), num_workers=workers)


def order(packs: Any) -> list[Any]:
    """What comes, in its order, with the number of its epoch."""
    return [(pack["epoch"], pack["lane"], pack["tokens"].tolist()) for pack in packs]


def tokens(batches: Any) -> list[Any]:
    return [row.tolist() for batch in batches for row in batch.tokens]


def torch_loader(data: Any, workers: int, *, keep: bool = False, context: str = "fork") -> DataLoader[Any]:
    started = {"persistent_workers": keep, "multiprocessing_context": context} if workers else {}
    return DataLoader(data, batch_size=None, num_workers=workers, **started)


EXPECTED = order(dataset(epochs=3))


def epoch(number: int) -> list[Any]:
    return [pack for pack in EXPECTED if pack[0] == number]


def test_the_epochs_of_these_tests() -> None:
    for number in range(3):
        assert len(epoch(number)) == WHOLE
        assert sorted(token for *_, pack in epoch(number) for token in pack) == sorted([*range(1, 49)] * 5)
    assert len({str([pack[1:] for pack in epoch(number)]) for number in range(3)}) == 3, "shuffled anew"
    unshuffled = order(dataset(shuffle=False, epochs=2))
    assert [pack[1:] for pack in unshuffled[:WHOLE]] == [pack[1:] for pack in unshuffled[WHOLE:]]


# Iterating again.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_iterating_again_is_the_next_epoch(workers: int, keep: bool) -> None:
    data = dataset()
    loader: Any = torch_loader(data, workers, keep=keep) if keep or workers else data
    for number in range(3):
        if workers:
            data.set_epoch(number)
        assert sorted(order(loader)) == sorted(epoch(number))
        assert data.epoch == (number if workers else number + 1)
    for _ in range(2):  # also where it is the number that it has
        data.set_epoch(1)
        assert sorted(order(loader)) == sorted(epoch(1)), "what is set wins, over workers that are kept too"
    if not workers:
        assert sorted(order(loader)) == sorted(epoch(2))


def test_worker_processes_that_read_an_epoch_again_say_so() -> None:
    data = dataset()
    loader = torch_loader(data, 2)
    for number in (0, 1):
        data.set_epoch(number)
        assert {pack[0] for pack in order(loader)} == {number}
    again = r"read epoch 1 again, in the same order; call set_epoch\(epoch\)"
    with pytest.raises(UserWarning, match=again):  # here, warnings are errors
        order(loader)
    assert {pack[0] for pack in order(torch_loader(dataset(shuffle=False), 2))} == {0}
    kept = torch_loader(dataset(shuffle=False), 1, keep=True)
    next(iter(kept))
    assert len(list(kept)) == WHOLE, "what a worker has made may not have arrived"


def test_copies_count_for_themselves() -> None:
    data = dataset()
    list(data)
    for made in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert [order(made)[0][0] for _ in range(2)] == [1, 2]
    assert order(data) == epoch(1)


# Endless and longer runs.


def test_an_endless_stream_continues_with_the_next_epoch() -> None:
    """Its samples share packs over an epoch's end, and one comes at most once more often than another."""
    rows = [{"tokens": [i + 1] * (2 + i % 7), "labels": [i + 1] * (2 + i % 7)} for i in range(40)]
    endless = IterablePackedDataset(rows, max_seq_len=24, epochs=None, num_lanes=2, shuffle=True)
    packs = [*islice(endless, 200)]
    assert {pack["epoch"] for pack in packs} == {0}
    padded = sum(24 - int(pack["seq_lens"][: pack["num_seqs"]].sum()) for pack in packs)
    assert padded < 24, "no part-empty pack at an epoch's end"
    times = Counter(fragment.row_id for pack in packs for fragment in pack["fragments"])
    assert len(times) == 40
    assert 15 < min(times.values()) <= max(times.values()) <= min(times.values()) + 2


@pytest.mark.parametrize("first", [1, 2])
def test_an_ended_run_resumes_when_it_is_given_more_epochs(first: int) -> None:
    before, longer, endless = dataset(epochs=first), dataset(epochs=first + 1), dataset(epochs=None)
    list(before)
    for after in (longer, endless):
        after.load_state_dict(before.state_dict())
    assert order(longer) == epoch(first)
    assert {token for pack in islice(endless, 30) for token in pack["tokens"].tolist()} == {*range(1, 49)}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("stop", [1, 5, 20])
def test_an_epoch_that_was_set_is_in_the_state(stop: int, told: bool) -> None:
    """Stopped when not every lane has yielded, and resumed by someone who may not know the epoch."""
    before, after = dataset(), dataset()
    before.set_epoch(2)
    list(islice(before, stop))
    after.load_state_dict(before.state_dict())
    assert after.epoch == 2
    if told:
        after.set_epoch(2)
    assert order(after) == epoch(2)[stop:]


# Peeks: whoever iterates again goes on behind what was given.

Seen = Counter[tuple[int, int]]
EPOCHS = 2
BOTH = Counter({(number, row): 1 for number in range(EPOCHS) for row in range(1, 49)})


def rows_of(found: Any) -> set[int]:
    """The rows in a pack or a batch: all tokens of a row are its number."""
    return {int(token) for token in found.flatten() if token}


def train(loader: Any, *, counter: Any, seen: Seen, until: int | None = None, setting: bool = False) -> None:
    """The documented loop; ``counter`` is what has ``epoch``."""
    trained = 0
    for number in range(counter.epoch, EPOCHS):
        if setting:
            counter.set_epoch(number)
        for batch in loader:
            seen.update((number, row) for row in rows_of(batch.tokens))
            trained += 1
            if trained == until:
                return


def stateful(*args: Any, **settings: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(*args, **settings)


def own(data: IterablePackedDataset, batch_size: int, collate_fn: Any) -> PackedDataLoader:
    return PackedDataLoader(data, batch_size=batch_size)


def own_with_workers(data: IterablePackedDataset, batch_size: int, collate_fn: Any) -> PackedDataLoader:
    return PackedDataLoader(data, batch_size=batch_size, num_workers=2)


@pytest.mark.parametrize(
    ("make", "until"),
    [
        *((make, until) for make in (own, DataLoader, stateful) for until in (None, 1, 11, 12, 20)),
        (own_with_workers, None),
        (own_with_workers, 11),
    ],
)
def test_a_peek_and_a_resume_skip_no_epoch(make: Callable[..., Any], until: int | None) -> None:
    """The peek used up the first epoch, so that the last one was numbered 2 and a resume within it trained nothing."""
    seen: Seen = Counter()
    data, after = dataset(), dataset()
    loader, resumed = (make(each, batch_size=2, collate_fn=collate_packed) for each in (data, after))
    seen.update((0, row) for row in rows_of(next(iter(loader)).tokens))
    of_loader = isinstance(loader, PackedDataLoader)
    train(loader, counter=loader if of_loader else data, seen=seen, until=until)
    if until is not None:
        if of_loader:
            resumed.load_state_dict(loader.state_dict())
        else:
            after.load_state_dict(data.state_dict())
        train(resumed, counter=resumed if of_loader else after, seen=seen)
    assert seen == BOTH


@pytest.mark.parametrize("make", [DataLoader, stateful])
def test_a_peek_through_worker_processes_of_others_skips_no_epoch(make: Callable[..., Any]) -> None:
    data, seen = dataset(), Counter[tuple[int, int]]()
    loader = make(data, batch_size=2, num_workers=2, collate_fn=collate_packed)
    next(iter(loader))
    train(loader, counter=data, seen=seen, setting=True)
    assert seen == BOTH


def test_another_loader_goes_on_behind_what_was_given() -> None:
    data, seen = dataset(), Counter[tuple[int, int]]()
    for peeked in (next(iter(PackedDataLoader(data))).tokens, next(iter(data))["tokens"]):
        seen.update((0, row) for row in rows_of(peeked))
    loader = PackedDataLoader(data, batch_size=2)
    train(loader, counter=loader, seen=seen)
    assert seen == BOTH


@pytest.mark.parametrize(
    ("door", "count"), [*((dataset, count) for count in (1, 4, WHOLE - 1)), (loader_of, 0), (loader_of, 4)]
)
def test_a_new_iteration_goes_on_behind_what_the_one_before_gave(door: Callable[[], Any], count: int) -> None:
    """Whether it began at a state or an epoch's beginning."""

    def found(packs: Any) -> list[Any]:
        return order(packs) if door is dataset else tokens(packs)

    def wanted(number: int) -> list[Any]:
        return epoch(number) if door is dataset else [pack[2] for pack in epoch(number)]

    data = door()
    assert found(islice(data, count)) + found(data) == wanted(0)
    begun = found(islice(data, count))
    after = door()
    after.load_state_dict(data.state_dict())
    assert begun + found(after) == wanted(1)
    assert found(after) == wanted(2)
    getattr(data, "dataset", data).set_epoch(2)
    assert found(data) == wanted(2), "unless an epoch is set"


def test_parts_of_an_epoch_follow_one_another(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of()
    first, second = (tokens(islice(loader, 12)) for _ in range(2))
    assert first + second == [pack[2] for pack in epoch(0)]
    assert not caplog.records
    assert list(loader) == [], "the end of the epoch, as after a resume"
    assert "this iteration gave nothing: the one before stopped after the last batch" in caplog.text
    assert len(list(loader)) == WHOLE
    data = dataset()
    assert [len(list(islice(data, WHOLE))) for _ in range(3)] == [WHOLE, 0, WHOLE]
    assert len(caplog.records) == 2
    loader.dataset.set_epoch(0)
    begun = tokens(islice(loader, 1))
    assert begun + tokens(loader) == first + second
    assert len(caplog.records) == 2


# Loaded states: taken up once, by whoever iterates first, and nobody gives another's.

PACKS = tokens(PackedDataLoader(dataset()))


def state_after(count: int) -> dict[str, Any]:
    loader = loader_of()
    list(islice(loader, count))
    return loader.state_dict()


STATE = state_after(5)
PEEKED = r"began in the middle of an epoch, and where they stopped.*load the state again.*set_epoch"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_and_its_dataset_share_a_loaded_state(workers: int) -> None:
    data = dataset()
    loader = loader_of(workers, data)
    data.load_state_dict(STATE)
    assert loader.state_dict() == STATE
    assert data.state_dict() == STATE
    for _ in range(3):
        iter(loader)
        iter(data)
    assert loader.state_dict() == STATE, "an iterator that yielded nothing leaves it"
    assert tokens(loader) == PACKS[5:]
    assert loader.state_dict()["slot"] == WHOLE
    assert len(tokens(loader)) == WHOLE, "then comes the next epoch, a whole one"
    loader.load_state_dict(STATE)
    assert [pack["tokens"].tolist() for pack in data] == PACKS[5:]


def test_an_iterator_of_before_does_not_move_where_a_later_one_has_begun() -> None:
    data = dataset()
    before, loader = iter(data), loader_of(0, data)
    first = next(before)["tokens"].tolist()
    batches, begun = iter(loader), loader.state_dict()
    assert next(before)["tokens"].tolist() != first
    assert loader.state_dict() == begun
    assert [first, *tokens(batches)] == [pack[2] for pack in epoch(0)]


def test_whoever_iterates_goes_on_behind_what_others_gave_of_a_loaded_state() -> None:
    loader = loader_of()
    loader.load_state_dict(STATE)
    assert tokens(islice(loader, 1)) == PACKS[5:6]
    assert [pack["tokens"].tolist() for pack in islice(loader.dataset, 1)] == PACKS[6:7]
    assert tokens(islice(PackedDataLoader(loader.dataset), 1)) == PACKS[7:8]
    assert tokens(loader) == PACKS[8:]
    for again in (lambda: loader.load_state_dict(STATE), lambda: loader.dataset.set_epoch(0)):
        loader.load_state_dict(STATE)
        next(iter(loader))
        again()
        assert tokens(loader)[-19:] == PACKS[5:]


def test_a_state_loaded_in_the_middle_of_an_iteration() -> None:
    """An iterator of before goes on by itself and does not use the state up."""
    loader = loader_of()
    old = iter(loader)
    found = tokens(islice(old, 3))
    loader.load_state_dict(STATE)
    assert found + tokens(islice(old, 4)) == PACKS[:7]
    assert loader.state_dict() == STATE
    own = iter(loader.dataset)
    next(own)
    loader.load_state_dict(STATE)
    assert len([*own]) == WHOLE - 6
    assert loader.state_dict() == STATE, "one of the dataset, too"
    assert tokens(loader) == PACKS[5:]


def test_a_loader_gives_no_state_of_what_another_handed_out() -> None:
    data = dataset()
    one, two = PackedDataLoader(data), PackedDataLoader(data)
    list(islice(one, 5))
    assert one.state_dict() == STATE
    list(islice(two, 2))
    with pytest.raises(ValueError, match="begun by another.*make a dataset for each"):
        one.state_dict()
    assert two.state_dict() == state_after(7)
    data.load_state_dict(STATE)
    assert one.state_dict() == STATE


class Moody:
    """Fails until it is told not to."""

    broken = False

    def __call__(self, row: Any) -> Any:
        if self.broken:
            raise ValueError("not now")
        return row


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_before_the_first_pack_leaves_the_state(workers: int) -> None:
    encode = Moody()
    data = dataset(encoder=encode)
    loader = loader_of(workers, data)
    list(islice(loader, 5))
    loader.load_state_dict(loader.state_dict())
    encode.broken = True
    for _ in range(2):
        for door in (loader, data):
            with pytest.raises(ValueError, match="not now"):
                next(iter(door))
    encode.broken = False
    assert tokens(loader) == PACKS[5:]


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_of_torch_resume_from_a_state_once(workers: int) -> None:
    """The dataset here never knew: every later epoch began with the rest of the first."""
    data = dataset()
    data.load_state_dict(STATE)
    loader = torch_loader(data, workers)
    for number in range(data.epoch, 2):
        data.set_epoch(number)
        assert len(list(loader)) == (WHOLE, WHOLE - 5)[number == 0]
    data.load_state_dict(STATE)
    assert len(list(loader)) == WHOLE - 5
    with pytest.raises(ValueError, match=f"(?s){PEEKED}"):
        list(loader)


def test_persistent_workers_refuse_a_state_loaded_after_they_started() -> None:
    """They do not know it, and began the epoch from its beginning."""
    data = dataset()
    loader = torch_loader(data, 1, keep=True)
    assert len(list(loader)) == WHOLE
    data.load_state_dict(STATE)
    with pytest.raises(ValueError, match="loaded .* after this worker process .* make a new DataLoader"):
        next(iter(loader))
    data.set_epoch(1)
    assert len(list(loader)) == WHOLE, "the state is put aside"


def test_a_partial_iteration_in_worker_processes_blocks_the_next() -> None:
    data = dataset(epochs=50)
    data.load_state_dict(STATE)
    loader = torch_loader(data, 1)
    iterator = iter(loader)
    next(iterator)
    del iterator
    for iterate in (lambda: next(iter(loader)), lambda: next(iter(data))):
        with pytest.raises(ValueError, match=f"(?s){PEEKED}"):
            iterate()


def test_a_dataset_that_worker_processes_read_refuses_to_give_a_state() -> None:
    """What it would say is where it began."""
    data = dataset()
    iterator = iter(torch_loader(data, 1))
    next(iterator)
    who = r"worker processes of a DataLoader read this dataset.*PackedDataLoader\("
    for one in (data, copy.deepcopy(data)):
        for ask in (one.state_dict, one.ledger, one.source_stats):
            with pytest.raises(ValueError, match=who):
                ask()
    del iterator
    data.load_state_dict(STATE)
    list(islice(data, 2))
    assert len(data.state_dict()["lanes"]) == 2, "this process has begun"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_a_copy_has_the_state_of_the_original(duplicate: Any) -> None:
    data = dataset()
    list(islice(data, 5))
    other = duplicate(duplicate(data))
    assert other.state_dict() == data.state_dict()
    assert other.ledger() == data.ledger()
    list(data)
    for loaded in (dataset(), dataset()):
        loaded.load_state_dict(other.state_dict())
        assert order(duplicate(loaded)) == order(loaded) == epoch(0)[5:], "a copy takes up its own"


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_go_on_behind_what_this_process_gave(context: str) -> None:
    """Spawned ones began at the loaded state, of which some packs were given here."""
    data = dataset()
    data.load_state_dict(STATE)
    list(islice(data, 3))
    assert [pack["tokens"].tolist() for pack in torch_loader(data, 1, context=context)] == PACKS[8:]


def test_an_iteration_that_has_ended_ends_again() -> None:
    loader = loader_of()
    iterator = iter(loader)
    list(iterator)
    list(islice(loader, 2))
    assert next(iterator, None) is None
    assert loader.dataset.epoch == 1
    assert tokens(loader) == [pack[2] for pack in epoch(1)[2:]]


def parts_of(loader: Any) -> list[dict[str, Any]]:
    """Return the states of the dataset in the workers of torchdata's loader, which has them deep in its own."""
    found: list[dict[str, Any]] = []

    def look(inside: Any) -> None:
        if isinstance(inside, dict) and "lanes" in inside:
            found.append(inside)
        for value in inside.values() if isinstance(inside, dict) else ():
            look(value)

    look(loader.state_dict())
    return found


def merged(states: list[dict[str, Any]], *, head: int = 0) -> dict[str, Any]:
    """One of the states, with the lanes of all."""
    return {**states[head], "lanes": {lane: own for each in states for lane, own in each["lanes"].items()}}


@pytest.mark.filterwarnings("error:.*consumer")
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("before", [0, 5, 11])
def test_the_merged_states_of_workers_are_the_state_of_the_run(before: int, batch_size: int | None) -> None:
    """Also of lanes that have not begun, and behind a loaded state, which has the lanes of both workers."""
    data, other = dataset(num_lanes=8), dataset(num_lanes=8)
    first = order(islice(data, before))
    other.load_state_dict(data.state_dict())
    loader = stateful(other, batch_size=batch_size, num_workers=2, collate_fn=as_it_is)
    batches = iter(loader)
    for _ in range(4):
        states = parts_of(loader)
        assert [sorted(state["lanes"]) for state in states] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        for head in range(2):
            rest = dataset(num_lanes=8)
            rest.load_state_dict(json.loads(json.dumps(merged(states, head=head))))
            assert sorted([*first, *order(rest)]) == sorted(order(dataset(num_lanes=8)))
        batch = next(batches)
        first += order(batch if batch_size else [batch])


def as_it_is(given: Any) -> Any:
    return given


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_merged_states_that_lack_a_lane_or_have_it_of_another_step_are_refused() -> None:
    """Such a lane would begin its epoch again, or its rows would be trained twice, or skipped."""
    steps = []
    loader = stateful(dataset(num_lanes=8), batch_size=None, num_workers=2)
    for _ in islice(loader, 19):
        steps.append(parts_of(loader))
    others = stateful(dataset(num_lanes=8), batch_size=None, num_workers=4)
    list(islice(others, 10))
    early, late, of_four = steps[9], merged(steps[18])["lanes"], merged(parts_of(others))["lanes"]
    dataset(num_lanes=8).load_state_dict(merged(early))
    wrong = []
    for head, lane in itertools.product(range(2), range(8)):
        lanes = merged(early)["lanes"]
        wrong += [
            merged(early, head=head) | {"lanes": changed}
            for changed in (
                {number: own for number, own in lanes.items() if number != lane},
                {**lanes, lane: late[lane]},
                {**lanes, lane: of_four[lane]},
                {**lanes, **{number: of_four[number] for number in range(lane % 2, 8, 2)}},
            )
        ]
    for state in wrong:
        with pytest.raises(ValueError, match=r"damaged or was edited: its lane \d is missing, or of another"):
            dataset(num_lanes=8).load_state_dict(state)
    for part in early:
        with pytest.raises(ValueError, match="of one worker process.* merged states of all workers"):
            dataset(num_lanes=8).load_state_dict(part)
