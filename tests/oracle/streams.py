"""What must hold of any run's packs, from the rows and the settings alone: plain Python, nothing of the package."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

IGNORE = -100

Text = tuple[list[int], list[int]]  # tokens and labels of a row


@dataclass(frozen=True)
class Fate:
    """What the settings make of a row: its pieces, or why there are none."""

    length: int
    pieces: list[tuple[int, Text]]  # each with its start in the row
    dropped: str | None  # the ledger's reason, where the row or a part of it is left out
    trained: int  # tokens of the pieces; the first of each never is

    @property
    def kept(self) -> int:
        return sum(len(tokens) for _, (tokens, _) in self.pieces)


@dataclass(frozen=True)
class Plain:
    """A pack as lists. Epoch and lane are None where they are not told."""

    tokens: list[int]
    labels: list[int]
    positions: list[int]
    lens: list[int]  # of all segments, padding's too
    fragments: list[tuple[tuple[int, ...], int, int, int | None, int]]
    epoch: int | None = None
    lane: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        used = sum(stop - start + padding for _, start, stop, _, padding in self.fragments)
        return (tuple(self.tokens[:used]), tuple(self.labels[:used]), tuple(self.fragments))


def of_dicts(packs: list[dict[str, Any]]) -> list[Plain]:
    found = []
    for p in packs:
        arrays = (p[name].tolist() for name in ("tokens", "labels", "input_pos", "seq_lens"))
        assert p["num_seqs"] == len(p["fragments"]) > 0, "num_seqs counts other sequences"
        # torch's DataLoader makes lists of the tuples in what its workers send.
        fragments = [(tuple(row_id), *rest) for row_id, *rest in p["fragments"]]
        found.append(Plain(*arrays, fragments, p["epoch"], p["lane"]))  # type: ignore[arg-type]
    return found


def of_batch(batch: Any) -> list[Plain]:
    columns = (batch.tokens, batch.labels, batch.input_pos, batch.seq_lens)
    found = []
    for *arrays, lens, fragments in zip(
        *(column.tolist() for column in columns), batch.fragments, strict=True
    ):
        while not lens[-1]:
            lens.pop()
        found.append(Plain(*arrays, lens, [tuple(f) for f in fragments]))
    return found


@dataclass
class Oracle:
    """Knows the rows by their places in words, as ``locate`` says them, and the settings of the run."""

    rows: Mapping[str, Text | None]  # None: a record that cannot be encoded
    settings: Mapping[str, Any]
    locate: Callable[[tuple[int, ...]], str]
    stop: str | None = None  # of a mixture: when the epoch ends
    first_epoch: int = 0
    eos_id: int | None = None  # of the encoders
    fates: dict[str, Fate] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)  # places of rows that are refused
    bad: int = 0

    def __post_init__(self) -> None:
        self.limit = self.settings["max_seq_len"]
        self.multiple = self.settings["pad_seqs_to"]
        self.wraps = self.settings["split_across_pack"]
        self.overlong = self.settings["overlong"] or ("split" if self.wraps else "error")
        for place, row in self.rows.items():
            if row is None or not row[0]:  # without a token
                self.bad += 1
                if not self.settings["skip_bad"]:
                    self.errors.add(place)
            elif (fate := self._fate(*row)) is None:
                self.errors.add(place)
            else:
                self.fates[place] = fate
        self.kept = sum(fate.kept for fate in self.fates.values())  # tokens of an epoch's packs
        self.places: dict[tuple[int, ...], str] = {}

    def _fate(self, tokens: list[int], labels: list[int]) -> Fate | None:
        """None if the row is an error."""
        size, limit, eos = len(tokens), self.limit, self.eos_id
        bounds, reason = [(0, size)], None
        if size > limit and not (self.wraps and self.overlong == "split"):
            if self.overlong == "error":
                return None
            if self.overlong == "drop":
                return Fate(size, [], "overlong", 0)
            if self.overlong == "split":
                bounds = [(at, min(at + limit, size)) for at in range(0, size, limit)]
            else:
                reason = "truncated"
                bounds = [(0, limit) if self.overlong == "truncate" else (size - limit, size)]
        pieces = [(a, (tokens[a:b], labels[a:b])) for a, b in bounds]
        if reason and tokens[-1] == eos and bounds[0][0] == 0:
            ids, targets = pieces[0][1]
            pieces = [(0, ([*ids[:-1], eos], [*targets[:-1], IGNORE if targets[-1] == IGNORE else eos]))]
        trained = sum(label != IGNORE for _, (_, part) in pieces for label in part[1:])
        if not trained and self.settings["untrained"] == "error":
            return None
        if not trained and self.settings["untrained"] == "drop":
            return Fate(size, [], "untrained", 0)
        return Fate(size, pieces, reason, trained)

    def place(self, row_id: tuple[int, ...]) -> str:
        if row_id not in self.places:
            self.places[row_id] = self.locate(row_id)
        return self.places[row_id]

    def check_pack(self, pack: Plain) -> None:
        """Its arrays are the rows' that its fragments name, and nothing else."""
        at, padding_idx = 0, self.settings["padding_idx"]
        padded, size = self.settings["strategy"] == "padded", len(pack.tokens)
        limit = 1 if padded else self.settings["max_seqs_per_pack"] or self.limit
        assert min(pack.lens) > 0, "a sequence without tokens"
        assert size <= self.limit if padded else size == self.limit, f"{size} tokens"
        assert sum(pack.lens) == size, "seq_lens do not add up"
        assert len(pack.labels) == len(pack.positions) == size
        assert pack.positions == [at for n in pack.lens for at in range(n)], "positions do not restart"
        assert len(pack.lens) - len(pack.fragments) in (0, 1), "padding is more than one segment"
        assert len(pack.fragments) <= limit, "too many sequences"
        assert all(n % self.multiple == 0 for n in pack.lens), (
            f"{pack.lens} are not multiples of {self.multiple}"
        )
        for n, (row_id, start, stop, _, padding) in zip(pack.lens, pack.fragments, strict=False):
            place = self.place(row_id)
            assert place in self.fates, f"a sequence of {place}, which is no row of the corpus"
            pieces = self.fates[place].pieces
            assert pieces, f"{place} should have been dropped"
            base, (tokens, labels) = pieces[bisect_right([first for first, _ in pieces], start) - 1]
            a, b = start - base, stop - base
            assert b - a == n - padding, f"{place}: [{start}, {stop}) and {padding} are not {n} tokens"
            assert 0 <= padding < self.multiple, f"{place}: {padding} tokens of padding"
            assert not padding or b == len(tokens), f"{place}: padded, though it goes on"
            assert 0 <= a < b <= len(tokens), f"{place}: [{start}, {stop}) is no part of a piece"
            assert self.wraps or b - a == len(tokens), f"{place}: [{start}, {stop}) was cut"
            filler, ignored = [padding_idx] * padding, [IGNORE] * padding
            assert pack.tokens[at : at + n] == tokens[a:b] + filler, (
                f"{place}: other tokens than [{start}, {stop})"
            )
            assert pack.labels[at : at + n] == [IGNORE, *labels[a + 1 : b], *ignored], (
                f"{place}: wrong labels"
            )
            at += n
        assert pack.tokens[at:] == [padding_idx] * (size - at), "padding holds tokens"
        assert pack.labels[at:] == [IGNORE] * (size - at), "padding is trained"

    def check_run(self, packs: Sequence[Plain], *, epochs: int, whole: bool = True) -> None:
        """Every pack; over a ``whole`` run, every token that is kept once an epoch, in order where samples are cut."""
        seen: dict[Any, dict[str, list[tuple[int, int, int | None]]]] = defaultdict(lambda: defaultdict(list))
        emitted = 0
        for pack in packs:
            self.check_pack(pack)
            epoch = 0
            if self.stop is None and self.kept:
                told = None if pack.epoch is None else pack.epoch - self.first_epoch
                epoch = emitted // self.kept if told is None else told
            for row_id, *fragment, _ in pack.fragments:
                seen[epoch][self.place(row_id)].append(tuple(fragment))  # type: ignore[arg-type]
            emitted += sum(stop - start for _, start, stop, *_ in pack.fragments)
        if whole and self.stop is None:
            assert sorted(seen) == list(range(epochs if self.kept else 0)), f"{len(seen)} epochs of {epochs}"
        for of_epoch in seen.values():
            for place, fate in self.fates.items():
                self._check_row(place, fate, of_epoch.get(place, []), epochs, whole)

    def _check_row(
        self, place: str, fate: Fate, parts: list[tuple[int, int, int | None]], epochs: int, whole: bool
    ) -> None:
        counts = [0] * fate.length
        for start, stop, _ in parts:
            for at in range(start, stop):
                counts[at] += 1
        times = max(counts, default=0)
        wanted = [0] * fate.length
        for start, (tokens, _) in fate.pieces:
            wanted[start : start + len(tokens)] = [times] * len(tokens)
        if not whole:
            assert times <= 1, f"{place} came twice"
            return
        assert counts == wanted, f"{place}: its tokens came {counts} times, not {wanted}"
        if self.stop is not None:
            assert self.stop != "first_exhausted" or times <= epochs, (
                f"{place} came {times} times in {epochs} epochs"
            )
            assert self.stop != "all_exhausted" or times >= epochs or not fate.pieces, (
                f"{place} came {times} times"
            )
            return
        assert times == (1 if fate.pieces else 0), f"{place} came {times} times"
        if self.settings["balance_window"]:  # packs of a window come in another order
            parts = sorted(parts, key=lambda part: part[:2])
        ends = [stop for _, stop, _ in parts]
        assert not self.wraps or [start for start, _, _ in parts[1:]] == ends[:-1], f"{place}: out of order"
        trained = None
        if len(parts) > 1:
            labels = self.rows[place][1]  # type: ignore[index]  # truncated rows are one part
            trained = sum(label != IGNORE for a, b, _ in parts for label in labels[a + 1 : b])
        assert {told for _, _, told in parts} <= {trained}, (
            f"{place}: fragments tell of {parts}, not {trained}"
        )

    def check_ledger(self, ledger: Mapping[str, Any], packs: Iterable[Plain], *, epochs: int) -> None:
        """Every count, of a run that was read to its end."""
        real = [pack for pack in packs if pack.fragments]
        packed = sum(stop - start for pack in real for _, start, stop, *_ in pack.fragments)
        assert (ledger["packs"], ledger["packed"]) == (len(real), packed), "the ledger miscounts packs"
        room = len(real) * self.limit
        if self.settings["strategy"] == "padded":
            room = packed + sum(padding for pack in real for *_, padding in pack.fragments)
        assert (ledger["capacity"], ledger["buffered"]) == (room, 0), "tokens are left"
        dropped = {name: n for name, n in ledger.items() if name.startswith("dropped_")}
        assert ledger["tokens_in"] == packed + sum(dropped.values()), "tokens in are not packed + dropped"
        if self.stop is not None:
            return
        lost: Counter[str] = Counter()
        for fate in self.fates.values():
            lost[f"dropped_{fate.dropped}"] += epochs * (fate.length - fate.kept)
        assert +Counter(dropped) == +lost, f"the ledger drops {dropped}, and should {lost}"
        untrained = sum(fate.length > 0 and self._untrained(fate) for fate in self.fates.values())
        counts = {"samples": len(self.fates), "untrained": untrained, "bad_records": self.bad}
        for name, count in counts.items():
            assert ledger[name] == epochs * count, f"{name}={ledger[name]}, not {epochs} x {count}"
        assert ledger["tokens_in"] == epochs * sum(fate.length for fate in self.fates.values())

    @staticmethod
    def _untrained(fate: Fate) -> bool:
        return not fate.trained and fate.dropped != "overlong"

    def check_shares(self, packs: Iterable[Plain], weights: Mapping[str, float]) -> None:
        """In every lane and epoch, no source of a mixture is further from its share than the bound of the docs."""
        longest = max([self.limit, *(fate.trained for fate in self.fates.values())])
        bound = len(weights) * (longest + 1)
        trained: dict[Any, Counter[str]] = defaultdict(Counter)
        for pack in packs:
            for row_id, start, *_ in pack.fragments:
                place = self.place(row_id)
                if start == self.fates[place].pieces[0][0]:
                    trained[pack.epoch, pack.lane][place.split(": ")[0]] += self.fates[place].trained
        for of_lane in trained.values():
            for name, weight in weights.items():
                share = of_lane.total() * weight / sum(weights.values())
                assert abs(of_lane[name] - share) <= bound, f"source {name}: {of_lane[name]}, share {share}"


def check_masks(lens: Sequence[Sequence[int]], dense: Any, cu_seqlens: list[int]) -> None:
    """Every row of some packs' dense mask, where sequences begin and end, and all of ``cu_seqlens``."""
    bounds = [0, *accumulate(n for of_pack in lens for n in of_pack)]
    assert cu_seqlens == sorted(cu_seqlens), "cu_seqlens go back"
    assert sorted(set(cu_seqlens)) == bounds, "cu_seqlens lie elsewhere"
    for number, of_pack in enumerate(lens):
        document = [i for i, n in enumerate(of_pack) for _ in range(n)]
        ends = list(accumulate(of_pack))
        for q in sorted({0, *(end - 1 for end in ends), *(end for end in ends[:-1])})[:12]:
            row = [document[k] == document[q] and k <= q for k in range(len(document))]
            assert dense[number][q].tolist() == row, f"row {q} of the mask of {list(of_pack)} leaks or hides"
