"""A run goes on when files of its corpus were added, removed, changed or moved, and names what it cannot go on with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data import DataLoader, IterableDataset

from streampack import (
    Holdout,
    IterablePackedDataset,
    JSONLSource,
    Mix,
    PackedDataLoader,
    TokenShardSource,
)
from streampack.tokenize import tokenize
from tests.harness.changed_files import (
    PER_FILE,
    Rows,
    changed,
    everything,
    new_rows,
    put,
    resumed,
    source_of,
    tokens_of,
)
from tests.harness.conformance import content
from tests.harness.corpus import Numbers, read_all
from tests.harness.mixtures import entry, make


def check_exact(data: IterablePackedDataset, make_again: Callable[[], IterablePackedDataset]) -> None:
    """Another process goes on from the states of this one as this one does."""
    packs, states, ledgers = [], [data.state_dict()], []
    for pack in islice(data, 4):
        packs.append(content(pack))
        states.append(data.state_dict())
        ledgers.append(data.ledger())
    for k, middle in enumerate(states):
        other = resumed(make_again(), middle)
        assert [content(pack) for pack in islice(other, 4 - k)] == packs[k:]
        if k < len(packs):
            assert other.ledger() == ledgers[-1]


def changes_allowed(folder: Path) -> dict[str, Any]:
    return {"corpus_lists": folder / "lists"}


def mixture(
    folder: Path, files: Mapping[str, Rows], weights: Mapping[str, float], *, stop: str = "never"
) -> Mix:
    """A mixture of folders of JSON lines, of which those without a weight are left out."""
    return Mix(
        [entry(name, source_of(folder / name, files[name]), weights[name]) for name in weights], stop=stop
    )


def sources_of(packs: Iterable[Mapping[str, Any]], files: Mapping[str, Rows]) -> dict[str, int]:
    """Count the tokens of each source in packs."""
    found = tokens_of(packs)
    return {name: sum(found[token] for token in everything([rows])) for name, rows in files.items()}


MIXED: dict[str, Any] = {
    "epochs": None,
    "num_lanes": 2,
    "overlong": "split",
    "shuffle": 6,
}


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_goes_on_without_a_source_with_a_new_one_and_with_other_files(
    seed: int, tmp_path: Path
) -> None:
    rng, numbers = random.Random(seed), itertools.count(0)
    files = {
        name: {f"{name}{number}.jsonl": new_rows(rng, number) for number in islice(numbers, 4)}
        for name in "abcd"
    }

    def again() -> IterablePackedDataset:
        return make(mixture(tmp_path, files, weights), **MIXED, **changes_allowed(tmp_path), **planned)

    planned = {"seed": seed, "balance_window": 5 * (seed % 2), "split_across_pack": seed > 1}
    weights: dict[str, float] = {"a": 1, "b": 2, "c": 3}
    data = again()
    list(islice(data, rng.randint(5, 40)))
    state, before = data.state_dict(), data.source_stats()
    weights = {"c": 3, "d": 2, "a": 1}
    data = resumed(again(), state)
    packs = list(islice(data, 150))
    assert sources_of(packs, files)["b"] == 0, "the source is gone"
    assert (
        data.ledger().tokens_in
        == data.ledger().packed + data.ledger().buffered + data.ledger().dropped["removed"]
    )
    gained = {name: stats.trained for name, stats in data.source_stats().items()}
    for name in ("a", "c"):
        gained[name] -= before[name].trained
    for name, weight in weights.items():
        assert abs(gained[name] / sum(gained.values()) - weight / 6) < 0.08, gained
    check_exact(resumed(again(), data.state_dict()), again)

    # A file of one source goes, one of another changes, one joins.
    state, gone, other = data.state_dict(), sorted(files["a"])[0], sorted(files["c"])[1]
    old = {"gone": {gone: files["a"].pop(gone)}, "changed": {other: files["c"][other]}}
    files["c"][other] = new_rows(rng, 50)
    files["d"]["d99.jsonl"] = new_rows(rng, 51)
    data = resumed(again(), state)
    found = sources_of(islice(data, 500), {**old, "new": {"d99": files["d"]["d99.jsonl"]}})
    assert found["gone"] == found["changed"] == 0
    assert found["new"] > 0
    check_exact(resumed(again(), data.state_dict()), again)


def test_a_source_of_weight_0_is_not_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    files = {name: {f"{name}0.jsonl": new_rows(rng, i)} for i, name in enumerate("abc")}

    def new(weights: dict[str, float]) -> IterablePackedDataset:
        return make(mixture(tmp_path, files, weights), **MIXED, **changes_allowed(tmp_path))

    data = new({"a": 1, "b": 1, "c": 0})
    found = sources_of(islice(data, 40), files)
    assert found["a"] > 0 < found["b"]
    assert found["c"] == 0
    data = resumed(new({"a": 0, "b": 1, "c": 1}), data.state_dict())
    waited = data.ledger().buffered
    found, later = (sources_of(islice(data, 60), files) for _ in range(2))
    assert found["a"] <= waited, "what waited is packed"
    assert found["b"] > 0 < found["c"]
    assert later["a"] == 0
    with pytest.raises(ValueError, match="all sources of the mixture have weight=0; give at least one"):
        new({"a": 0, "b": 0})


def test_without_shuffling_the_order_is_that_of_a_run_that_never_changed(tmp_path: Path) -> None:
    rng = random.Random(3)
    files = {f"f{i}.jsonl": new_rows(rng, i) for i in range(6)}
    settings: dict[str, Any] = {
        "num_lanes": 1, "overlong": "split", "strategy": "next_fit", "buffer_size": 1, **changes_allowed(tmp_path)
    }  # fmt: skip
    data = make(source_of(tmp_path / "data", files), **settings)
    iterator = iter(data)
    list(islice(iterator, 12))
    state = data.state_dict()
    never_changed = [fragment.row_id for pack in iterator for fragment in pack["fragments"]]
    number = never_changed[0][0]  # of the file that is being read
    del files[sorted(files)[number]]
    data = resumed(make(source_of(tmp_path / "data", files), **settings), state)
    found = [fragment.row_id for pack in data for fragment in pack["fragments"]]
    assert found == [(file - (file > number), offset) for file, offset in never_changed if file != number]


WINDOWED: dict[str, Any] = {"balance_window": 4, "overlong": "split"}


@pytest.mark.parametrize(("num_lanes", "shuffle"), [(1, False), (1, 5), (3, False)])
def test_what_open_balance_windows_lose_with_a_file_is_counted(
    num_lanes: int, shuffle: int, tmp_path: Path
) -> None:
    """To the token: a row that was read is in a pack, or counted as removed."""
    rng = random.Random(1)
    files = {f"f{i}.jsonl": new_rows(rng, i) for i in range(8)}
    settings = {
        **WINDOWED,
        "num_lanes": num_lanes,
        "shuffle": shuffle,
        "epochs": 2,
        **changes_allowed(tmp_path),
    }
    lost = []
    for taken, name in itertools.product((5, 8, 11), files):
        data = make(source_of(tmp_path / "data", files), **settings)
        packs = list(islice(data, taken * num_lanes))
        state, read = data.state_dict(), data.ledger().tokens_in
        left = {each: rows for each, rows in files.items() if each != name}
        after = resumed(make(source_of(tmp_path / "data", left), **settings), state)
        gone, stay = everything([{name: files[name]}]), everything([left, left])
        found = tokens_of(packs) + tokens_of(after)
        missing, ledger = (stay - found).total(), after.ledger()
        assert found - gone <= stay, "nothing twice"
        assert (ledger.packed, ledger.buffered) == (found.total(), 0)
        assert ledger.tokens_in == ledger.packed + ledger.dropped["removed"]
        assert ledger.dropped["removed"] >= missing
        if num_lanes == 1 and not shuffle:  # rows are read in the order of the files
            ends = itertools.accumulate(row["n"] for rows in files.values() for row in rows)
            read_of = [name for name, rows in files.items() for _ in rows][: [*ends].index(read) + 1].count(
                name
            )
            read_of_gone = sum(row["n"] for row in files[name][:read_of])
            assert ledger.dropped["removed"] == missing + read_of_gone - (tokens_of(packs) & gone).total()
        lost.append(missing > 0)
    assert any(lost)
    assert not all(lost)


@pytest.mark.parametrize("kind", ["files", "mixture", "hold-out"])
@pytest.mark.parametrize("shuffle", [False, 5])
def test_a_balance_window_stays_open_if_nothing_of_a_removed_file_was_read_for_it(
    kind: str, shuffle: int, tmp_path: Path
) -> None:
    rng = random.Random(3)
    files = {f"f{i:02}.jsonl": new_rows(rng, i) for i in range(12)}

    def new(now: Rows) -> IterablePackedDataset:
        source = source_of(tmp_path / "data", now)
        if kind == "mixture":
            source = Mix(
                [entry("a", source), entry("b", [{"i": 90_000, "n": 7}] * 40, 0.3)], stop="first_exhausted"
            )
        if kind == "hold-out":
            source = Holdout(source, fraction=0.1, part="train")
        return make(source, num_lanes=2, shuffle=shuffle, **WINDOWED, **changes_allowed(tmp_path))

    data = new(files)
    whole = tokens_of(islice(data, 11))  # in each lane a window is open
    state, ahead = data.state_dict(), list(data)
    whole += tokens_of(ahead)
    assert all("window" in lane for lane in state["lanes"].values())
    # Two lanes have five packs left in their windows, and a row waits for at most eight packs of its lane.
    late = [name for name, rows in files.items() if not tokens_of(ahead[:24]) & everything([{name: rows}])]
    if kind == "hold-out":  # a held-out row of a shuffle window is a row of it
        late = [name for name in late if everything([{name: files[name]}]) <= whole]
    assert late
    for name in late:
        left = {each: rows for each, rows in files.items() if each != name}
        after = resumed(new(left), state)
        packs = list(after)
        assert after.ledger().dropped["removed"] == 0
        assert [pack["tokens"].tolist() for pack in packs[:5]] == [
            pack["tokens"].tolist() for pack in ahead[:5]
        ]
        if kind != "mixture":
            assert tokens_of(packs) == tokens_of(ahead) - everything([{name: files[name]}])
        check_exact(resumed(new(left), state), lambda left=left: new(left))


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_hold_out_holds_where_files_change(part: str, tmp_path: Path) -> None:
    """The held-out rows of a removed file, which nobody can tell from the others any more, shift no number."""
    rng = random.Random(5)
    files = {f"f{i}.jsonl": new_rows(rng, i) for i in range(6)}
    settings: dict[str, Any] = {
        "num_lanes": 1, "overlong": "split", "shuffle": 500, "epochs": 2,
        **changes_allowed(tmp_path),
    }  # fmt: skip

    def source() -> Any:
        return Holdout(source_of(tmp_path / "data", files), fraction=0.3, part=part)

    kept = {row["i"] for row in read_all(source())}
    data = make(source(), **settings)
    packs = list(islice(data, 8 if part == "train" else 3))
    state, gone = data.state_dict(), files.pop("f2.jsonl")
    check_exact(resumed(make(source(), **settings), state), lambda: make(source(), **settings))
    packs += resumed(make(source(), **settings), state)
    stay = everything([{name: [row for row in rows if row["i"] in kept] for name, rows in files.items()}])
    assert tokens_of(packs, 0) - everything([{"f2": gone}]) == stay
    assert tokens_of(packs, 1) == stay


@pytest.mark.parametrize("num_lanes", [None, 3])
@pytest.mark.parametrize("through", [lambda data: data, PackedDataLoader])
def test_a_run_that_has_read_nothing_goes_on_with_other_files(
    through: Callable[[Any], Any], num_lanes: int | None, tmp_path: Path
) -> None:
    rng = random.Random(0)
    files = {f"f{number}.jsonl": new_rows(rng, number) for number in range(4)}
    now = changed(rng, files, itertools.count(10))
    settings = {"overlong": "split", "num_lanes": num_lanes, "epochs": 2, **changes_allowed(tmp_path)}
    state = through(make(source_of(tmp_path / "data", files), **settings)).state_dict()
    data = make(source_of(tmp_path / "data", now), **settings)
    with pytest.warns(UserWarning, match="so the run begins with this one"):
        data.load_state_dict(state)
    packs = list(data)
    assert tokens_of(packs, 0) == tokens_of(packs, 1) == everything([now])


class States(IterableDataset[dict[str, Any]]):
    """The states of a dataset after each pack, also in worker processes."""

    def __init__(self, data: IterablePackedDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.data.state_dict() for _ in self.data)


def test_the_state_of_one_of_several_consumers_is_refused_where_the_others_decide_when_files_join(
    tmp_path: Path,
) -> None:
    """Each would begin the new list in another epoch, and rows of the other files would be lost or come twice."""

    def new(**changes: Any) -> IterablePackedDataset:
        given = {
            "max_seq_len": 32,
            "num_lanes": 2,
            "epochs": 3,
            "corpus_lists": tmp_path / "lists",
            **changes,
        }
        return make(JSONLSource(tmp_path / "files"), **given)

    rng = random.Random(0)
    files = {f"f{number}.jsonl": new_rows(rng, number) for number in range(4)}
    put(tmp_path / "files", files)
    states = list(DataLoader(States(new()), batch_size=None, num_workers=2))
    put(tmp_path / "files", {**files, "new.jsonl": new_rows(rng, 9)})
    refused = []
    for state in states[::2]:
        [own] = state["lanes"].values()
        # The next epoch is the same for all consumers only in the first.
        epoch = own["reader"][0]
        error = "the state has 1 of 2 lanes, and the others decide, too" if epoch else "of one worker process"
        with pytest.raises(ValueError, match=error):
            resumed(new(), state)
        refused.append(epoch)
    assert set(refused) == {0, 1, 2}
    merged = {**states[-1], "lanes": {lane: own for state in states for lane, own in state["lanes"].items()}}
    resumed(new(), merged)


@pytest.mark.filterwarnings("ignore:the corpus changed")
@pytest.mark.parametrize("epoch", [0, 2])
def test_torchdatas_workers_read_an_epoch_by_one_list_also_those_that_gave_nothing(
    epoch: int, tmp_path: Path
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    rng = random.Random(0)
    files = {f"f{number}.jsonl": new_rows(rng, number) for number in range(4)}
    put(tmp_path / "files", files)

    def loader() -> Any:
        data = make(JSONLSource(tmp_path / "files"), max_seq_len=32, num_lanes=2, **changes_allowed(tmp_path))
        data.set_epoch(epoch)
        return torchdata.StatefulDataLoader(data, batch_size=None, num_workers=2)

    first = loader()
    packs = list(islice(first, 1))
    put(tmp_path / "files", {**files, "f0a.jsonl": new_rows(rng, 9)})
    second = loader()
    second.load_state_dict(first.state_dict())
    assert tokens_of([*packs, *second], epoch) == everything([files])


def test_rows_that_waited_for_other_settings_are_counted_where_their_file_is_gone(tmp_path: Path) -> None:
    files = {f"f{number}.jsonl": numbers_of(number) for number in range(2)}
    given = {"num_lanes": 1, "buffer_size": 9, **changes_allowed(tmp_path)}
    data = make(source_of(tmp_path / "files", files), **given)
    next(iter(data))
    state, waits = data.state_dict(), data.ledger().buffered
    later = make(JSONLSource(tmp_path / "files"), max_seq_len=99, **given)
    later.continue_from(state)
    put(tmp_path / "files", {"f1.jsonl": files["f1.jsonl"]})
    last = resumed(make(JSONLSource(tmp_path / "files"), max_seq_len=99, **given), later.state_dict())
    assert (later.ledger().buffered, last.ledger().dropped["removed"]) == (waits, waits) != (0, 0)
    assert tokens_of(last, 0) == everything([{"f1": files["f1.jsonl"]}])


def numbers_of(first: int, count: int = 40) -> list[dict[str, int]]:
    return [{"i": PER_FILE * first + k, "n": 1 + (7 * first + k) % 12} for k in range(count)]


@pytest.mark.parametrize("grows", ["folders", "changes"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_token_shards_that_were_added_are_read_from_the_next_epoch_on(
    tmp_path: Path, grows: str, shuffle: bool
) -> None:
    """And those that were made anew, too, which leaves the others as they are."""
    first, second = numbers_of(0, 60), numbers_of(3, 60)

    def shards(folder: str, rows: Any) -> Path:
        settings = {"lanes": 2, "shard_tokens": 60, "progress": False, "encoder": Numbers()}
        return tokenize(JSONLSource(tmp_path / rows), out=tmp_path / folder, **settings)

    def dataset() -> IterablePackedDataset:
        source = TokenShardSource(folders if len(folders) > 1 else folders[0])
        return IterablePackedDataset(
            source, max_seq_len=24, num_lanes=2, epochs=3, shuffle=shuffle, untrained="keep",
            corpus_lists=tmp_path / "lists",
        )  # fmt: skip

    put(tmp_path / "rows", {"b.jsonl": first})
    folders = [shards("out", "rows")]
    begun = dataset()
    packs = list(islice(begun, 4))
    state, both = begun.state_dict(), everything([{"b": first, "x": second}])
    if grows == "folders":
        put(tmp_path / "other", {"x.jsonl": second})
        folders.insert(0, shards("new", "other"))
    else:
        first[0] = {"i": 999, "n": first[0]["n"]}
        put(tmp_path / "rows", {"b.jsonl": first})
        folders, both = [shards("again", "rows")], everything([{"b": first}])
    words = "changed" if grows == "changes" else "added"
    data = dataset()
    with pytest.warns(UserWarning, match=rf"the corpus changed .*: [1-9]\d? {words} \(.*tokens-"):
        data.load_state_dict(state)
    packs += data
    old = everything([{"b": first[1:] if grows == "changes" else first}])
    found = tokens_of(packs, 0)
    assert max(found.values()) == 1
    missing = old - found
    assert missing.total() <= (60 if grows == "changes" else 0), "the rest of the shard that was made anew"
    assert tokens_of(packs, 1) == tokens_of(packs, 2) == both


# Names: the same whatever other files a corpus has, and wherever it lies.


def folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def in_memory(folder: Path) -> JSONLSource:
    files = fsspec.filesystem("memory")
    if files.exists("/names"):
        files.rm("/names", recursive=True)
    files.put(str(folder), "/names", recursive=True)
    return JSONLSource("memory://names/**/*.jsonl")


def listed(folder: Path) -> JSONLSource:
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.jsonl"))]
    (folder / "names.txt").write_text("\n".join(names))
    return JSONLSource(manifest=folder / "names.txt")


SOURCES: dict[str, Callable[[Path], JSONLSource]] = {
    "a folder": JSONLSource,
    "a glob": lambda folder: JSONLSource(str(folder / "**" / "*.jsonl")),
    "several folders": lambda folder: JSONLSource(folders_in(folder)),
    "several globs": lambda folder: JSONLSource([str(path / "*.jsonl") for path in folders_in(folder)]),
    "paths": lambda folder: JSONLSource(sorted(folder.rglob("*.jsonl"))),
    "a URL": in_memory,
    "a manifest": listed,
}
EN = {f"en/{i}.jsonl": numbers_of(i) for i in range(3)}
# The first has the name and the size of a file of the other folder.
FR = {"fr/0.jsonl": numbers_of(12), "fr/x.jsonl": numbers_of(4)}


def named(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"num_lanes": 2, "epochs": 2, "shuffle": 16}
    return {**given, **changes_allowed(folder), **changes}


@pytest.mark.parametrize("begins", ["with one folder", "with two"])
@pytest.mark.parametrize("how", SOURCES)
def test_a_folder_that_joins_or_goes_changes_no_other_files_name(
    how: str, begins: str, tmp_path: Path
) -> None:
    before, now = (EN, {**EN, **FR}) if begins == "with one folder" else ({**EN, **FR}, EN)
    put(tmp_path / "data", before)
    data = make(SOURCES[how](tmp_path / "data"), **named(tmp_path))
    packs = list(islice(data, 10))
    state = data.state_dict()
    put(tmp_path / "data", now)
    packs += resumed(make(SOURCES[how](tmp_path / "data"), **named(tmp_path)), state)
    found = tokens_of(packs, 0)
    assert not everything([EN]) - found, "tokens of files that stayed are lost"
    assert max(found.values()) == 1
    if begins == "with one folder":
        assert found == everything([EN])
    assert tokens_of(packs, 1) == everything([now])


@pytest.mark.parametrize("how", [how for how in SOURCES if how != "a URL"])
def test_a_corpus_may_be_moved(how: str, tmp_path: Path) -> None:
    put(tmp_path / "data", {**EN, **FR})
    keeps = named(tmp_path, corpus_lists=None)
    data = make(SOURCES[how](tmp_path / "data"), **keeps)
    iterator = iter(data)
    list(islice(iterator, 10))
    state = data.state_dict()
    rest = [content(pack) for pack in iterator]
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    data = make(SOURCES[how](tmp_path / "elsewhere"), **keeps)
    data.load_state_dict(state)
    assert [content(pack) for pack in data] == rest


# Refusals.


def test_renamed_files_are_read_on_and_others_in_their_place_are_refused(tmp_path: Path) -> None:
    data, above = tmp_path / "data" / "en", tmp_path / "data"
    put(above, EN)
    begun = make(JSONLSource(data), **named(tmp_path))
    first = list(islice(begun, 10))
    state = begun.state_dict()
    # The same files by a folder above, which gives all of them other names; and one of three renamed.
    again = make(JSONLSource(above), **named(tmp_path))
    with pytest.warns(UserWarning, match=r"3 renamed \(.*en/0.jsonl"):
        again.load_state_dict(state)
    packs = [*first, *again]
    assert tokens_of(packs, 0) == tokens_of(packs, 1) == everything([EN])
    with pytest.raises(ValueError, match="a name is relative to the given folder"):
        make(JSONLSource(above), **named(tmp_path, corpus_lists=None)).load_state_dict(state)
    put(above, {**{name: EN[name] for name in list(EN)[:2]}, "en/3.jsonl": EN["en/2.jsonl"]})
    packs = [*first, *resumed(make(JSONLSource(data), **named(tmp_path)), state)]
    assert tokens_of(packs, 0) == tokens_of(packs, 1) == everything([EN])
    put(above, {"en/7.jsonl": numbers_of(7), "en/8.jsonl": numbers_of(8)})
    with pytest.raises(ValueError, match=r"none of the 3 files .*began with .0.jsonl, 1.jsonl, 2.jsonl. is"):
        make(JSONLSource(data), **named(tmp_path)).load_state_dict(state)


@pytest.fixture
def changed_files(tmp_path: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A corpus that changed, its settings, and the state of before."""
    rng = random.Random(1)
    files = {f"f{i}.jsonl": new_rows(rng, i) for i in range(5)}
    settings = {"num_lanes": 2, "overlong": "split", "corpus_lists": tmp_path / "lists"}
    data = make(source_of(tmp_path / "data", files), **settings)
    list(islice(data, 5))
    state = data.state_dict()
    files["f1.jsonl"] = [{**row, "i": row["i"] + PER_FILE} for row in files["f1.jsonl"]]  # of the same size
    del files["f3.jsonl"]
    files |= {f"g{i}.jsonl": new_rows(rng, 8 + i) for i in range(2)}
    return source_of(tmp_path / "data", files), settings, state


def test_a_warning_names_what_was_added_removed_and_changed(changed_files: Any, tmp_path: Path) -> None:
    source, settings, state = changed_files
    with pytest.warns() as warnings:
        make(source, **settings).load_state_dict(state)
    assert [str(warning.message) for warning in warnings] == [
        f"the corpus changed since the state was made: 2 added ({tmp_path}/data/g0.jsonl, {tmp_path}/data/g1.jsonl), "
        f"1 removed (f3.jsonl), 1 changed ({tmp_path}/data/f1.jsonl). Added files are read from the next epoch of "
        "their source on; removed and changed ones are no longer read, and their buffered pieces are dropped"
    ]
    with pytest.raises(ValueError, match=r"continues with others only with corpus_lists, a folder"):
        make(source, **{**settings, "corpus_lists": None}).load_state_dict(state)
    for changes, words in (
        ({"seed": 1}, "with seed=0 and this dataset has seed=1"),
        ({"encoder": Numbers("other")}, "made with encoder.fingerprint="),
    ):
        with pytest.raises(ValueError, match=words):
            make(source, **settings, **changes).load_state_dict(state)


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-20]),
            ValueError,
            r"\.json\.gz is damaged .*; restore it",
        ),
        # As good as any other reason why a file that is there cannot be read.
        (lambda path: (path.unlink(), path.mkdir()), IsADirectoryError, "Is a directory"),
        (Path.unlink, ValueError, r"\.json\.gz is missing: the list of the files that the run began with"),
    ],
    ids=["damaged", "unreadable", "missing"],
)
def test_lists_that_cannot_be_read_are_refused(
    harm: Callable[[Path], Any], kind: type[Exception], message: str, changed_files: Any, tmp_path: Path
) -> None:
    source, settings, state = changed_files
    [kept] = (tmp_path / "lists").iterdir()
    harm(kept)
    with pytest.raises(kind, match=message):
        make(source, **settings).load_state_dict(state)


def test_a_state_that_is_refused_leaves_the_dataset_as_it_was(changed_files: Any) -> None:
    """A fresh run of the same object kept the lists of the refused state, and its resume read by an old one."""
    source, settings, state = changed_files
    refused, fresh = (make(source, **settings, seed=1) for _ in range(2))
    with pytest.raises(ValueError, match="seed=0 and this dataset has seed=1"):
        refused.load_state_dict(state)
    for data in (refused, fresh):
        list(islice(data, 3))
    assert refused.state_dict() == fresh.state_dict()
