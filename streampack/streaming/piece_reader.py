"""The pieces of a lane: its rows, encoded and cut, and counted in the ledger."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from zlib import crc32

from streampack.accounting import Ledger, SourceStats, trained_tokens, trains_nothing
from streampack.packing.cut_samples import untrained_error
from streampack.sources.base import HELD_OUT, REMOVED, BadRecord, KnownWindow, Reader, Reading
from streampack.sources.passes import passes_by_all
from streampack.storage.read_ahead import ReadAhead
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.ledger_messages import FIRST_ROWS, GIANT, warn_of_first_rows, warn_of_giant
from streampack.streaming.row_log import RowLog
from streampack.types import Cursor, Row, RowId, Sample

UNREADABLE: Mapping[str, Any] = MappingProxyType({})
"""The data of a row that could not be read and is skipped; compared by identity."""


@dataclass(slots=True)
class Piece:
    """A sample, or a part of one that was too long, that waits to be packed.

    Pieces are numbered through their lane, from 0. ``cursor``, ``epoch`` and ``row_first`` say where the piece's row
    can be read again, and which number its first piece had.
    """

    sample: Sample  # the piece's own tokens and labels
    length: int  # in tokens
    row_id: RowId
    start: int  # the piece's first token, counted in the row's whole sample
    epoch: int
    cursor: Cursor
    row_first: int
    number: int
    trained: int | None  # see Fragment


class PieceReader:
    """Read the rows of one lane, encode them, cut them to pieces, and count them in the ledger.

    Pieces are numbered, and a row that makes none takes one number, too. So reading the same rows again gives the same
    numbers, by which a state says which pieces are consumed.

    A row passes through three attributes: the source's ``reader`` yields it, ``row`` holds it until it is encoded, and
    ``pending`` holds its pieces until they are asked for. An error (a broken row, a failing disk) leaves them as they
    are, so the next call tries the same row again.
    """

    def __init__(
        self, config: LaneConfig, *, lane: int, num_lanes: int, read_ahead: ReadAhead | None = None
    ) -> None:
        self.config = config
        self.read_ahead = read_ahead
        self.lane = lane
        self.num_lanes = num_lanes
        self.ledger = Ledger()
        self.source_stats = [SourceStats() for _ in config.source.names]
        self.epoch = 0
        self.ended = False  # whether the epoch was read to its end
        self.next_number = 0
        self.reader: Reader
        self.row: Row | None = None
        self.unreadable: BadRecord | None = None  # why ``row`` could not be read, if its data is UNREADABLE
        # Bad records of the newest pass over each source: a record counts once, however often it is read.
        self.bad_in_pass = [0] * max(1, len(config.source.names))
        self.bad_shards: list[int] = []  # checksums of the names of those that this lane has left out
        self.pending: list[Piece] = []
        # The row whose pieces were asked for last, and the log of all rows since the oldest piece that waits.
        self.newest: Row | None = None
        self.log = RowLog(sources=max(1, len(config.source.names)))
        self.known: Sequence[deque[KnownWindow]] = ()
        self.epoch_has_rows = False
        # Epochs in a row, the current one included, without a piece. In a stream without an end, a lane ends after
        # `most_without_pieces`: it would be read for ever without making a pack. In a mixture with
        # ``stop="first_exhausted"``, a lane may be without rows in one epoch and have some in the next.
        self.epochs_without_pieces = 0
        self.longest = GIANT * config.packing.max_seq_len  # tokens of a sample that needs no warning
        self.most_without_pieces = passes_by_all(num_lanes) if config.source.names else 1

    def open(self, epoch: int, start: Cursor | None = None) -> None:
        """Begin to read an epoch, at a cursor or at its beginning. If this fails, nothing has changed."""
        config = self.config
        reading = Reading(
            self.lane,
            num_lanes=self.num_lanes,
            epoch=epoch,
            seed=config.seed,
            shuffle_window=config.shuffle_window,
            start=start,
            stagger=config.packing.max_seq_len,
            read_ahead=self.read_ahead,
            use=config.use,
            known=self.known,
            earlier=config.earlier,
            left_out=True,
        )
        self.reader = config.source.read(reading)
        config.check_shards()
        self.epoch, self.ended = epoch, False
        self.epoch_has_rows = False
        self.epochs_without_pieces += 1

    def begin_epoch(self, epoch: int) -> None:
        """Begin to read an epoch that no rows were read of before. If this fails, nothing has changed."""
        self.known = ()
        self.open(epoch)
        self.bad_in_pass = [0] * len(self.bad_in_pass)
        self.log.close_windows()

    def next(self) -> Piece | None:
        """Return the next piece; None at the end of the epoch.

        Raises:
            ValueError: for a bad row, with its place.
        """
        while not self.pending:
            if (row := self._read()) is None:
                self.ended = True
                return None
            self.pending = self.pieces_of(row, again=False)
            self.row, self.newest = None, row
            if not self.pending:
                self.log_row(row)
                if row.data is not REMOVED and row.data is not HELD_OUT:
                    self._warn_if_all_dropped()
        piece = self.pending.pop(0)
        self.log_row(self.newest, another=piece.number > piece.row_first)
        self.epochs_without_pieces = 0
        return piece

    def position(self) -> tuple[int, Cursor, int]:
        """Return where reading goes on if no piece waits: epoch, cursor, and the number of the first piece there."""
        if self.pending:
            return self.pending[0].epoch, self.pending[0].cursor, self.pending[0].row_first
        return self.epoch, self.row.cursor if self.row else self.reader.cursor, self.next_number

    def log_row(self, row: Row | None, *, another: bool = False) -> None:
        """Give the next number to a row, or to ``another`` piece of it; None is a row whose source left the mixture."""
        if row is None:
            self.log.add(None, None, epoch=self.epoch, another=another)
        else:
            source = self.config.source.source_index(row.row_id) if self.source_stats else 0
            self.log.add(source, row.window, epoch=self.epoch, another=another)
        self.next_number += 1

    @property
    def pending_tokens(self) -> int:
        """Tokens of the newest row whose pieces were not asked for yet."""
        if not self.pending:
            return 0
        first, last = self.pending[0], self.pending[-1]
        return last.start + last.length - first.start

    @property
    def newest_is_whole(self) -> bool:
        """Whether all pieces of the row that was read last were asked for, where rows may have several."""
        return not (self.config.packing.keeps_one_piece_per_sample or self.pending)

    @property
    def reached(self) -> int:
        """A checksum of where the reader stands; 0 at the end of an epoch, to which a replay does not come.

        A replay that comes elsewhere has read other records. Without shuffling, nothing else tells. Of shuffle windows
        the numbers of records are compared besides: a cursor says where a window begins, and not what is in it.
        """
        return 0 if self.ended else crc32(repr(self.reader.reached).encode())

    @property
    def bad_of_state(self) -> tuple[int, ...]:
        """See `LaneState.bad_in_pass`."""
        return tuple(self.bad_in_pass) if any(self.bad_in_pass) else ()

    def stats(self, row_id: RowId) -> SourceStats:
        """Return the statistics of the source, in a mixture, that a row comes from."""
        return self.source_stats[self.config.source.source_index(row_id)]

    def _read(self) -> Row | None:
        """Return the row to encode next; None at the end of the epoch, and never if epochs follow without an end."""
        while (row := self.next_row()) is None:
            if not self.config.endless or self.epochs_without_pieces >= self.most_without_pieces:
                return None
            self.begin_epoch(self.epoch + 1)
        self.epoch_has_rows = True
        return row

    def next_row(self) -> Row | None:
        """Return the row that was not encoded yet, or the source's next one; None if this epoch has no more."""
        if self.row is None:
            try:
                self.row = next(self.reader, None)
            except BadRecord as error:
                if self.config.quarantine is None:
                    raise error.unskipped() from None
                self.reader.skip()
                self.row = Row(UNREADABLE, error.cursor, error.row_id, error.window)
                self.unreadable = error
        return self.row

    def pieces_of(self, row: Row, *, again: bool) -> list[Piece]:
        """Encode a row and cut it to pieces; none if it is dropped. Unless it is read again, count it."""
        config = self.config
        if row.data is REMOVED or row.data is HELD_OUT:
            if self.source_stats and not again:
                self.begin_stats(row)
            self.reader.charge([])
            return []
        if row.data is UNREADABLE and (unreadable := self.unreadable) is not None:
            self._skip_record(row, unreadable.reason, lost=unreadable.lost, again=again)
            return []
        sample = config.sample(row)
        if isinstance(sample, str):
            reason, of_shard = config.judged(row, sample)
            self._skip_record(row, reason, lost=of_shard, again=again)
            return []
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
        if not again:
            self.ledger.samples += 1
            self.ledger.tokens_in += sample.tokens.size
            self.ledger.untrained += untrained
            if not pieces or pieces[0].sample is not sample:  # else the sample is one piece, as most are
                self._book_loss(sample, pieces, untrained=untrained)
            if pieces and sample.tokens.size > self.longest:
                self._warn_of_giant(row, sample.tokens.size)
            if self.source_stats:
                stats = self.begin_stats(row)
                stats.samples += 1
                stats.tokens_in += sample.tokens.size
        return pieces

    def _book_loss(self, sample: Sample, pieces: list[Piece], *, untrained: bool) -> None:
        """Count the tokens of a sample that are in none of its pieces."""
        lost = sample.tokens.size - sum(piece.length for piece in pieces)
        if lost or not pieces:
            if pieces:
                reason = "truncated"
            else:
                reason = "untrained" if untrained else "overlong" if lost else "empty"
            self.ledger.drop(reason, lost)

    def _warn_of_giant(self, row: Row, tokens: int) -> None:
        config, self.longest = self.config, sys.maxsize
        warn_of_giant(
            self.lane,
            config.source.locate_cheaply(row.row_id),
            tokens=tokens,
            packs=tokens // config.packing.max_seq_len,
            mixed=bool(self.source_stats),
        )

    def _warn_if_all_dropped(self) -> None:
        """Warn early if every row is dropped, because reading the whole corpus may take days."""
        kept = self.ledger.packed or self.ledger.buffered
        if self.next_number == FIRST_ROWS and not kept:  # each row took one number
            warn_of_first_rows(self.lane, self.ledger)

    def _skip_record(self, row: Row, reason: str, *, lost: Mapping[str, int] | None, again: bool) -> None:
        """Count and list a bad record as a dropped row, or a bad shard once, unless it is read again."""
        quarantine, source = self.config.quarantine, self.config.source
        assert quarantine is not None
        if not again:
            index = source.source_index(row.row_id)
            if lost is None:
                ended = self.bad_in_pass[index] if self.reader.passes_begun else 0
                quarantine.skip(
                    self.lane,
                    source=source,
                    row_id=row.row_id,
                    reason=reason,
                    before=sum(self.bad_in_pass) - ended,
                    rows=self.ledger.samples + self.ledger.dropped_samples["bad"],
                )
                self.ledger.drop("bad", 0)
            else:
                known = quarantine.leave_out(
                    self.lane,
                    source=source,
                    row_id=row.row_id,
                    reason=reason,
                    lost=lost,
                    known=self.bad_shards,
                )
                self.ledger.bad_shards += len(known) - len(self.bad_shards)
                self.bad_shards = known
            if self.source_stats:
                self.begin_stats(row)
            self.bad_in_pass[index] += lost is None
        if row.data is not UNREADABLE:  # of an unreadable row, `Reader.skip` has told the mixture already
            self.reader.charge([])

    def begin_stats(self, row: Row) -> SourceStats:
        """Return the statistics of the newest row's source; count the epochs of it that began with the row."""
        stats = self.stats(row.row_id)
        stats.epochs += self.reader.passes_begun
        if self.reader.passes_begun:
            self.bad_in_pass[self.config.source.source_index(row.row_id)] = 0
        return stats
