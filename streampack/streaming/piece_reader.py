"""The pieces of a lane: its rows, encoded and cut, and counted in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from streampack.accounting import Ledger, SourceStats, trained_tokens, trains_nothing
from streampack.packing.cut_samples import untrained_error
from streampack.sources.base import BadRecord, Reader, Reading
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import LaneState
from streampack.streaming.ledger_messages import FIRST_ROWS, warn_of_first_rows
from streampack.types import Cursor, Row, RowId, Sample

UNREADABLE: Mapping[str, Any] = MappingProxyType({})
"""Marks a row whose data could not be read, so that it is skipped."""


@dataclass(slots=True)
class Piece:
    """A sample, or a part of one that was too long, that waits to be packed."""

    sample: Sample
    length: int  # tokens of sample
    row_id: RowId
    start: int  # of the piece in its row's sample, in tokens
    epoch: int
    cursor: Cursor  # of its row
    first: int  # number of its row's first piece
    number: int  # of this piece, counted from the lane's beginning
    trained: int | None  # see Fragment


class PieceReader:
    """The pieces of one lane, in order, epoch by epoch.

    Every piece has a number, and so has a row that makes none, so that a replay of the same rows numbers them alike.
    An error (a broken row, a failing disk) consumes nothing: the next call tries the same row again.
    """

    def __init__(self, config: LaneConfig, *, lane: int, num_lanes: int) -> None:
        self.config = config
        self.lane = lane
        self.num_lanes = num_lanes
        self.ledger = Ledger()
        self.source_stats = [SourceStats() for _ in config.source.names]
        self.epoch = 0
        self.next_number = 0
        self.pending: list[Piece] = []  # pieces of the newest row that were not handed out yet
        self.row: Row | None = None  # read and not yet encoded; stays when encoding fails
        self.unreadable = ""  # why that row could not be read, if it could not
        self.rows_in_epoch = self.pieces_in_epoch = 0
        self.reader: Reader

    def open(self, epoch: int, start: Cursor | None = None, *, replayed: int = 0) -> None:
        """Begin to read an epoch, at a cursor or at its beginning. If this fails, nothing has changed."""
        config = self.config
        reading = Reading(
            self.lane,
            num_lanes=self.num_lanes,
            epoch=epoch,
            seed=config.seed,
            shuffle_window=config.shuffle_window,
            start=start,
            stagger=config.packing.max_seq_len,  # lanes of a mixture begin at most so many tokens apart
            replayed=replayed,
        )
        self.reader = config.source.read(reading)
        self.epoch = epoch
        self.rows_in_epoch = self.pieces_in_epoch = 0

    def next(self) -> Piece | None:
        """Return the next piece; None at the end of the epoch.

        Raises:
            ValueError: for a bad row, with its place.
        """
        while not self.pending:
            if (row := self._read()) is None:
                return None
            self.pending = self._pieces(row, replay=False)
            self.row = None
            if not self.pending:
                self.next_number += 1  # a row without pieces has one number
                self._warn_if_all_dropped()
        piece = self.pending.pop(0)
        self.next_number = piece.number + 1
        self.pieces_in_epoch += 1
        self.ledger.tokens_in += piece.length
        if self.source_stats:
            self.stats(piece.row_id).tokens_in += piece.length
        return piece

    def position(self) -> tuple[int, Cursor, int]:
        """Return where to read again if nothing waits: epoch, cursor, and the number of the first piece there."""
        if self.pending:
            return self.pending[0].epoch, self.pending[0].cursor, self.pending[0].first
        return self.epoch, self.row.cursor if self.row else self.reader.cursor, self.next_number

    def replay(self, state: LaneState) -> list[Piece]:
        """Read again from a state's cursor up to where it was taken; return the pieces that waited then.

        Raises:
            ValueError: if there are fewer pieces than the state counts.
        """
        self.ledger = state.ledger.copy()
        self.source_stats = [stats.copy() for stats in state.source_stats]
        self.open(state.epoch, state.cursor, replayed=state.next_piece - state.first)
        self.rows_in_epoch = self.pieces_in_epoch = 1  # not 0: a partly read epoch must not look empty
        self.next_number = state.first
        waiting = []
        while self.next_number < state.next_piece:
            row = self._read()
            if row is None:
                raise ValueError(
                    f"lane {self.lane}: the state says {state.next_piece} pieces were read and the "
                    f"corpus ends after {self.next_number}; the data or the encoder changed"
                )
            consumed = state.consumed >> (self.next_number - state.first)
            # A mixture draws by what its rows train, so it encodes those that are consumed, too.
            skip = consumed & 1 and self.config.packing.keeps_one_piece_per_sample and not self.source_stats
            pieces = [] if skip else self._pieces(row, replay=True)
            self.row = None
            self.pieces_in_epoch += 1  # a replay may span whole epochs, which must not look empty
            for piece in pieces:
                if self.next_number == state.next_piece:
                    self.pending.append(piece)
                    continue
                if not consumed & 1:
                    waiting.append(piece)
                self.next_number += 1
                consumed >>= 1
            if not pieces:  # packed or dropped: the row had one number
                self.next_number += 1
        return waiting

    def stats(self, row_id: RowId) -> SourceStats:
        """Return the stats of a row's source in a mixture."""
        return self.source_stats[self.config.source.source_index(row_id)]

    def _read(self) -> Row | None:
        while self.row is None:
            try:
                self.row = next(self.reader, None)
            except BadRecord as error:
                if self.config.quarantine is None:
                    raise error.unskipped() from None
                self.reader.skip()
                self.row = Row(UNREADABLE, error.cursor, error.row_id)
                self.unreadable = error.reason
            if self.row is None:
                # Without an end, a lane of which no row makes a piece would be read for ever.
                if not self.config.endless or not self.pieces_in_epoch:
                    return None
                ended = self.reader
                self.open(self.epoch + 1)
                self.reader.continue_from(ended)
            else:
                self.rows_in_epoch += 1
        return self.row

    def _pieces(self, row: Row, *, replay: bool) -> list[Piece]:
        """Encode a row and cut it to pieces; none if it is dropped. A replay books nothing a second time."""
        config = self.config
        sample_or_reason = self.unreadable if row.data is UNREADABLE else config.sample(row)
        if isinstance(sample_or_reason, str):
            self._skip_record(row, sample_or_reason, replay=replay)
            return []
        sample = sample_or_reason
        try:
            parts = config.cut(sample)
            trained = None
            if len(parts) > 1:
                trained = trained_tokens(sample, [start for start, _ in parts[1:]])
                untrained = trained == 0
            else:
                untrained = bool(parts) and trains_nothing(parts[0][1])
            if untrained and config.untrained == "error":
                raise untrained_error(sample.tokens.size, config.packing)
        except ValueError as error:
            raise ValueError(f"{config.source.locate(row.row_id)} {error}") from None
        if untrained and config.untrained == "drop":
            parts = []
        first = self.next_number
        pieces = [
            Piece(
                part, part.tokens.size, row.row_id, start, self.epoch, row.cursor, first, first + i, trained
            )
            for i, (start, part) in enumerate(parts)
        ]
        if self.source_stats:
            self.reader.charge([part for _, part in parts])
        if not replay:
            self.ledger.samples += 1
            self.ledger.untrained += untrained
            lost = 0
            if not pieces or pieces[0].sample is not sample:  # most samples are one piece
                lost = self._book_loss(sample, pieces, untrained=untrained)
            if self.source_stats:
                stats = self._begin_stats(row)
                stats.samples += 1
                stats.tokens_in += lost
        return pieces

    def _book_loss(self, sample: Sample, pieces: list[Piece], *, untrained: bool) -> int:
        """Book and return the tokens of a sample that are in none of its pieces; those in pieces count as they come."""
        lost = sample.tokens.size - sum(piece.length for piece in pieces)
        if lost or not pieces:
            self.ledger.tokens_in += lost
            if pieces:
                reason = "truncated"
            else:
                reason = "untrained" if untrained else "overlong" if lost else "empty"
            self.ledger.drop(reason, lost)
        return lost

    def _warn_if_all_dropped(self) -> None:
        """Warn early where every row is dropped: a corpus may take days to read."""
        kept = self.ledger.packed or self.ledger.buffered
        if self.next_number == FIRST_ROWS and not kept:  # a dropped row has one number
            warn_of_first_rows(self.lane, self.ledger)

    def _skip_record(self, row: Row, reason: str, *, replay: bool) -> None:
        """Book a bad record as a dropped row; a replay books nothing a second time."""
        quarantine = self.config.quarantine
        assert quarantine is not None
        if not replay:
            source, before = self.config.source, self.ledger.dropped_samples["bad"]
            quarantine.skip(self.lane, source=source, row_id=row.row_id, reason=reason, before=before)
            self.ledger.drop("bad", 0)
            if self.source_stats:
                self._begin_stats(row)
        if row.data is not UNREADABLE:
            self.reader.charge([])

    def _begin_stats(self, row: Row) -> SourceStats:
        """Return the stats of the newest row's source, having counted whether it was begun anew."""
        stats = self.stats(row.row_id)
        stats.epochs += self.reader.first_of_pass
        return stats
