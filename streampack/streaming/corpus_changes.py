"""Resume where files or sources were added, removed or changed since the state was made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from streampack.accounting import SourceStats
from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.lane_state import LaneState, Snapshot
from streampack.sources.mechanics.corpus_lists import CorpusList, changes, moves, some
from streampack.sources.mechanics.files import FileSource, file_sources
from streampack.sources.mixture_reader import remapped
from streampack.sources.reading import Division
from streampack.sources.source import Source
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

    @property
    def warning(self) -> str:
        """The warning of a corpus that changed: what changed, and what the run reads now."""
        what = "; ".join(f"{name}: {what}" if name else what for name, what in self.changed.items())
        if self.loaded.nothing_read:
            then = "Nothing was read before, so the run begins with this one"
        else:
            then = (
                "Added files are read from the next epoch of their source on; removed and changed ones are no longer "
                "read, and their buffered pieces are dropped"
            )
        return f"the corpus changed since the state was made: {what}. {then}"


class CorpusChanges:
    """Keeps the lists of a run's files in a folder, and lets a run continue with others; see docs/architecture.md.

    Lanes never divide the rows of an epoch by different lists. Without a ``folder``, a run keeps its own files.
    """

    def __init__(self, source: Source, *, folder: str | os.PathLike[str] | None) -> None:
        self.source = source
        self.folder = None if folder is None else Path(folder)
        self.kept_in = self.folder  # for a resume that may have other files
        self.histories: Histories = {}
        # Digests of the lists that are in the folder, and their numbers of lanes.
        self._kept: set[tuple[str, int]] = set()

    def state(self, num_lanes: int | None) -> dict[str, Any]:
        """Return what a state holds: the names of a mixture's sources, and the history of each source of files.

        The newest lists are kept in a folder, if there is one.
        """
        for name, source in file_sources(self.source).items():
            digest = source.corpus.digest()
            self.histories.setdefault(name, [(0, digest)])
            if self.kept_in is not None and num_lanes is not None and (digest, num_lanes) not in self._kept:
                source.corpus_list(num_lanes).save(self.kept_in, digest)
                self._kept.add((digest, num_lanes))
        histories = {name: [list(pair) for pair in history] for name, history in self.histories.items()}
        return {"sources": list(self.source.names), "corpus": histories}

    def resume(self, state: Mapping[str, Any], loaded: RunState, config: LaneConfig) -> Resumed:
        """Return what a run needs to continue from a state. It names no changes where they are not allowed."""
        names, now = list(state["sources"]), self.source.names
        changed: dict[str, str] = {}
        if names and now and names != now:
            changed = {name: "is new" for name in now if name not in names}
            changed |= {name: "was removed" for name in names if name not in now}
            changed = changed or {", ".join(now): "are in another order"}
        others, gone = dict(changed), False
        sources = file_sources(self.source)
        histories = {name: [(0, source.corpus.digest())] for name, source in sources.items()}
        for name, history in state["corpus"].items():
            if name in sources:
                histories[name] = [(epoch, digest) for epoch, digest in history]
                if histories[name][-1][1] != sources[name].corpus.digest():
                    changed[name] = "its files are others"
        if changed and self.folder is None:  # the identities are compared next, and their difference is told
            return Resumed(loaded, {}, {}, {})
        if others:
            loaded = _of_sources(loaded, names, now)
        for name in [name for name in sources if name in changed and name not in others]:
            if loaded.nothing_read:
                histories[name] = [(0, sources[name].corpus.digest())]
            else:
                changed[name], loaded, any_gone = self._of_files(name, sources[name], histories[name], loaded)
                gone |= any_gone
        earlier = {
            name: self._earlier(name, source, histories[name], loaded) for name, source in sources.items()
        }
        if gone:
            loaded = _without_gone(loaded, replace(config, earlier=earlier))
        return Resumed(loaded, changed, earlier, histories)

    def _of_files(
        self, name: str, source: FileSource, history: list[tuple[int, str]], loaded: RunState
    ) -> tuple[str, RunState, bool]:
        """Describe what changed in a source's files; return the state with the ids that waiting rows have now.

        Also return whether files are gone.
        """
        epochs = self._epochs(name, [state["reader"] for state in loaded.lane_states.values()])
        first = self.source.epochs_read(loaded.epoch)[name]
        # Each consumer would let the new list begin in another epoch: the one after the latest of its own lanes.
        if loaded.partial and len(epochs) != loaded.num_lanes and any(epoch > first for epoch in epochs):
            raise ValueError(
                f"the state has {len(epochs)} of {loaded.num_lanes} lanes, and the others decide, too, when a run "
                "reads other files: merge the states of all consumers, or iterate a PackedDataLoader, whose "
                "states have all lanes (those of torch's DataLoader with workers have some each)"
            )
        [kept], now = self._lists([history[-1][1]], loaded), source.listed()
        # Where a row's id has the number of its file.
        before, numbers, at = kept.files, moves(kept.files, now), 1 if name else 0
        names = [[entry.name for entry in each] for each in (before, now)]
        if before and set(numbers) == {None} and not {*names[0]}.intersection(names[1]):
            raise ValueError(
                f"{name}{name and ': '}none of the {len(before):,} files that the run began with ({some(names[0])}) is "
                f"there any more; there are {some(names[1])}. Give what the run began with, or begin a new run from "
                "the weights"
                + (", or give this source of the mixture a new name, under which it begins" if name else "")
            )
        history.append((1 + max(epochs, default=first), source.corpus.digest()))
        index = self.source.names.index(name) if name else None

        def row_id(found: RowId) -> RowId | None:
            if name and found[0] != index:
                return found
            number = numbers[found[at]]
            return None if number is None else (*found[:at], number, *found[at + 1 :])

        paths = [file.shown for file in source.files]
        what = changes(before, now, paths=paths) or "the files are in another order"
        return (
            what,
            loaded.with_lanes(lambda state: state.remapped(row_id, lambda cursor: cursor)),
            None in numbers,
        )

    def _earlier(
        self, name: str, source: FileSource, history: list[tuple[int, str]], loaded: RunState
    ) -> list[Division]:
        """Return the divisions that lanes still read by, and forget the lists that none reads by any more."""
        states = loaded.lane_states.values()
        epochs = self._epochs(
            name, [state["window"] if "window" in state else state["reader"] for state in states]
        )
        least = min(epochs, default=0) if len(epochs) == loaded.num_lanes else 0
        while len(history) > 1 and history[1][0] <= least:
            del history[0]
        if len(history) == 1:
            return []
        lists = self._lists([digest for _, digest in history[:-1]], loaded)
        entries = [*(each.files for each in lists), source.listed()]
        return [Division(history[i + 1][0], each.parts_in(entries[i + 1 :])) for i, each in enumerate(lists)]

    def _lists(self, digests: Sequence[str], loaded: RunState) -> list[CorpusList]:
        if self.folder is None or loaded.num_lanes is None:
            raise ValueError(
                "the files of this run were changed before; give corpus_lists, where their lists are kept"
            )
        return [CorpusList.load(self.folder, digest, loaded.num_lanes) for digest in digests]

    def _epochs(self, name: str, readers: Sequence[Sequence[Any]]) -> list[int]:
        """Return the epoch of a source that each lane reads, from plain values of a `ReaderSnapshot`."""
        return [self.source.epochs_read(epoch, tuple(cursor))[name] for epoch, cursor, *_ in readers]


def _without_gone(loaded: RunState, config: LaneConfig) -> RunState:
    """Return the state without the packs of open windows for which records of removed files were read.

    The other windows are planned again as they were. Files that an earlier change removed count, too.
    """

    def of_lane(lane: int, found: Snapshot) -> Snapshot:
        state = LaneState.from_dict(found)
        if state.window is None:
            return found
        begin = state.window.begin
        reader = config.open(lane, num_lanes=loaded.num_lanes or 1, epoch=begin.epoch, start=begin.cursor)
        same = begin.epoch == state.epoch and not reader.lacks(state.reader.cursor)
        return found if same else state.closed().as_dict()

    return replace(
        loaded, lane_states={lane: of_lane(lane, each) for lane, each in loaded.lane_states.items()}
    )


def _of_sources(loaded: RunState, before: Sequence[str], now: Sequence[str]) -> RunState:
    """Return the state of a mixture of the sources ``before`` for one of the sources ``now``, given by name."""
    to = {i: now.index(name) for i, name in enumerate(before) if name in now}

    def row_id(found: RowId) -> RowId | None:
        return (to[found[0]], *found[1:]) if found[0] in to else None

    def of_lane(state: LaneState) -> LaneState:
        state = state.closed().remapped(row_id, lambda cursor: remapped(cursor, before, now))
        stats = dict(zip(before, state.source_stats, strict=True))
        found = tuple(stats.get(name, SourceStats()) for name in now)
        return replace(state, source_stats=found, bad_in_pass=())

    return loaded.with_lanes(of_lane)
