"""A run goes on when files of its corpus were added, removed or changed."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader, IterableDataset

from streampack import IterablePackedDataset, JSONLSource, Mix, PackedDataLoader, ParquetSource
from streampack.sources.holdout import Holdout, hold_out
from tests.support.conformance import content
from tests.support.corpus import STRIDE, Numbers, write
from tests.support.mixtures import entry, make

PER_FILE = 1000  # room for the numbers of a file's rows

Rows = dict[str, list[dict[str, int]]]  # of each file


def new_rows(rng: random.Random, number: int) -> list[dict[str, int]]:
    return [{"i": PER_FILE * number + k, "n": rng.randint(1, 30)} for k in range(rng.randint(3, 25))]


def write_files(folder: Path, files: Rows, *, kind: str = "jsonl") -> Any:
    """Write the files of a corpus, and nothing else, into a folder; return their source."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, rows in files.items():
        if kind == "jsonl":
            write(folder / f"{name}.jsonl", rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=6)
    return JSONLSource(folder) if kind == "jsonl" else ParquetSource(folder)


def changed(rng: random.Random, files: Rows, numbers: Iterable[int]) -> Rows:
    """Remove a file, change another, add one to three new ones."""
    kept = dict(files)
    gone, other = rng.sample(sorted(kept), 2)
    del kept[gone]
    kept[other] = new_rows(rng, next(iter(numbers)))
    for number in itertools.islice(numbers, rng.randint(1, 3)):
        kept[f"{rng.choice('amz')}{number}"] = new_rows(rng, number)
    return kept


def tokens_of(packs: Iterable[Mapping[str, Any]], epoch: int | None = None) -> Counter[int]:
    """Count the tokens in packs, of one epoch or of all."""
    found: Counter[int] = Counter()
    for pack in packs:
        if epoch is None or pack["epoch"] == epoch:
            found.update(pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist())
    return found


def resumed(data: IterablePackedDataset, state: Mapping[str, Any]) -> IterablePackedDataset:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the corpus changed|the mixture's weights changed")
        data.load_state_dict(state)
    return data


def untouched(before: Rows, now: Rows) -> Rows:
    return {name: rows for name, rows in before.items() if now.get(name) == rows}


def waiting_of(data: IterablePackedDataset, files: Iterable[str]) -> int:
    """Count the tokens that wait of some files."""
    assert data._stream is not None
    shard, total = data.lane_config.source.shard, 0
    for lane in data._stream.lanes:
        for i, piece in enumerate(lane.planner.waiting + lane.piece_reader.pending):
            if shard(piece.row_id).rpartition("/")[2].partition(".")[0] in files:
                total += piece.length - (lane.planner.offset if i == 0 else 0)
    return total


def check_exact(data: IterablePackedDataset, make_again: Callable[[], IterablePackedDataset]) -> None:
    """Another process goes on from the states of this one as this one does."""
    state = data.state_dict()
    ours = resumed(make_again(), state)
    packs, states = [], []
    for pack in itertools.islice(ours, 4):
        packs.append(content(pack))
        states.append(ours.state_dict())
    for k, middle in enumerate([state, *states]):
        other = resumed(make_again(), middle)
        assert [content(pack) for pack in itertools.islice(other, 4 - k)] == packs[k:]
        if k < len(packs):
            assert comparable(other.state_dict()) == comparable(states[-1])


def comparable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without the checksums of where lanes stand, which are not kept over a change."""
    lanes = {
        lane: {name: value for name, value in found.items() if name not in ("reached", "checksum")}
        for lane, found in state["lanes"].items()
    }
    return {**state, "lanes": lanes}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("seed", range(12))
def test_untouched_files_come_once_an_epoch_and_new_ones_from_the_next_on(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """Two changes, after random packs of three epochs; the states after a change resume exactly."""
    rng, numbers = random.Random(seed), itertools.count(0)
    files = {f"f{number}": new_rows(rng, number) for number in itertools.islice(numbers, 7)}
    settings: dict[str, Any] = {
        "epochs": 3,
        "num_lanes": rng.choice([1, 3]),
        "shuffle": seed % 3 > 0,
        "shuffle_window": rng.choice([5, 40]),
        "overlong": rng.choice(["split", "drop"]),
        "split_across_pack": seed % 4 == 3,
        "buffer_size": rng.choice([2, 8, 30]),
        "seed": seed,
        "corpus_changes": "allow",
        "corpus_lists": tmp_path / "lists",
    }
    longest = 24 if settings["overlong"] == "drop" else 30
    lists, begins, packs, removed = [files], [0], [], 0
    data = make(write_files(tmp_path / "data", files, kind=kind), **settings)
    for cut in (rng.randint(1, 40), rng.randint(1, 40), None):
        got = list(itertools.islice(data, cut))
        packs += got
        if cut is None:
            break
        state = data.state_dict()
        epoch = max(lane["epoch"] for lane in state["lanes"].values())
        files = changed(rng, lists[-1], numbers)
        gone = set(lists[-1]) - set(untouched(lists[-1], files))
        removed += waiting_of(data, gone)
        lists.append(files)
        begins.append(epoch + 1)
        source = write_files(tmp_path / "data", files, kind=kind)
        data = resumed(make(source, **settings), state)
        check_gone = everything([{name: lists[-2][name] for name in gone}], longest)
        ahead = resumed(make(source, **settings), state)
        assert not tokens_of(ahead) & check_gone, "of what is gone nothing more comes"
        data = resumed(make(source, **settings), state)
        check_exact(data, lambda source=source: make(source, **settings))

    for epoch in range(3):
        now = max(i for i, begin in enumerate(begins) if begin <= epoch)
        # Files that a change in this epoch removed may have come before it.
        kept = lists[now]
        for i in range(now + 1, len(lists)):
            if begins[i] == epoch + 1:
                kept = untouched(kept, lists[i])
        found = tokens_of(packs, epoch)
        assert not everything([kept], longest) - found, f"missing in epoch {epoch}"
        assert not found - everything([lists[now]], longest), f"twice or of another list in epoch {epoch}"
    ledger = data.ledger()
    assert ledger.buffered == 0
    assert ledger.packed == tokens_of(packs).total()
    assert ledger.dropped["removed"] == removed


def everything(lists: Iterable[Rows], longest: int) -> Counter[int]:
    """Count the tokens of the rows of some lists that are not too long."""
    return Counter(
        STRIDE * row["i"] + 1 + k
        for files in lists
        for rows in files.values()
        for row in rows
        if row["n"] <= longest
        for k in range(row["n"])
    )


def mixture(
    folder: Path, files: Mapping[str, Rows], weights: Mapping[str, float], *, stop: str = "never"
) -> Mix:
    """A mixture of folders of JSON lines, of which those without a weight are left out."""
    sources = [entry(name, write_files(folder / name, files[name]), weights[name]) for name in weights]
    return Mix(sources, stop=stop)


def sources_of(packs: Iterable[Mapping[str, Any]], files: Mapping[str, Rows]) -> dict[str, int]:
    """Count the tokens of each source in packs."""
    found = tokens_of(packs)
    return {name: sum(found[token] for token in everything([rows], PER_FILE)) for name, rows in files.items()}


MIXED: dict[str, Any] = {
    "epochs": None,
    "num_lanes": 2,
    "overlong": "split",
    "shuffle": True,
    "shuffle_window": 6,
    "corpus_changes": "allow",
}

SIZES = (("a", 500), ("b", 20))
ALLOWED: dict[str, Any] = {"overlong": "split", "corpus_changes": "allow"}


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_goes_on_without_a_source_with_a_new_one_and_with_other_files(
    seed: int, tmp_path: Path
) -> None:
    rng, numbers = random.Random(seed), itertools.count(0)
    files = {
        name: {f"{name}{number}": new_rows(rng, number) for number in itertools.islice(numbers, 4)}
        for name in ("a", "b", "c", "d")
    }
    settings = {**MIXED, "corpus_lists": tmp_path / "lists", "seed": seed}

    def again() -> IterablePackedDataset:
        return make(mixture(tmp_path, files, weights), **settings)

    weights: dict[str, float] = {"a": 1, "b": 2, "c": 3}
    data = again()
    list(itertools.islice(data, rng.randint(5, 40)))
    state = data.state_dict()
    waited, before = waiting_of(data, {*files["b"]}), data.source_stats()
    weights = {"c": 3, "d": 2, "a": 1}
    data = resumed(again(), state)
    packs = list(itertools.islice(data, 150))
    assert sources_of(packs, files)["b"] == 0, "the source is gone"
    assert data.ledger().dropped["removed"] == waited
    gained = {name: stats.trained for name, stats in data.source_stats().items()}
    for name in ("a", "c"):
        gained[name] -= before[name].trained
    total = sum(gained.values())
    for name, weight in weights.items():
        assert abs(gained[name] / total - weight / 6) < 0.08, gained
    check_exact(data, again)

    # A file of one source goes, one of another changes, one joins: the third source goes on as it would have.
    state, gone = data.state_dict(), sorted(files["a"])[0]
    old = {**files, "a": {gone: files["a"].pop(gone)}, "c": {}}
    changed_file = sorted(files["c"])[1]
    old["c"] = {changed_file: files["c"][changed_file]}
    files["c"][changed_file] = new_rows(rng, 50)
    files["d"]["d99"] = new_rows(rng, 51)
    data = resumed(again(), state)
    packs = list(itertools.islice(data, 500))
    found = sources_of(packs, {"gone": old["a"], "changed": old["c"], "new": {"d99": files["d"]["d99"]}})
    assert found["gone"] == found["changed"] == 0
    assert found["new"] > 0
    check_exact(data, again)


@pytest.mark.parametrize("stop", ["never", "all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_mixture_goes_on_where_all_files_of_a_small_source_were_replaced(
    rows: int, lanes: int, stop: str, tmp_path: Path
) -> None:
    """Lanes are in different passes over it, and the one that is behind has none of its rows until the others' next."""
    big = {f"b{i}": [{"i": PER_FILE * i + k, "n": 5} for k in range(20)] for i in range(6)}
    old = {"small": [{"i": PER_FILE * 50 + k, "n": 4} for k in range(lanes - 1)]}
    new = {"small": [{"i": PER_FILE * 60 + k, "n": 4} for k in range(rows)]}
    settings = {**MIXED, "num_lanes": lanes, "epochs": None if stop == "never" else 3}
    settings["corpus_lists"] = tmp_path / "lists"

    def again(small: Rows) -> IterablePackedDataset:
        files = {"big": big, "small": small}
        return make(mixture(tmp_path, files, {"big": 3, "small": 1}, stop=stop), **settings)

    running, states, between = again(old), [], []
    for number, pack in enumerate(itertools.islice(running, 70)):
        state = running.state_dict()
        apart = len({lane["epoch"] for lane in state["lanes"].values()}) > 1
        if len(state["lanes"]) == lanes and (number % 20 == 9 or (apart and pack["epoch"] < 2)):
            states.append((pack["epoch"], state))
            between.append(apart)
    for latest, state in states:
        data = resumed(again(new), state)
        packs = list(itertools.islice(data, 120))
        assert sources_of(packs, {"old": old})["old"] == 0
        if stop == "never":
            assert not everything([new, big], PER_FILE) - tokens_of(packs)
            check_exact(resumed(again(new), state), lambda: again(new))
        elif stop == "all_exhausted" and latest < 2:
            assert not everything([new, big], PER_FILE) - tokens_of(packs, 2)
    assert any(between) or stop != "all_exhausted", "no state had lanes in two epochs"


def test_a_source_of_weight_0_is_not_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    files = {name: {f"{name}0": new_rows(rng, i)} for i, name in enumerate(("a", "b", "c"))}
    settings = {**MIXED, "corpus_lists": tmp_path / "lists"}
    data = make(mixture(tmp_path, files, {"a": 1, "b": 1, "c": 0}), **settings)
    found = sources_of(itertools.islice(data, 40), files)
    assert found["a"] > 0 < found["b"]
    assert found["c"] == 0
    state = data.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the mixture's weights changed")
        data = resumed(make(mixture(tmp_path, files, {"a": 0, "b": 1, "c": 1}), **settings), state)
    waited = waiting_of(resumed_stream(data), {"a0"})
    found = sources_of(itertools.islice(data, 60), files)
    assert found["a"] == waited, "what waited is packed"
    assert found["b"] > 0 < found["c"]
    with pytest.raises(ValueError, match="all sources of the mixture have weight=0; give at least one"):
        mixture(tmp_path, files, {"a": 0, "b": 0})


def resumed_stream(data: IterablePackedDataset) -> IterablePackedDataset:
    """Open the lanes of a resumed dataset without reading on."""
    other = make(data.lane_config.source, **MIXED, corpus_lists=data._changes.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(data.state_dict())
    other._stream = other.stream()
    for lane in other._stream.lanes:
        lane.restore()
    return other


def test_the_error_names_what_was_added_removed_and_changed(tmp_path: Path) -> None:
    rng = random.Random(1)
    files = {f"f{i}": new_rows(rng, i) for i in range(5)}
    settings = {"num_lanes": 2, "overlong": "split", "corpus_lists": tmp_path / "lists"}
    data = make(write_files(tmp_path / "data", files), **settings)
    list(itertools.islice(data, 5))
    state = data.state_dict()
    same_size = [{**row, "i": row["i"] + PER_FILE} for row in files["f1"]]
    now = {**files, "f1": same_size, "g0": new_rows(rng, 8), "g1": new_rows(rng, 9)}
    del now["f3"]
    source = write_files(tmp_path / "data", now)
    with pytest.raises(ValueError) as error:
        make(source, **settings).load_state_dict(state)
    assert str(error.value) == (
        f"the corpus is not the one that the state was made with: 2 added ({tmp_path}/data/g0.jsonl, "
        f"{tmp_path}/data/g1.jsonl), 1 removed (f3.jsonl), 1 changed ({tmp_path}/data/f1.jsonl). "
        'Resume with what the run began with, or set corpus_changes="allow" to go on with this '
        "one. Added files are read from the next epoch of their source on; of removed and changed ones nothing more is "
        "read, and what waited of them is dropped"
    )
    allowed = {**settings, "corpus_changes": "allow"}
    with pytest.warns(
        UserWarning, match=r"^the corpus changed since the state was made: 2 added .*/g1.jsonl"
    ):
        make(source, **allowed).load_state_dict(state)
    [kept] = (tmp_path / "lists").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"\.json\.gz is damaged .*; restore it from a copy"):
        make(source, **allowed).load_state_dict(state)
    kept.unlink()
    kept.mkdir()  # as good as any other reason why a file that is there cannot be read
    with pytest.raises(IsADirectoryError):
        make(source, **allowed).load_state_dict(state)
    kept.rmdir()
    with pytest.raises(
        ValueError, match=r"\.json\.gz is missing: the list of the files that the run began with"
    ):
        make(source, **allowed).load_state_dict(state)
    with pytest.raises(ValueError, match='corpus_changes="allow" needs corpus_lists'):
        make(source, corpus_changes="allow")
    for broken in ({"": []}, {"": [[0, "../x"]]}, {"": [["0", "a"]]}, {"": None}):
        with pytest.raises(
            ValueError, match="the state is damaged: it has no history of the files of a source"
        ):
            make(source, **allowed).load_state_dict({**state, "corpus": broken})


def test_another_setting_is_refused_where_changes_are_allowed(tmp_path: Path) -> None:
    rng = random.Random(1)
    files = {f"f{i}": new_rows(rng, i) for i in range(5)}
    settings = {
        "corpus_changes": "allow",
        "corpus_lists": tmp_path / "lists",
        "overlong": "split",
        "num_lanes": 1,
    }
    data = make(write_files(tmp_path / "data", files), **settings)
    list(itertools.islice(data, 5))
    state = data.state_dict()
    del files["f2"]
    source = write_files(tmp_path / "data", files)
    with pytest.raises(ValueError, match="with seed=0 and this dataset has seed=1"):
        make(source, **settings, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="with another encoder"):
        make(source, **settings, encoder=Numbers("other")).load_state_dict(state)


def test_without_shuffling_the_order_is_that_of_a_run_that_never_changed(tmp_path: Path) -> None:
    rng = random.Random(3)
    files = {f"f{i}": new_rows(rng, i) for i in range(6)}
    settings: dict[str, Any] = {
        "num_lanes": 1, "overlong": "split", "strategy": "next_fit", "buffer_size": 1, "corpus_changes": "allow",
        "corpus_lists": tmp_path / "lists",
    }  # fmt: skip
    data = make(write_files(tmp_path / "data", files), **settings)
    iterator = iter(data)
    first = list(itertools.islice(iterator, 12))
    state = data.state_dict()
    never_changed = [fragment.row_id for pack in iterator for fragment in pack["fragments"]]
    number = never_changed[0][0]  # of the file that is being read
    gone = sorted(files)[number]
    del files[gone]
    data = resumed(make(write_files(tmp_path / "data", files), **settings), state)
    found = [fragment.row_id for pack in data for fragment in pack["fragments"]]
    assert found == [(file - (file > number), offset) for file, offset in never_changed if file != number]
    assert len(first) == 12


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_hold_out_holds_where_files_change(part: str, tmp_path: Path) -> None:
    """The held-out rows of a removed file, which nobody can tell from the others any more, shift no number."""
    rng = random.Random(5)
    files = {f"f{i}": new_rows(rng, i) for i in range(6)}
    settings: dict[str, Any] = {
        "num_lanes": 1, "overlong": "split", "shuffle": True, "shuffle_window": 500, "epochs": 2,
        "corpus_changes": "allow", "corpus_lists": tmp_path / "lists",
    }  # fmt: skip

    def again() -> IterablePackedDataset:
        train, held_out = hold_out(write_files(tmp_path / "data", files), fraction=0.3)
        return make(train if part == "train" else held_out, **settings)

    data = again()
    packs = list(itertools.islice(data, 8 if part == "train" else 3))
    state, before = data.state_dict(), dict(files)
    del files["f2"]
    check_exact(resumed(again(), state), again)
    data = resumed(again(), state)
    packs += list(data)
    source = data.lane_config.source
    assert isinstance(source, Holdout)
    kept = {name: [row for row in rows if source.keeps(row)] for name, rows in before.items()}
    gone = everything([{"f2": kept.pop("f2")}], 30)
    assert tokens_of(packs, 0) - gone == everything([kept], 30)
    assert tokens_of(packs, 1) == everything([kept], 30)


def test_the_state_of_one_of_several_consumers_is_refused_where_the_others_decide_when_files_join(
    tmp_path: Path,
) -> None:
    """Each would begin the new list in another epoch, and rows of the other files would be lost or come twice."""

    def make_data(**changes: Any) -> IterablePackedDataset:
        given = {
            "max_seq_len": 32,
            "num_lanes": 2,
            "epochs": 3,
            "corpus_lists": tmp_path / "lists",
            **changes,
        }
        return make(JSONLSource(tmp_path / "files"), **given)

    rng = random.Random(0)
    files = {f"f{number}": new_rows(rng, number) for number in range(4)}
    write_files(tmp_path / "files", files)
    states = list(DataLoader(States(make_data()), batch_size=None, num_workers=2))
    write_files(tmp_path / "files", {**files, "new": new_rows(rng, 9)})
    refused = []
    for state in states[::2]:
        [own] = state["lanes"].values()
        try:
            resumed(make_data(corpus_changes="allow"), state)
        except ValueError as error:
            assert "the state has 1 of 2 lanes, and the others decide, too" in str(error)
            refused.append(own["epoch"])
        else:
            assert own["epoch"] == 0, "the next epoch is the same for all consumers only in the first"
    assert set(refused) == {1, 2}
    merged = {**states[-1], "lanes": {lane: own for state in states for lane, own in state["lanes"].items()}}
    resumed(make_data(corpus_changes="allow"), merged)


class States(IterableDataset[dict[str, Any]]):
    """The states of a dataset after each pack, also in worker processes."""

    def __init__(self, data: IterablePackedDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.data.state_dict() for _ in self.data)


def read(data: IterablePackedDataset, through: str, packs: int | None) -> tuple[Counter[int], dict[str, Any]]:
    """Read so many packs, by a loader or not; return the tokens and the state."""
    reader = data if through == "dataset" else PackedDataLoader(data)
    given = [
        pack["tokens"] if through == "dataset" else pack.tokens for pack in itertools.islice(reader, packs)
    ]
    return Counter(
        token for tokens in given for token in tokens.flatten().tolist() if token
    ), reader.state_dict()


@pytest.mark.parametrize("num_lanes", [None, 3])
@pytest.mark.parametrize("through", ["dataset", "loader"])
def test_a_run_that_has_read_nothing_goes_on_with_other_files(
    through: str, num_lanes: int | None, tmp_path: Path
) -> None:
    rng = random.Random(0)
    files = {f"f{number}": new_rows(rng, number) for number in range(4)}
    now = changed(rng, files, itertools.count(10))
    settings = {**ALLOWED, "num_lanes": num_lanes, "epochs": 2, "corpus_lists": tmp_path / "lists"}
    data = make(write_files(tmp_path / "data", files), **settings)
    state = (data if through == "dataset" else PackedDataLoader(data)).state_dict()
    data = make(write_files(tmp_path / "data", now), **settings)
    with pytest.warns(UserWarning, match="so the run begins with this one"):
        data.load_state_dict(state)
    packs = list(data)
    assert tokens_of(packs, 0) == everything([now], PER_FILE)
    assert tokens_of(packs, 1) == everything([now], PER_FILE)


@pytest.mark.parametrize("through", ["dataset", "loader"])
def test_a_mixture_of_which_one_lane_has_given_nothing_goes_on_with_other_files(
    through: str, tmp_path: Path
) -> None:
    """The other lane may be in a later pass over a small source."""
    big = {f"f{i}": [{"i": PER_FILE * i + k, "n": 5} for k in range(20)] for i in range(4)}
    files = {"big": big, "small": {"s": [{"i": 50 * PER_FILE, "n": 3}]}}
    more = {
        "big": {**big, "new": [{"i": 60 * PER_FILE, "n": 5}]},
        "small": {**files["small"], "new": [{"i": 70 * PER_FILE, "n": 3}]},
    }

    def again(files: Mapping[str, Rows]) -> IterablePackedDataset:
        mix = mixture(tmp_path, files, {"big": 1, "small": 1}, stop="all_exhausted")
        return make(mix, **ALLOWED, num_lanes=2, corpus_lists=tmp_path / "lists")

    begun, state = read(again(files), through, 1)
    assert len(state["lanes"]) == 1
    assert begun[50 * STRIDE * PER_FILE + 1] > 1, "the lane is in a later pass"
    found, _ = read(resumed(again(more), state), through, None)
    both = begun + found
    small = Counter({token: both.pop(token) for token in everything([more["small"]], 3)})
    assert both == everything([big], 5), "each row once, and the new one in the next pass"
    assert len(small) == 6, "the next pass over the small source has begun"
    check_exact(resumed(again(more), state), lambda: again(more))


@pytest.mark.parametrize("gone", ["file", "source"])
def test_the_rest_of_a_giant_row_is_counted_where_its_file_or_source_is_gone(
    gone: str, tmp_path: Path
) -> None:
    files = {
        name: {name: [{"i": PER_FILE * i + k, "n": n} for k in range(3)]} for i, (name, n) in enumerate(SIZES)
    }
    settings = {**ALLOWED, "num_lanes": 1, "corpus_lists": tmp_path / "lists"}

    def again(files: Mapping[str, Rows]) -> IterablePackedDataset:
        if gone == "source":
            return make(mixture(tmp_path, files, dict.fromkeys(files, 1), stop="all_exhausted"), **settings)
        together = {name: rows for part in files.values() for name, rows in part.items()}
        return make(write_files(tmp_path / "data", together), **settings)

    for packs in (1, 7, 13, 19):
        data = again(files)
        given, _ = read(data, "dataset", packs)
        rest = 500 - sum((given & everything([files["a"]], 500)).values())
        now = resumed(again({"b": files["b"]}), data.state_dict())
        next(iter(now))
        assert now.ledger().dropped["removed"] == rest > 0, packs


def test_a_source_whose_files_all_have_other_names_goes_on_under_a_name_of_its_own(tmp_path: Path) -> None:
    """They may be the same files, renamed, of which a row would come twice."""
    files = {"a": {"x": [{"i": i, "n": 5} for i in range(30)]}, "b": {"old": [{"i": PER_FILE, "n": 5}]}}
    other = {"new": [{"i": 2 * PER_FILE, "n": 5}]}
    settings = {**ALLOWED, "num_lanes": 1, "corpus_lists": tmp_path / "lists"}

    def again(files: Mapping[str, Rows]) -> IterablePackedDataset:
        return make(mixture(tmp_path, files, dict.fromkeys(files, 1), stop="all_exhausted"), **settings)

    begun, state = read(again(files), "dataset", 2)
    with pytest.raises(ValueError, match="b: none of the 1 files .* or name this source of the mixture anew"):
        again({**files, "b": other}).load_state_dict(state)
    found, _ = read(resumed(again({"a": files["a"], "c": other}), state), "dataset", None)
    assert begun + found >= everything([files["a"], other], 5)
    assert max((begun + found)[token] for token in everything([files["a"]], 5)) == 1
