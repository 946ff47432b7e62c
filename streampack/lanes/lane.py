"""A lane: one stream of rows, encoded, planned and assembled into packs, that can resume from a state."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from streampack.accounting import Ledger, trained_tokens
from streampack.lanes.balance import in_order
from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.lane_state import (
    LaneEvent,
    LaneState,
    OpenWindow,
    Snapshot,
    plain_reader,
    snapshot_of,
)
from streampack.lanes.piece_reader import Piece, PieceReader
from streampack.packing.assemble import assemble
from streampack.packing.groups import Group, pack_groups
from streampack.packing.media import media_of
from streampack.packing.planner import Placed, Planner
from streampack.storage.prefetch import Prefetch
from streampack.types import Fragment, Pack, RowId, Sample

log = logging.getLogger(__name__)
Rows = Mapping[RowId, Mapping[str, Any]]


class Lane:
    """Make the packs of one lane: they follow from (config, lane, state), whatever else is read.

    The constructor reads nothing, so that `prepare` can be called for many lanes first. With a state, `restore` must be
    called next. After an error a lane is of no more use.
    """

    def __init__(
        self,
        config: LaneConfig,
        *,
        lane: int = 0,
        num_lanes: int = 1,
        state: Snapshot | None = None,
        first_epoch: int = 0,
        prefetch: Prefetch | None = None,
    ) -> None:
        self.config = config
        self.lane = lane
        self.first_epoch = first_epoch
        self.done = False  # whether this epoch is used up
        self.packs = 0  # made in this epoch; with ``endless``, since the beginning
        self.resumes_from = None if state is None else LaneState.from_dict(state)  # until `restore`
        self.piece_reader = reader = PieceReader(config, lane=lane, num_lanes=num_lanes, prefetch=prefetch)
        self.planner: Planner[Piece] = Planner(self.config.packing, reader.next)
        # With ``balance_window``, the packs that are not emitted yet, and their tokens.
        self.window: tuple[Any, ...] | None = None  # an `OpenWindow` as plain values
        self.planned: deque[list[Placed[Piece]]] = deque()
        self.planned_tokens = 0
        if self.resumes_from is None:
            reader.open(self.first_epoch)
        else:
            reader.open(self.resumes_from.begin.epoch, self.resumes_from.begin.cursor)

    @property
    def epoch(self) -> int:
        """The epoch that is read, from 0."""
        return self.piece_reader.epoch

    @property
    def ledger(self) -> Ledger:
        """Counts of the tokens read, packed and dropped."""
        return self.piece_reader.ledger

    def prepare(self) -> None:
        """Begin to fetch what the lane reads next, if it is behind a URL. It changes no pack and raises no error."""
        self.piece_reader.reader.prepare()

    def waiting_rows(self) -> list[RowId]:
        """Return the ids of the rows that `restore` needs."""
        state = self.resumes_from
        return [] if state is None else [address.row_id for address in state.begin.waiting]

    def restore(self, rows: Rows) -> None:
        """Resume from the state, if there is one, with the `waiting_rows`; begin ``first_epoch`` if it ended before."""
        state, self.resumes_from = self.resumes_from, None
        if state is not None:
            self._restore(state, [rows[address.row_id] for address in state.begin.waiting])
        if self.epoch < self.first_epoch:
            self.start_epoch(self.first_epoch)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch. The one before must be used up."""
        if self._held or (self.piece_reader.epoch_has_rows and not self.done):
            raise ValueError(
                f"lane {self.lane} cannot begin epoch {epoch}: it is in the middle of epoch {self.epoch}, and "
                f"{self._held} tokens of it wait to be packed; the state does not fit together, or is of a "
                "run without an end (epochs=None)"
            )
        self.piece_reader.begin_epoch(epoch)
        self.packs, self.done = 0, False

    def next_event(self) -> LaneEvent:
        """Return the next pack, or the end of the epoch, with the state after it.

        With ``endless``, epochs follow one another by themselves, and there is an end only if no row makes a piece.
        """
        if self.done:
            placed = []
        elif self.config.balance_window:
            if not self.planned:
                self._plan()
            placed = self._take()
        else:
            self.planner.packs = self.packs
            placed = self.planner.next_pack()
        self.piece_reader.check()
        self.done = not placed
        pack = self._assembled(placed) if placed else None
        epoch = 0 if self.config.endless else self.epoch
        return LaneEvent(self.lane, epoch, pack, self.snapshot(), self.ledger.example)

    def _assembled(self, placed: list[Placed[Piece]]) -> Pack:
        reader, packing = self.piece_reader, self.config.packing
        sequences: list[Sample] = []
        fragments: list[Fragment] = []
        seq_lens: list[int] = []
        grouped, mixed = False, bool(reader.source_stats)
        packed = taken = 0
        for piece, start, stop in placed:
            sequence, row_id, first, length = piece.sample, piece.row_id, piece.start, stop - start
            if piece.media:
                if (found := reader.with_media(piece)) is None:
                    continue
                sequence, taken = found, taken + piece.media
            packed += length
            if length < piece.length:
                if piece.trained is None:
                    # `label_weights` divides by the trained tokens of the unsplit sample, so that a split sample weighs
                    # as much as another. All cuts of a piece follow from this one fragment, so they are counted once.
                    piece.trained = trained_tokens(sequence, packing.cuts(piece.length, start, stop))
                sequence = sequence.cut(start, stop)
            sequences.append(sequence)
            if type(sequence) is Group:
                grouped = True
                seq_lens += sequence.lengths
                fragments += [Fragment(row_id, *bounds) for bounds in sequence.bounds]
            else:
                padding = -length % packing.pad_seqs_to
                seq_lens.append(length + padding)
                fragments.append(Fragment(row_id, first + start, first + stop, piece.trained, padding))
            if mixed:
                stats = reader.stats(row_id)
                stats.packed += length
                stats.trained += trained_tokens(sequence)
        size = packing.pack_len(sum(seq_lens))
        tokens, labels = assemble(
            sequences,
            max_seq_len=size,
            padding_idx=self.config.padding_idx,
            pad_seqs_to=packing.pad_seqs_to,
        )
        groups = pack_groups(sequences, labels, max_seq_len=size) if grouped else None
        ledger, media = reader.ledger, None
        if taken:
            media = media_of(sequences)
            ledger.images += sum(each.images for each in media if each is not None)
            ledger.media += taken
        self.packs += 1
        ledger.packs += 1
        ledger.capacity += size
        ledger.packed += packed
        return Pack(
            tokens=tokens,
            labels=labels,
            seq_lens=tuple(seq_lens),
            fragments=tuple(fragments),
            epoch=0 if self.config.endless else reader.epoch,
            number=self.packs - 1,
            lane=self.lane,
            groups=groups,
            media=media,
        )

    def snapshot(self) -> Snapshot:
        """Return plain values to resume from, between two packs."""
        reader, held = self.piece_reader, self._held
        if reader.ledger.buffered != held:
            raise RuntimeError(
                f"lane {self.lane} lost tokens: the ledger counts {reader.ledger.buffered} buffered tokens and the "
                f"lane holds {held}; this is a bug in streampack, do not trust this run"
            )
        return snapshot_of(
            self._reader(), done=self.done, packs=self.packs, window=self.window, **reader.snapshot()
        )

    def _reader(self) -> tuple[Any, ...]:
        """Return the plain values of a `ReaderSnapshot`."""
        reader, planner = self.piece_reader, self.planner
        waiting = [piece.address for piece in planner.waiting]
        return reader.epoch, reader.reader.cursor, waiting + reader.waiting, planner.offset

    @property
    def _held(self) -> int:
        """Tokens that were read and are in no emitted pack."""
        return self.planner.buffered + self.planned_tokens + self.piece_reader.waiting_tokens

    def _plan(self) -> None:
        """Plan the packs of a balance window that begins here, and ends at a multiple of its size, as in all lanes."""
        self.window = (*self._reader(), self.ledger.tokens_in, 0)
        self.planner.packs = self.packs
        size, planned = self.config.balance_window, list[list[Placed[Piece]]]()
        while len(planned) < size - self.packs % size and (placed := self.planner.next_pack()):
            planned.append(placed)
        self.planned = deque(in_order(self.config, planned, epoch=self.epoch, packs=self.packs))
        self.planned_tokens = sum(map(_tokens, self.planned))

    def _take(self) -> list[Placed[Piece]]:
        placed = self.planned.popleft() if self.planned else []
        self.planned_tokens -= _tokens(placed)
        window = self.window
        self.window = (*window[:-1], window[-1] + 1) if window and self.planned else None
        return placed

    def _restore(self, state: LaneState, waited: Sequence[Mapping[str, Any]]) -> None:
        # A state that was saved at the end of the last epoch may be continued with epochs=None. There, a lane has an
        # end only if none of its rows makes a piece.
        self.done = state.done and not (self.config.endless and (state.ledger.packed or state.restart))
        self.packs, self.planner.offset = state.packs, state.begin.offset
        self.piece_reader.restore(state, waited)
        if state.window is not None:
            self._plan_again(state, state.window)

    def _plan_again(self, state: LaneState, window: OpenWindow) -> None:
        """Plan the packs of a state's open window again, and skip those that were emitted."""
        reader = self.piece_reader
        self.packs -= window.emitted
        self._plan()
        reader.planning_again = False
        for _ in range(window.emitted):
            for piece, *_ in self._take():
                reader.forget(piece)
        same = self.ledger.tokens_in == state.ledger.tokens_in - window.tokens_in
        same = same and self._held == state.ledger.buffered and bool(self.planned)
        same = same and plain_reader(self._reader()) == plain_reader(state.reader.plain())
        if not same:
            raise ValueError(
                f"lane {self.lane}: other packs are planned than when the state was made; the data or the encoder "
                "changed since it was written"
            )
        self.packs, self.window = state.packs, (*window.begin.plain(), *window[1:])
        reader.end_window(state)


def _tokens(placed: list[Placed[Piece]]) -> int:
    return sum([stop - start for _, start, stop in placed])
