"""The pieces of a lane: its rows, encoded and cut, and counted in the ledger."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.accounting import (
    Ledger,
    SourceStats,
    endless_drop,
    nothing_to_pack,
    trained_tokens,
    trains_nothing,
)
from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.lane_state import Address, LaneState, PlainAddress, joined
from streampack.packing.groups import lacks_training, why_untrained
from streampack.packing.media import MediaSample
from streampack.sources.mixture_reader import passes_by_all
from streampack.sources.reading import BadRecord, Reader, own_row
from streampack.storage.prefetch import Prefetch
from streampack.types import Cursor, Row, RowId, Sample

log = logging.getLogger(__name__)

FIRST_ROWS = 1000
"""If a lane drops all of its first rows, up to this number, it warns before it reads the rest."""
MOST_DROPPED = 100_000
"""Rows of a lane that may be dropped in a row, where a source may have no end."""
CHECKED_AT_ONCE = 64  # rows
HELD_BYTES = 1 << 26
"""Pixels that may wait in a lane. Samples that come when it is full wait as rows, and are encoded once more."""


@dataclass(slots=True)
class Piece:
    """A sample, or a part of one that was too long, that waits to be packed."""

    sample: Sample  # the piece's own tokens and labels
    length: int  # in tokens
    row_id: RowId
    start: int  # of the piece in the sample that the row became
    address: PlainAddress  # where to find it again
    trained: int | None = None  # see Fragment
    media: int = 0  # what it takes of ``max_media``
    row: Mapping[str, Any] | None = None  # of a sample that waits without its media


class PieceReader:
    """Read the rows of one lane, encode them, cut them to pieces, and count them in the ledger."""

    def __init__(
        self, config: LaneConfig, *, lane: int, num_lanes: int, prefetch: Prefetch | None = None
    ) -> None:
        self.config = config
        self.prefetch = prefetch
        self.lane = lane
        self.num_lanes = num_lanes
        self.ledger = Ledger()
        self.source_stats = [SourceStats() for _ in config.source.names]
        self.epoch = 0
        self.reader: Reader
        # What was read and not asked for: of each row the pieces that are left, which follow one another in it.
        self.pending: deque[deque[Piece]] = deque()
        self.unchecked: list[tuple[RowId, Sample]] = []  # what was read since the last `check`
        # Bad records of the newest pass over each source: a record counts once, however often it is read.
        self.bad_in_pass = [0] * max(1, len(config.source.names))
        self.planning_again = False  # whether what is read was read, counted and listed before a resume
        self._bad_of_state: list[int] = []  # `bad_in_pass` where the resume began
        self.epoch_has_rows = False
        self.dropped_in_row = 0  # rows
        self.most_dropped = MOST_DROPPED if config.may_not_end else math.inf
        self.held_bytes = 0  # of media, in pieces that wait
        # Epochs in a row, the current one included, without a piece. In a stream without an end, a lane ends after
        # `most_without_pieces`: it would be read for ever without making a pack. In a mixture with
        # ``stop="first_exhausted"``, a lane may be without rows in one epoch and have some in the next.
        self.epochs_without_pieces = 0
        self.max_seq_len = config.packing.max_seq_len
        self.most_without_pieces = passes_by_all(num_lanes) if config.source.names else 1

    def open(self, epoch: int, start: Cursor | None = None) -> None:
        """Begin to read an epoch, at a cursor or at its beginning."""
        self.reader = self.config.open(
            self.lane, num_lanes=self.num_lanes, epoch=epoch, start=start, prefetch=self.prefetch
        )
        self.config.check_shards()
        self.epoch = epoch
        self.epoch_has_rows = start is not None  # rows of it may be before the cursor
        self.epochs_without_pieces = 0 if start is not None else self.epochs_without_pieces + 1

    def begin_epoch(self, epoch: int) -> None:
        """Begin to read an epoch from its beginning."""
        self.open(epoch)
        self.bad_in_pass = [0] * len(self.bad_in_pass)

    def next(self) -> Piece | None:
        """Return the next piece; None at the end of the epoch. The next `check` looks at its ids."""
        while not self.pending:
            try:
                row = next(self.reader, None)
                if row is None:
                    if not self.config.endless or self.epochs_without_pieces >= self.most_without_pieces:
                        self.check()
                        return None
                    self.begin_epoch(self.epoch + 1)
                    continue
                pieces = self._pieces_of(row)
            except BadRecord as error:
                self._skip(error)
                self.reader.charge([])
                pieces = []
            self.epoch_has_rows = True
            if not pieces:
                self._count_dropped()
                continue
            self.dropped_in_row = 0
            if len(pieces) == 1:  # as most rows make
                self.epochs_without_pieces = 0
                return pieces[0]
            self.pending.append(deque(pieces))
        self.epochs_without_pieces = 0
        first = self.pending[0]
        piece = first.popleft()
        if not first:
            self.pending.popleft()
        return piece

    def check(self) -> None:
        """Check the ids of what was read."""
        if self.unchecked:
            unchecked, self.unchecked = self.unchecked, []
            self.config.check_ids(unchecked)

    def snapshot(self) -> dict[str, Any]:
        """Return counts, as plain values."""
        return {
            "ledger": self.ledger.numbers(),
            "source_stats": [stats.numbers() for stats in self.source_stats],
            "bad_in_pass": self.bad_in_pass,
        }

    def restore(self, state: LaneState, rows: Iterable[Mapping[str, Any]]) -> None:
        """Encode and cut the rows of buffered pieces, which come first; take the counts of the state.

        With an open window, nothing is counted until `end_window`: its rows were counted before the resume.
        """
        if len(state.bad_in_pass) == len(self.bad_in_pass):
            self.bad_in_pass = list(state.bad_in_pass)
        self.planning_again = state.window is not None
        if not self.planning_again:
            self.ledger, self.source_stats = state.ledger, list(state.source_stats)
        if state.restart:  # rows are counted when they are encoded
            self.ledger.tokens_in -= self.ledger.buffered
        self._bad_of_state = [*self.bad_in_pass]
        for address, data in zip(state.begin.waiting, rows, strict=True):
            row, pieces = Row(data, address.row_id), list[Piece]()
            try:
                pieces = self._pieces_at(address, row) if address.total else self._pieces_of(row)
            except BadRecord as error:
                self._skip(error)
                if address.total and not self.config.reads_images:
                    raise self._other_pieces(address) from error
                self.ledger.drop("removed", address.tokens)  # its image is gone since
            if pieces:
                self.pending.append(deque(pieces))

    def end_window(self, state: LaneState) -> None:
        """Take the counts of a state whose open window is planned again."""
        self.ledger, self.source_stats = state.ledger, list(state.source_stats)
        self.bad_in_pass = self._bad_of_state

    @property
    def waiting(self) -> list[PlainAddress]:
        """Where to find what was read and not asked for; in a long sample there may be thousands of pieces."""
        return [
            each[0].address
            if len(each) == 1
            else (*each[0].row_id, each[0].start, each[-1].start + each[-1].length, each[0].address[-1])
            for each in self.pending
        ]

    @property
    def waiting_tokens(self) -> int:
        """How many tokens were read and not asked for."""
        return sum([each[-1].start + each[-1].length - each[0].start for each in self.pending])

    def stats(self, row_id: RowId) -> SourceStats:
        """Return the counts of a row's source in a mixture."""
        return self.source_stats[self.config.source.source_index(row_id)]

    def _pieces_of(self, row: Row, *, counted: bool = False) -> list[Piece]:
        """Encode a row, cut it to pieces, and count it unless it is ``counted``; none if it is dropped."""
        config, ledger, row_id = self.config, self.ledger, row.row_id
        if len(self.unchecked) >= CHECKED_AT_ONCE:
            self.check()
        sample = config.sample(row, unchecked=self.unchecked)
        length, untrained = sample.tokens.size, False
        # As most are.
        if type(sample) is Sample and length <= self.max_seq_len and not trains_nothing(sample):
            pieces = [Piece(sample, length, row_id, 0, (*row_id, -length))]
            kept = length
        else:
            pieces, untrained = self._cut(sample, row_id)
            kept = sum([piece.length for piece in pieces])
            if isinstance(sample, MediaSample) and pieces:
                self._hold(pieces[0], sample, row.data)
        if counted:
            return pieces
        ledger.samples += 1
        ledger.tokens_in += length
        ledger.untrained += untrained
        if kept < length or not pieces:
            reason = "untrained" if untrained else "overlong"
            ledger.drop("truncated" if pieces else reason, length - kept)
        if self.source_stats:
            self.reader.charge([piece.sample for piece in pieces])
            stats = self.begin_stats(row_id)
            stats.samples += 1
            stats.tokens_in += length
        return pieces

    def _cut(self, sample: Sample, row_id: RowId) -> tuple[list[Piece], bool]:
        """Return the pieces of a sample, none if it is dropped, and whether no token of them is trained."""
        config, trained = self.config, None
        try:
            parts = config.cut(sample)
            if len(parts) > 1:
                trained = trained_tokens(sample, [start for start, _ in parts[1:]])
                untrained = trained == 0
            else:
                untrained = bool(parts) and lacks_training(parts[0][1])
            if untrained and not self.ledger.example:
                why = why_untrained(sample, sum(part.tokens.size for _, part in parts), config.packing)
                if config.untrained == "error":
                    raise ValueError(f"{why}, or set untrained to 'drop' or 'keep'")
                self.ledger.example = f"{config.source.locate(row_id)} {why}"
        except ValueError as error:
            raise ValueError(f"{config.source.locate(row_id)} {error}") from None
        if untrained and config.drops_untrained(sample, parts):
            return [], True
        lengths = [part.tokens.size for _, part in parts]
        total = sum(lengths)
        pieces = [
            Piece(part, length, row_id, start, Address(row_id, start, start + length, total).plain(), trained)
            for (start, part), length in zip(parts, lengths, strict=True)
        ]
        return pieces, untrained

    def _hold(self, piece: Piece, sample: MediaSample, row: Mapping[str, Any]) -> None:
        """Let a piece wait with its media, or without where others fill the memory for them."""
        piece.media = sample.cost
        if self.held_bytes + sample.nbytes > HELD_BYTES:
            # A row of a stream waits, too, because fetching it reads all before it; others may hold decoded images.
            piece.sample, piece.row = Sample(*sample), None if self.config.source.map_style else own_row(row)
        else:
            self.held_bytes += sample.nbytes

    def forget(self, piece: Piece) -> None:
        """Count a piece no more among those that wait with their media."""
        if isinstance(piece.sample, MediaSample):
            self.held_bytes -= piece.sample.nbytes

    def with_media(self, piece: Piece) -> Sample | None:
        """Return the sample of a piece that leaves; one that waited without its media is made again.

        None if that is a bad record now: its pack is made without it.
        """
        self.forget(piece)
        if isinstance(piece.sample, MediaSample):
            return piece.sample
        row_id = piece.row_id
        [data] = self.config.source.fetch_many([row_id]) if piece.row is None else [piece.row]
        try:
            again = self.config.sample(Row(data, row_id))
        except BadRecord as error:
            self._skip(error)
            self.ledger.drop("removed", piece.length)
            return None
        same = isinstance(again, MediaSample) and again.cost == piece.media
        if isinstance(again, MediaSample) and same and all(map(np.array_equal, again, piece.sample)):
            return again
        raise ValueError(
            f"{self.config.source.locate(row_id)} made another sample when it was encoded once more "
            f"({again.tokens.size} tokens): its images changed while it waited, or the encoder changes rows; resume "
            "from the newest checkpoint"
        )

    def _pieces_at(self, address: Address, row: Row) -> list[Piece]:
        pieces = self._pieces_of(row, counted=True)
        waited = [piece for piece in pieces if address.start <= piece.start < address.stop]
        if not waited or joined([piece.address for piece in waited]) != [address.plain()]:
            raise self._other_pieces(address)
        return waited

    def _other_pieces(self, address: Address) -> ValueError:
        return ValueError(
            f"lane {self.lane}: {self.config.source.locate(address.row_id)} makes other pieces than the tokens "
            f"{address.start} to {address.stop} of {address.total} that the state says; the data or the encoder "
            "changed since it was written"
        )

    def _count_dropped(self) -> None:
        """Warn early if every row is dropped, because reading the whole corpus may take days.

        Raises:
            ValueError: if `MOST_DROPPED` rows in a row were dropped, of a source that may have no end.
        """
        ledger = self.ledger
        rows = ledger.samples + ledger.dropped_samples["bad"]
        if rows == FIRST_ROWS and not (ledger.packed or ledger.buffered or self.planning_again):
            log.warning("lane %d, so far: %s; the next rows are read", self.lane, nothing_to_pack(ledger))
        self.dropped_in_row += 1
        if self.dropped_in_row >= self.most_dropped:
            raise endless_drop(ledger, lane=self.lane, rows=self.dropped_in_row)

    def _skip(self, record: BadRecord) -> None:
        """List and count a bad record; raise it if none is skipped."""
        quarantine, source, row_id = self.config.quarantine, self.config.source, record.row_id
        if quarantine is None:
            raise record.unskipped() from None
        if self.planning_again:
            return
        index = source.source_index(row_id)
        ended = self.bad_in_pass[index] if self.reader.passes_begun else 0
        quarantine.skip(
            self.lane,
            source=source,
            row_id=row_id,
            reason=record.reason,
            before=sum(self.bad_in_pass) - ended,
            rows=self.ledger.samples + self.ledger.dropped_samples["bad"],
        )
        self.ledger.drop("bad", 0)
        if self.source_stats:
            self.begin_stats(row_id)
        self.bad_in_pass[index] += 1

    def begin_stats(self, row_id: RowId) -> SourceStats:
        """Return the statistics of the newest row's source; count the epochs of it that began with the row."""
        stats = self.stats(row_id)
        stats.epochs += self.reader.passes_begun
        if self.reader.passes_begun:
            self.bad_in_pass[self.config.source.source_index(row_id)] = 0
        return stats
