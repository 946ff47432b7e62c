"""Resume where files or sources were added, removed or changed since the state was made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from streampack.accounting import SourceStats
from streampack.sources.corpus_lists import CorpusList, changes, moves, some
from streampack.sources.files import FileSource, file_sources
from streampack.sources.mixture_reader import translated
from streampack.sources.reading import Division
from streampack.sources.source import Source
from streampack.streaming.lane_state import LaneState
from streampack.streaming.run_state import RunState
from streampack.types import RowId

Histories = dict[str, list[tuple[int, str]]]
"""For each source of files the lists that a run was read by: (first epoch, digest of the list), the oldest first."""


class Resumed(NamedTuple):
    """The result of `CorpusChanges.resume`."""

    loaded: RunState  # for the sources of now
    changed: dict[str, str]  # by source, what
    earlier: dict[str, list[Division]]  # see `Reading`
    histories: Histories


class CorpusChanges:
    """Keeps the lists of a run's files, and lets a run go on with others.

    The parts of all lanes follow from the list of files. So a run that goes on with another list reads the rest of an
    epoch by the parts of the old one, less those of files that are gone, and the next epochs by the new list. The
    epoch in which the new list begins is the one after the latest that any lane has begun: then lanes never divide the
    rows of an epoch by different lists.

    Args:
        source: of the run.
        folder: where the lists are kept; None if they are not, and a run goes on with its own files only.
    """

    def __init__(self, source: Source, *, folder: str | os.PathLike[str] | None) -> None:
        self.source = source
        self.folder = None if folder is None else Path(folder)
        self.kept_in = self.folder  # for a resume that may go on with other files
        self.histories: Histories = {}
        # Digests of the lists that are in the folder, and their numbers of lanes.
        self._kept: set[tuple[str, int]] = set()

    def state(self, num_lanes: int | None) -> dict[str, Any]:
        """Return what a state holds: the names of a mixture's sources, and the history of each source of files.

        The newest lists are kept in a folder, if there is one.
        """
        for name, source in file_sources(self.source).items():
            digest = source.marks().content
            self.histories.setdefault(name, [(0, digest)])
            if self.kept_in is not None and num_lanes is not None and (digest, num_lanes) not in self._kept:
                source.corpus_list(num_lanes).save(self.kept_in, digest)
                self._kept.add((digest, num_lanes))
        histories = {name: [list(pair) for pair in history] for name, history in self.histories.items()}
        return {"sources": list(self.source.names), "corpus": histories}

    def resume(self, state: Mapping[str, Any], loaded: RunState) -> Resumed:
        """Return what a run needs to go on from a state.

        Raises:
            ValueError: if a list is missing that is needed, or if the state is that of one of several consumers.
        """
        names = list(state["sources"])
        histories = {
            name: [(epoch, digest) for epoch, digest in each] for name, each in state["corpus"].items()
        }
        changed = self._renamed(names)
        if changed and self.folder is None:  # the identities are compared next, and their difference is told
            return Resumed(loaded, {}, {}, {})
        if changed:
            loaded = _of_sources(loaded, names, self.source.names)
        for name, source in file_sources(self.source).items():
            digest = source.marks().content
            history = histories.setdefault(name, [(0, digest)])
            # The same object: pickled, the state is then equal byte for byte to that of a run without a resume.
            history[:] = [(epoch, digest if before == digest else before) for epoch, before in history]
            if history[-1][1] != digest:
                if self.folder is None:
                    return Resumed(loaded, {}, {}, {})
                changed[name] = self._described(name, source, history[-1][1], loaded)
                self._require_all_lanes(name, loaded)
                loaded = self._of_files(name, source, history[-1][1], loaded)
                begin = 1 + max(self._epochs(name, loaded.lane_states.values()), default=0)
                history[:] = [(0, digest)] if loaded.nothing_read else [*history, (begin, digest)]
        earlier = {
            name: self._earlier(name, source, histories[name], loaded)
            for name, source in file_sources(self.source).items()
        }
        return Resumed(loaded, changed, earlier, {name: histories[name] for name in earlier})

    def _renamed(self, names: Sequence[str]) -> dict[str, str]:
        """Return which sources of a mixture were added and removed."""
        now = self.source.names
        if not names or not now or names == now:
            return {}
        found = {name: "is new" for name in now if name not in names}
        found |= {name: "was removed" for name in names if name not in now}
        return found or {", ".join(now): "are in another order"}

    def _described(self, name: str, source: FileSource, digest: str, loaded: RunState) -> str:
        """Describe what changed in a source's files, by the list that was kept, if there is one.

        Raises:
            ValueError: if none is there any more: nothing would be read of them, and all of the others would be added.
        """
        if self.folder is None or loaded.num_lanes is None or loaded.nothing_read:
            return "its files are others"
        before, now = CorpusList.load(self.folder, digest, loaded.num_lanes).files, source.listed()
        if before and set(moves(before, now)) == {None}:
            names = [some([entry.name for entry in each]) for each in (before, now)]
            what = (
                f"none of the {len(before):,} files that the run began with ({names[0]}) is there any more; "
                f"there are {names[1]}"
            )
            raise ValueError(
                f"{described({name: what})}. Give what the run began with, or begin a new run from the weights"
                + (", or name this source of the mixture anew, as which it begins" if name else "")
            )
        paths = [file.shown for file in source.marks().files]
        return changes(before, now, paths=paths) or "the files are in another order"

    def _of_files(self, name: str, source: FileSource, digest: str, loaded: RunState) -> RunState:
        """Return the state with the ids that waiting rows have in a source's list of files of now."""
        if self.folder is None or loaded.num_lanes is None or loaded.nothing_read:
            return loaded
        numbers = moves(CorpusList.load(self.folder, digest, loaded.num_lanes).files, source.listed())
        index = self.source.names.index(name) if name else None

        def row_id(found: RowId) -> RowId | None:
            front, own = ((), found) if index is None else (found[:1], found[1:])
            if index is not None and front != (index,):
                return found
            if own[0] >= len(numbers) or (number := numbers[own[0]]) is None:
                return None
            return (*front, number, *own[1:])

        if None in numbers:
            loaded = loaded.with_lanes(LaneState.closed)
        return loaded.with_lanes(lambda state: state.moved(row_id, lambda cursor: cursor))

    def _epochs(self, name: str, lane_states: Iterable[LaneState], *, least: bool = False) -> list[int]:
        """Return the epoch of a source that each lane reads; with ``least``, the one in which a resume begins."""
        stands = [state.begin if least else state.stand for state in lane_states]
        return [self.source.epochs_read(stand.epoch, stand.cursor)[name] for stand in stands]

    def _require_all_lanes(self, name: str, loaded: RunState) -> None:
        """Refuse a state without the lanes of other consumers, such as other workers of torch's DataLoader.

        The new list begins after the latest epoch of any lane, and each consumer would take another one, except in the
        first epoch. A lane that has yielded nothing has no state either.
        """
        states = loaded.lane_states.values()
        if not loaded.partial or len(states) == loaded.num_lanes:
            return
        for epoch in self._epochs(name, states):
            if epoch > self.source.epochs_read(loaded.epoch)[name]:
                raise ValueError(
                    f"the state has {len(states)} of {loaded.num_lanes} lanes, and the others decide, too, when a run "
                    "goes on with other files: merge the states of all consumers, or iterate a PackedDataLoader, whose "
                    "states have all lanes (those of torch's DataLoader with workers have some each)"
                )

    def _earlier(
        self, name: str, source: FileSource, history: list[tuple[int, str]], loaded: RunState
    ) -> list[Division]:
        """Return the divisions that lanes still read by, and forget the lists that none reads by any more."""
        all_begun = len(loaded.lane_states) == loaded.num_lanes
        least = (
            min(self._epochs(name, loaded.lane_states.values(), least=True), default=0) if all_begun else 0
        )
        while len(history) > 1 and history[1][0] <= least:
            del history[0]
        if len(history) == 1:
            return []
        if self.folder is None or loaded.num_lanes is None:
            raise ValueError(
                "the files of this run were changed before; give corpus_lists, where their lists are kept"
            )
        lists = [CorpusList.load(self.folder, digest, loaded.num_lanes) for _, digest in history[:-1]]
        entries = [*(each.files for each in lists), source.listed()]
        return [Division(history[i + 1][0], each.parts_in(entries[i + 1 :])) for i, each in enumerate(lists)]


def _of_sources(loaded: RunState, before: Sequence[str], now: Sequence[str]) -> RunState:
    """Return the state of a mixture of the sources ``before`` for one of the sources ``now``, given by name."""
    to = {i: now.index(name) for i, name in enumerate(before) if name in now}

    def row_id(found: RowId) -> RowId | None:
        return (to[found[0]], *found[1:]) if found[0] in to else None

    def of_lane(state: LaneState) -> LaneState:
        state = state.closed().moved(row_id, lambda cursor: translated(cursor, before, now))
        stats = dict(zip(before, state.source_stats, strict=True))
        found = tuple(stats.get(name, SourceStats()) for name in now)
        return replace(state, source_stats=found, bad_in_pass=())

    return loaded.with_lanes(of_lane)


def what_happens(loaded: RunState) -> str:
    """Say what becomes of files that changed since a state was made."""
    if loaded.nothing_read:
        return "Nothing was read before, so the run begins with this one"
    return (
        "Added files are read from the next epoch of their source on; of removed and changed ones nothing more is "
        "read, and what waited of them is dropped"
    )


def described(changed: Mapping[str, str]) -> str:
    """Return what changed in each source as one line."""
    return "; ".join(f"{name}: {what}" if name else what for name, what in changed.items())
