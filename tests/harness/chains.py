"""Configurations and chains of resumes drawn at random, run, and judged by `tests.oracle.streams`.

`configuration(seed, number)` draws and runs one case, as `chain`, `changes` and `groups` do; the same two numbers give
the same case. Each returns how often it drew what.
"""

from __future__ import annotations

import io
import math
import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from streampack import Group, IterablePackedDataset, PackedDataLoader, attention, collate_packed
from tests.harness.changed_files import (
    Rows,
    changed,
    everything,
    new_rows,
    resumed,
    source_of,
    tokens_of,
    untouched,
)
from tests.harness.conformance import check_resume_everywhere, content
from tests.harness.corpus import STRIDE
from tests.harness.generator import Case
from tests.harness.interrupts import Injector
from tests.harness.mixtures import make as stream_of
from tests.harness.threads import Topology, packs_of, run
from tests.oracle.streams import IGNORE, Plain, check_masks, of_batch, of_dicts

# Of a mixture that is too small for its lanes, or whose first source to end has no row that makes a piece.
REFUSALS = ("no rows in", "trained no token", "no row makes a pack")


def of_ranks(ranks: list[list[Any]], batches_per_step: int) -> list[list[Plain]]:
    """The packs of every step: rank 0's, then rank 1's, and so on."""
    counts = {len(batches) for batches in ranks}
    assert len(counts) == 1, f"ranks made {counts} batches"
    steps = range(0, counts.pop(), batches_per_step)
    return [
        [pack for rank in ranks for batch in rank[at : at + batches_per_step] for pack in of_batch(batch)]
        for at in steps
    ]


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state, which is no larger than docs/reliability.md says."""
    for lane in state["lanes"].values():
        stands = [lane["reader"][2], lane["reader"][1], *lane.get("window", [0, [], [], 0])[1:3]]
        numbers, waiting = len(stands[1]) + len(stands[2]), len(stands[0]) + len(stands[3])
        assert len(pickle.dumps(lane)) <= 350 + 140 * len(lane["source_stats"]) + 25 * waiting + 3 * numbers
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def drawn_topology(case: Case, ranks: int, workers: int, per_step: int) -> Topology:
    size = case.rng.choice([1, 1, 2, 3, 5])
    share = case.rng.choice([1, 1, 1, 2, 3]) if ranks < 3 else 1
    case.drew["several ranks"] += ranks > 1
    case.drew["data groups"] += share > 1
    case.drew["workers"] += workers > 0
    return Topology(ranks, workers, size, math.ceil(math.ceil(per_step / ranks) / size), share)


def _consume(
    case: Case,
) -> tuple[list[Plain], IterablePackedDataset | PackedDataLoader | None, dict[str, Any]]:
    """All packs by one of the doors, what tells the source_stats, and the ledger."""
    rng = case.rng
    door = rng.choices(["dataset", "loader", "ranks", "torch", "processes"], [50, 25, 24, 0.6, 0.6])[0]
    if case.oracle.errors or not case.oracle.kept:
        door = "dataset"
    dataset = case.dataset()
    if door == "dataset":
        packs = list(dataset)
        check_batch(packs, case)
        check_traces(dataset, packs)
        return of_dicts(packs), dataset, dataset.ledger().as_dict()
    if door == "torch":
        dataset.num_lanes = None
        loading = DataLoader(dataset, batch_size=None, num_workers=1 if case.single else 2)
        packs = list(loading)
        check_traces(dataset, packs)
        return of_dicts(packs), None, {}
    if door == "ranks":
        ranks, workers, per_step = rng.randint(1, 4), rng.randint(0, 2), rng.randint(1, 9)
        case.num_lanes = case.num_lanes and max(case.num_lanes, ranks * max(1, workers))
        topology = drawn_topology(case, ranks, workers, per_step)
        made = run(case.dataset, topology, packs_per_step=per_step)
        dataset.load_state_dict(through_a_checkpoint(made.states[-1]))
        steps = of_ranks(made.batches, topology.batches_per_step)
        return [pack for step in steps for pack in step], dataset, dataset.ledger().as_dict()
    workers = 2 if door == "processes" else 0
    if workers and case.num_lanes:
        case.num_lanes = max(case.num_lanes, 2)
    loader = PackedDataLoader(
        case.dataset(), batch_size=rng.randint(1, 5), num_workers=min(workers, case.num_lanes or workers),
        packs_per_step=rng.choice([None, rng.randint(1, 9)]),
    )  # fmt: skip
    packs = [pack for batch in loader for pack in of_batch(batch)]
    return packs, loader, loader.ledger().as_dict()


def check_batch(packs: list[dict[str, Any]], case: Case) -> None:
    if some := packs[:3]:
        batch = collate_packed(some)
        seq_lens, size = batch.seq_lens, batch.tokens.shape[1]
        dense = attention.dense_mask(seq_lens, max_seq_len=size)
        cu_seqlens = attention.cu_seqlens_of(seq_lens, max_seq_len=size).tolist()
        check_masks([[n for n in lens if n] for lens in seq_lens.tolist()], dense, cu_seqlens)


def check_traces(dataset: IterablePackedDataset, packs: list[dict[str, Any]]) -> None:
    for pack in packs[-3:]:
        at, tokens = 0, pack["tokens"].tolist()
        for fragment in pack["fragments"][:5]:
            traced = dataset.trace(fragment)["tokens"]
            assert tokens[at : at + len(traced)] == traced, "a trace leads to other tokens"
            at += len(traced) + fragment[4]  # its padding


def _refused(case: Case) -> int:
    """A run with rows that are errors, or with no row that makes a pack: refused, naming one, and again when asked."""
    dataset, packs, said = case.dataset(), [], []
    for _ in range(2):
        try:
            for pack in dataset:
                packs.append(pack)
                assert len(packs) < 10**5, "reads on for ever"
            raise AssertionError("rows that are errors were passed by") from None
        except ValueError as error:
            said.append(str(error))
    places = case.oracle.errors or {"no row makes a pack"}
    assert any(place in said[0] for place in places), f"refused for {said[0]!r}, not for {places}"
    assert said[0] == said[1], f"asked again, it says {said[1]!r}"
    case.oracle.check_run(of_dicts(packs), epochs=1, whole=False)
    return len(packs)


def _judge(case: Case, packs: list[Plain], ledger: Mapping[str, Any]) -> list[Plain]:
    real = [pack for pack in packs if pack.fragments]
    for pack in packs:
        case.oracle.check_pack(pack)  # null packs, too
    case.oracle.check_run(real, epochs=case.epochs or 1)
    if ledger:
        case.oracle.check_ledger(ledger, real, epochs=case.epochs or 1)
    return real


@contextmanager
def _replayable(name: str, seed: int, number: int) -> Iterator[tuple[random.Random, Path, list[Any]]]:
    """A generator and a folder for a case; whatever is added to the list is told where the case fails."""
    told: list[Any] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield random.Random(f"{name} {seed} {number}"), Path(folder), told
    except Exception as error:
        what = ", ".join(map(str, told))
        raise AssertionError(
            f"{error}\nreplay: tests.harness.chains.{name}({seed}, {number}); {what}"
        ) from error


@contextmanager
def _drawn(seed: int, number: int, *, resumes: bool) -> Iterator[Case]:
    with _replayable("chain" if resumes else "configuration", seed, number) as (rng, folder, told):
        told.append(case := Case(rng, folder, resumes=resumes))
        yield case


def configuration(seed: int, number: int) -> Counter[str]:
    """Draw one configuration, read it by one door, check all; counts of what was done."""
    with _drawn(seed, number, resumes=False) as case:
        if case.oracle.errors or not case.oracle.kept:
            return case.drew + Counter(configurations=1, refused=1, packs=_refused(case))
        try:
            packs, teller, ledger = _consume(case)
        except Exception as error:
            if case.mixed and any(words in f"{error}{error.__cause__}" for words in REFUSALS):
                return case.drew + Counter(configurations=1, too_small=1)
            raise
        real = _judge(case, packs, ledger)
        if case.mixed and teller is not None:
            _check_tallies(case, real, teller.source_stats())
        if case.mixed and all(pack.lane is not None for pack in real):
            case.oracle.check_shares(real, case.weights)
        return case.drew + Counter(configurations=1, packs=len(real), tokens=_tokens(real))


def _check_tallies(case: Case, packs: list[Plain], source_stats: Mapping[str, Any]) -> None:
    packed: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for pack in packs:
        ends = np.cumsum(pack.lens).tolist()
        for end, n, (row_id, start, stop, *_) in zip(ends, pack.lens, pack.fragments, strict=False):
            name = case.oracle.place(row_id).partition(": ")[0]
            packed[name] += stop - start
            trained[name] += sum(label != IGNORE for label in pack.labels[end - n : end])
    assert +Counter({name: stats.packed for name, stats in source_stats.items()}) == packed, (
        "source_stats miscount"
    )
    assert +Counter({name: stats.trained for name, stats in source_stats.items()}) == +trained, (
        "source_stats miscount"
    )


def _tokens(packs: list[Plain]) -> int:
    return sum(stop - start for pack in packs for _, start, stop, *_ in pack.fragments)


def chain(seed: int, number: int) -> Counter[str]:
    """Draw one configuration, cut its run several times, go on elsewhere each time; compare with the run uncut."""
    with _drawn(seed, number, resumes=True) as case:
        if not case.oracle.kept:
            return case.drew + Counter(chains=1, refused=1, packs=_refused(case))
        rng, endless = case.rng, case.epochs is None
        lanes = rng.choice([1, 2, 3, 8] if case.mixed else [2, 4, 5, 6, 12])
        case.num_lanes = lanes
        per_step = rng.choice([1, 2, 3, 4, 6, 12])
        try:
            if endless and len({pack["lane"] for pack in islice(case.dataset(), lanes)}) < lanes:
                # The others have no row, and steps are the same only until a lane ends.
                case.num_lanes = lanes = 1
            reference = case.dataset()
            uncut = of_dicts(list(islice(reference, rng.randint(1, 8) * per_step if endless else None)))
        except ValueError as error:
            if case.mixed and any(words in str(error) for words in REFUSALS):
                return case.drew + Counter(chains=1, too_small=1)
            raise
        if not endless:
            _judge(case, uncut, reference.ledger().as_dict())
        door = rng.choices(["loader", "dataset", "every pack"], [5, 2, 3])[0]
        case.drew[f"resumes of a {door}" if door != "every pack" else "resumes at every pack"] += 1
        if door == "every pack":
            found = of_dicts(check_resume_everywhere(case.dataset, packs=min(len(uncut), 20)))
            assert all(ours.key == theirs.key for ours, theirs in zip(found, uncut, strict=False))
            return case.drew + Counter(chains=1, resumes=len(found), packs=len(found))
        resumes, packs, ledger = (
            _cut_dataset(case, len(uncut)) if door == "dataset" else _cut_loader(case, uncut, per_step)
        )
        assert Counter(pack.key for pack in packs) == Counter(pack.key for pack in uncut), (
            "other packs than uncut"
        )
        _check_order(packs, uncut)
        if not endless:
            _judge(case, packs, ledger)
        return case.drew + Counter(chains=1, resumes=resumes, packs=len(packs), tokens=_tokens(packs))


def _check_order(packs: list[Plain], uncut: list[Plain]) -> None:
    """Whatever read them, a lane's packs come in its own order."""
    times = Counter(pack.key for pack in uncut)
    lane_of = {pack.key: pack.lane for pack in uncut if times[pack.key] == 1}
    for lane in {*lane_of.values()}:
        ours, theirs = ([p.key for p in each if lane_of.get(p.key, -1) == lane] for each in (packs, uncut))
        assert ours == theirs, f"the packs of lane {lane} come in another order"


def _cut_dataset(case: Case, total: int) -> tuple[int, list[Plain], dict[str, Any]]:
    """The stream of one process, each time a new one."""
    dataset, packs, resumes = case.dataset(), [], 0
    while True:
        left = total - len(packs)
        number = min(left, case.rng.randint(0, total // 2 + 1)) if resumes < 6 else left
        if number == left and case.epochs is not None:
            number += 1  # see the end
        peeked = case.rng.randint(0, number // 2)  # whoever iterates again goes on behind that
        case.drew["peeks"] += peeked > 0
        injector = Injector(case.rng.randint(1, 3000))
        packs += interrupted(dataset, peeked, injector)
        packs += interrupted(dataset, number - peeked, injector)
        case.drew["interrupts"] += injector.raised
        if resumes == 6 or (len(packs) >= total and resumes):
            break
        state = through_a_checkpoint(dataset.state_dict())
        dataset = case.dataset()
        dataset.load_state_dict(state)
        resumes += 1
    return resumes, of_dicts(packs), dataset.ledger().as_dict()


def interrupted(dataset: IterablePackedDataset, number: int, injector: Injector) -> Iterator[Any]:
    """The next packs of a dataset, which is iterated anew where it is interrupted."""
    iterator = iter(dataset)
    while number > 0:
        try:
            pack = injector.call(iterator.__next__)
        except StopIteration:
            return
        except KeyboardInterrupt:
            iterator = iter(dataset)
            continue
        yield pack
        number -= 1


def _cut_loader(case: Case, uncut: list[Plain], per_step: int) -> tuple[int, list[Plain], dict[str, Any]]:
    """Loaders on simulated ranks; in step with the uncut run where that is promised."""
    rng, lanes, endless = case.rng, case.num_lanes or 1, case.epochs is None
    first = Counter(pack.lane for pack in uncut if pack.epoch == case.first_epoch)
    same = len(uncut) // per_step if endless else min(first[n] for n in range(lanes)) * lanes // per_step
    state: dict[str, Any] | None = None
    steps: list[list[Plain]] = []
    resumes, ended = 0, False
    while not ended:
        most = lanes if state is None else 6  # a run that goes on may have more consumers than lanes
        ranks = rng.choice([n for n in (1, 2, 3, 4) if n <= most and not (endless and lanes % n)])
        workers = rng.randint(0, most // ranks)
        topology = drawn_topology(case, ranks, workers, per_step)
        per = topology.batches_per_step
        if lanes % ranks:  # some have more lanes than others, and a step takes more batches
            per = run(case.dataset, topology, state=state, limit=0, packs_per_step=per_step).batches_per_step
            case.drew["uneven lanes"] += 1
        most = max(1, len(uncut) // per_step * per // 2)
        limit: int | None = rng.randint(0, most) if resumes < 5 else None
        if endless:
            left = len(uncut) // per_step - len(steps)
            limit = left * per if limit is None else min(left * per, limit // per * per)
        elif limit is not None and rng.random() < 0.6:
            limit = limit // per * per
        peek = rng.choice([0, 0, 1, 2]) * per
        alone = (topology.ranks, topology.workers, topology.share) == (1, 0, 1)
        injector = Injector(rng.randint(1, 3000)) if alone else None
        made = run(
            case.dataset,
            topology,
            state=state,
            limit=limit,
            packs_per_step=per_step,
            peek=peek,
            injector=injector,
            whole_steps=endless,
        )
        case.drew["peeks"] += peek > 0
        case.drew["interrupts"] += injector is not None and injector.raised
        assert all(theirs == made.states[0] for theirs in made.states), "the ranks' states differ"
        cut_midway = len(made.batches[0]) % per
        for step in of_ranks(made.batches, per):
            for pack in step:
                case.oracle.check_pack(pack)  # null packs, too
            steps.append([pack for pack in step if pack.fragments])
        for number, step in enumerate(steps[:same]):
            wanted = uncut[number * per_step : (number + 1) * per_step]
            if cut_midway and number == len(steps) - 1:
                break
            assert Counter(p.key for p in step) == Counter(p.key for p in wanted), (
                f"step {number} has other packs"
            )
        if cut_midway or made.cut:
            same = 0  # the step was cut in two
        done = len(steps) * per_step >= len(uncut) if endless else all(made.ended)
        ended = resumes == 5 or (done and resumes > 0)
        state = through_a_checkpoint(made.states[0])
        resumes += 1
    last = case.dataset()
    last.load_state_dict(state or {})
    if not endless:
        over = run(case.dataset, Topology(), state=state, packs_per_step=per_step)
        assert not over.batches[0], "it goes on behind the end"
    return resumes - 1, [pack for step in steps for pack in step], last.ledger().as_dict()


def changes(seed: int, number: int) -> Counter[str]:
    """Draw a corpus of files, cut its run of three epochs twice, change the files each time, and go on.

    Files that stay come once an epoch, new ones from the next epoch on, and of those that go nothing more comes.
    """
    with _replayable("changes", seed, number) as (rng, folder, told):
        kind, numbers = rng.choice(["jsonl", "jsonl.gz", "parquet"]), count()
        files: Rows = {f"f{n}.{kind}": new_rows(rng, n) for n in islice(numbers, 7)}
        settings: dict[str, Any] = {
            "epochs": 3,
            "num_lanes": rng.choice([1, 3]),
            "shuffle": (rng.random() < 0.7) * rng.choice([5, 40]) or False,
            "overlong": rng.choice(["split", "drop"]),
            "split_across_pack": rng.random() < 0.25,
            "buffer_size": rng.choice([2, 8, 30]),
            "balance_window": rng.choice([0, 5]),
            "seed": rng.randrange(100),
            "corpus_lists": folder / "lists",
        }
        told += [kind, settings]
        # Of the packs of an open window that a file's removal disturbs, those that were not handed out are dropped.
        may_lose = 2 * settings["num_lanes"] * max(0, settings["balance_window"] - 1) * 24
        longest = 24 if settings["overlong"] == "drop" else 30
        lists, begins, packs = [files], [0], []
        data = stream_of(source_of(folder / "data", files), **settings)
        for cut in (rng.randint(1, 40), rng.randint(1, 40)):
            packs += islice(data, cut)
            state = through_a_checkpoint(data.state_dict())
            files = changed(rng, lists[-1], numbers)
            gone = {name: lists[-1][name] for name in set(lists[-1]) - set(untouched(lists[-1], files))}
            lists.append(files)
            begins.append(1 + max(lane["reader"][0] for lane in state["lanes"].values()))
            source = source_of(folder / "data", files)
            ahead, data, third = (resumed(stream_of(source, **settings), state) for _ in range(3))
            assert not tokens_of(ahead) & everything([gone], longest), "something of a file that is gone"
            next_ones = [content(pack) for pack in islice(third, 2)]
            fourth = resumed(stream_of(source, **settings), third.state_dict())
            next_ones += [content(pack) for pack in fourth]
            again = resumed(stream_of(source, **settings), state)
            assert [content(pack) for pack in again] == next_ones, "a resume behind the change is not exact"
        packs += data
        for epoch in range(3):
            now = max(i for i, begin in enumerate(begins) if begin <= epoch)
            # Files that a change in this epoch removed may have come before it.
            kept = lists[now]
            for i in range(now + 1, len(lists)):
                if begins[i] == epoch + 1:
                    kept = untouched(kept, lists[i])
            found = tokens_of(packs, epoch)
            lost = everything([kept], longest) - found
            may_lose -= lost.total()
            assert may_lose >= 0, (
                f"rows { ({token // STRIDE for token in lost}) } are missing in epoch {epoch}"
            )
            assert not found - everything([lists[now]], longest), f"twice or of another list in epoch {epoch}"
        ledger = data.ledger()
        assert (ledger.buffered, ledger.packed) == (0, tokens_of(packs).total())
        assert ledger.tokens_in == ledger.packed + sum(ledger.dropped.values()), "what is gone is not booked"
        drawn = Counter({f"changed {kind} files": 1, "changes in windows": settings["balance_window"] > 0})
        return drawn + Counter(changes=1, resumes=8, packs=len(packs))


def group_of(row: Mapping[str, Any]) -> Group:
    """Encode a tree whose tokens follow one another from ``first`` on."""
    ids = np.arange(row["first"], row["first"] + sum(row["lengths"]))
    return Group(ids, ids.copy(), lengths=row["lengths"], parents=row["parents"])


def groups(seed: int, number: int) -> Counter[str]:
    """Draw trees of prompts and answers, resume at every pack and on other ranks; each tree comes in one pack."""
    with _replayable("groups", seed, number) as (rng, _, told):
        limit, rows, first = rng.choice([8, 16, 24, 64]), [], 1
        for _ in range(rng.choice([3, 20, 60])):
            lengths = tuple(rng.randint(1, limit // 2) for _ in range(rng.randint(1, 4)))
            parents = (-1, *(rng.randrange(n) for n in range(1, len(lengths))))
            rows.append({"first": first, "lengths": lengths, "parents": parents})
            first += sum(lengths)
        settings: dict[str, Any] = {
            "max_seq_len": limit, "overlong": "drop", "buffer_size": rng.choice([1, 5, 16]),
            "strategy": rng.choice(["exact_fit", "best_fit", "first_fit", "next_fit"]),
            "num_lanes": rng.choice([1, 2, 4]), "epochs": rng.choice([1, 2]), "shuffle": rng.random() < 0.6,
            "balance_window": rng.choice([0, 3]), "seed": rng.randrange(100), "untrained": "keep",
        }  # fmt: skip
        told += [f"{len(rows)} groups", settings]
        kept = {row["first"]: sum(row["lengths"]) for row in rows if sum(row["lengths"]) <= limit}
        if not kept:
            return Counter(groups=1, refused=1)

        def make() -> IterablePackedDataset:
            return IterablePackedDataset(rows, encoder=group_of, **settings)

        def check(packs: list[list[int]]) -> None:
            """Check the tokens of packs, without their padding."""
            found: Counter[int] = Counter()
            for tokens in packs:
                at = 0
                while at < len(tokens):
                    length = kept[tokens[at]]
                    assert tokens[at : at + length] == [*range(tokens[at], tokens[at] + length)], "in parts"
                    found[tokens[at]] += 1
                    at += length
            assert found == dict.fromkeys(kept, settings["epochs"]), "a group is missing, or came twice"

        packs = list(make())
        lens = [pack.get("segment_lens", pack.get("seq_lens")) for pack in packs]
        used = [int(each[: pack["num_seqs"]].sum()) for each, pack in zip(lens, packs, strict=True)]
        check([pack["tokens"][:end].tolist() for pack, end in zip(packs, used, strict=True)])
        resumes = len(check_resume_everywhere(make, packs=10))
        ranks = rng.choice([n for n in (1, 2, 4) if n <= settings["num_lanes"]])
        topology = Topology(ranks, rng.choice([0, 1]), 2)
        begun = run(make, topology, limit=rng.randint(0, len(packs) // (2 * ranks)))
        rest = run(make, Topology(batch_size=2), state=through_a_checkpoint(begun.states[0]))
        check(
            [
                list(tokens)
                for batches in (*begun.batches, *rest.batches)
                for batch in batches
                for tokens, _ in packs_of(batch)
            ]
        )
        return Counter(groups=1, resumes=resumes + 1, packs=len(packs))
