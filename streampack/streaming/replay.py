"""`Replay`: reads a lane's rows again, from where its state says to where the state was taken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from streampack.sources.base import OTHER_RECORDS, REMOVED
from streampack.streaming.lane_state import DAMAGED, LaneState, lowest_zero
from streampack.streaming.piece_reader import UNREADABLE, Piece, PieceReader
from streampack.streaming.row_log import LoggedRow, LoggedWindow, RowLog, digit_bits
from streampack.types import Row, Window


class Replay:
    """Reads a lane's rows again, from where its state says to where the state was taken.

    Making it opens the reader at the state's cursor, so that it can fetch ahead; `run` reads, or `run_anew` if the
    state is one of other settings.

    Args:
        reader: of the lane; nothing was read by it yet.
        state: of the lane.

    Raises:
        ValueError: if the state's rows and windows cannot be those of a lane.
    """

    def __init__(self, reader: PieceReader, state: LaneState) -> None:
        self.reader = reader
        self.state = state
        self.before = self._log_before()
        windows, first = self.before.windows, state.first
        if state.anew:
            # Pieces are numbered from 0. What a window's first piece will be is known when its first row is read.
            windows, first = [replace(each, first=self._first_anew(each), last=-1) for each in windows], 0
        reader.log = RowLog(sources=self.before.sources, first=first, epochs=[(first, state.epoch)])
        reader.next_number = first
        reader.known = self.before.known_windows()
        reader.log.expect(windows)
        reader.open(state.epoch, state.cursor)

    def run(self) -> tuple[list[Piece], int]:
        """Read again. The ledger is the state's; what is read again is not counted again.

        Returns:
            The pieces that waited then, or with an open window at its beginning and since; and how many rows had
            waiting pieces and are no longer in the corpus.

        Raises:
            ValueError: if the corpus or the encoder gives other rows or pieces than the state counts.
        """
        reader, state = self.reader, self.state
        waiting: list[Piece] = []
        removed = 0
        for logged, row in self._rows():
            numbers = range(logged.number, logged.number + logged.pieces)
            waits = [number for number in numbers if not state.spared >> (number - state.first) & 1]
            unpacked = any(not state.consumed >> (number - state.first) & 1 for number in waits)
            # Of the last row, some pieces may not have been asked for when the state was taken.
            open_ended = not (state.whole or reader.config.packing.keeps_one_piece_per_sample)
            last = open_ended and logged.number + logged.pieces == state.next_piece
            pieces: list[Piece] = []
            if row is None or row.data is REMOVED:
                removed += unpacked or last
            elif waits or last:
                if unpacked:
                    self._require_readable(row)
                pieces = reader.pieces_of(row, again=True)
                # Of a row that made no piece, the one number is consumed.
                too_few = len(pieces) < logged.pieces and (unpacked or (waits and pieces))
                if too_few or (len(pieces) > logged.pieces and not last):
                    raise ValueError(
                        f"lane {reader.lane}: {reader.config.source.locate(row.row_id)} makes {len(pieces)} pieces, "
                        f"and the state says {logged.pieces}; the data or the encoder changed since it was written"
                    )
            reader.row = None
            for i in range(logged.pieces):
                reader.log_row(row, another=i > 0)
            waiting += [pieces[number - logged.number] for number in waits] if pieces else []
            reader.newest, reader.pending = row, pieces[logged.pieces :]
        return waiting, removed

    def run_anew(self) -> list[Piece]:
        """Read again, and return new pieces of the rows of which nothing was packed, counted as if read first.

        Raises:
            ValueError: if the corpus gives other rows than the state counts.
        """
        reader, state = self.reader, self.state
        oldest = state.first + lowest_zero(state.consumed)
        waiting: list[Piece] = []
        for logged, row in self._rows():
            if row is None:
                continue
            ones = (1 << logged.pieces) - 1
            packed = bool(state.consumed >> (logged.number - state.first) & ones)
            packed |= bool(state.offset) and logged.number <= oldest < logged.number + logged.pieces
            if packed:
                pieces: list[Piece] = []
                if reader.source_stats:
                    reader.begin_stats(row)
            else:
                self._require_readable(row)
                pieces = reader.pieces_of(row, again=False)
            reader.row, reader.newest, reader.pending = None, row, pieces
            if not pieces:
                reader.log_row(row)
            while reader.pending and (piece := reader.next()):
                waiting.append(piece)
        ledger, waited = reader.ledger, state.ledger.tokens_in
        ledger.tokens_in -= waited
        if (lost := waited - ledger.tokens_in) > 0:
            ledger.tokens_in = waited
            ledger.drop("removed", lost)
        return waiting

    def _rows(self) -> Iterator[tuple[LoggedRow, Row | None]]:
        """Yield the rows up to where the state was taken; None for one of a source that left the mixture."""
        reader, state = self.reader, self.state
        reader.ledger = state.ledger.copy()
        reader.source_stats = [stats.copy() for stats in state.source_stats]
        reader.bad_shards = list(state.bad_shards)
        if len(state.bad_in_pass) == len(reader.bad_in_pass):
            reader.bad_in_pass = list(state.bad_in_pass)
        # Rows and pieces of this epoch may lie before the cursor.
        reader.epoch_has_rows, reader.epochs_without_pieces = True, 0
        for logged in self.before.rows():
            if logged.epoch != reader.epoch:
                reader.open(logged.epoch)
                reader.epoch_has_rows, reader.epochs_without_pieces = True, 0
            yield logged, self._row(logged)
        reader.reader.restore_front(state.front)
        reader.ended = not state.reached
        if state.reached != reader.reached:
            raise ValueError(f"lane {reader.lane}: {OTHER_RECORDS}")

    def _row(self, logged: LoggedRow) -> Row | None:
        """Read a row that was read before the state was taken; return None if its source left the mixture."""
        if logged.source is None:
            return None
        self.reader.reader.draw_from(logged.source)
        if (row := self.reader.next_row()) is None:
            raise ValueError(
                f"lane {self.reader.lane}: the state says {self.state.next_piece} pieces were read and the corpus ends "
                f"after {logged.number}; the data or the encoder changed"
            )
        return row

    def _require_readable(self, row: Row) -> None:
        """Raise if a row is missing that could be read before the state was taken."""
        unreadable = self.reader.unreadable
        if row.data is UNREADABLE and unreadable is not None:
            where = unreadable.locate(row.row_id)
            raise ValueError(f"lane {self.reader.lane}: {where}: {unreadable.reason}; {OTHER_RECORDS}")

    def _first_anew(self, logged: LoggedWindow) -> int:
        """Return 0 for a window that began before the state's first piece; for another `RowLog.add` finds it."""
        return 0 if logged.first <= self.state.first else sys.maxsize

    def _log_before(self) -> RowLog:
        """Return the log that the state holds."""
        state, lane = self.state, self.reader.lane
        sources, window = self.reader.log.sources, self.reader.config.shuffle_window
        count = state.next_piece - state.first
        for source, number, numbers in state.windows:
            right = len(numbers) > 3 and sum(numbers[3:]) <= window if window else len(numbers) == 2
            if not right or source >= sources or number > count:
                raise ValueError(f"lane {lane}: the state has a window that cannot be" + DAMAGED)
        if state.rows >> digit_bits(sources) * count:
            raise ValueError(f"lane {lane}: the state has rows behind its last piece" + DAMAGED)
        epochs = [(state.first, state.epoch)]
        for number, epoch in state.epochs:
            follows = epochs[-1][0] < state.first + number or len(epochs) == 1  # see `numbered_epochs`
            if not (follows and state.first + number < state.next_piece and epochs[-1][1] < epoch):
                raise ValueError(f"lane {lane}: the state has epochs that do not follow each other" + DAMAGED)
            epochs.append((state.first + number, epoch))
        windows = [
            # Number 0 stands for any piece up to the first.
            LoggedWindow(source, Window(numbers), first=state.first + number, last=state.first - 1)
            for source, number, numbers in state.windows
        ]
        return RowLog(
            sources=sources, first=state.first, count=count, digits=state.rows, epochs=epochs, windows=windows
        )
