"""A lane: one stream of rows, encoded, planned and assembled into packs, that can go on from a receipt.

What a lane yields is a function of (config, seed, lane, receipt) alone. All its state is in attributes,
and an error (a broken row, a failing disk) consumes nothing: asked again, it tries the same row again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from streampack.accounting import Ledger, SourceStats, trained_tokens, trains_nothing
from streampack.packing.assemble import assemble, untrained_error
from streampack.packing.planner import Planner
from streampack.sources.base import BadRecord, Reader, Reading
from streampack.streaming.empty_runs import FIRST_ROWS, warn_of_first_rows
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import Receipt
from streampack.types import Cursor, Fragment, Pack, ReceiptNumbers, Row, RowId, Sample, from_tuple

BROKEN: Mapping[str, Any] = MappingProxyType({})
"""The data of a row that could not be read, and is passed by."""


class Piece(NamedTuple):
    """A sample, or a part of one that was too long, that waits to be packed."""

    sample: Sample
    row_id: RowId
    start: int  # where the piece starts in its row's sample, in tokens
    epoch: int
    cursor: Cursor  # of its row
    first: int  # the number of its row's first piece
    trained: int | None  # see Fragment


_piece, _fragment = from_tuple(Piece), from_tuple(Fragment)


class Lane:
    """Packs of one lane, from its beginning or from a receipt.

    `next_pack` returns None when the epoch's rows and the buffer are used up; `start_epoch` then begins
    the next one. With ``endless`` it returns None only if no row makes a piece.
    """

    def __init__(
        self, config: LaneConfig, *, lane: int = 0, num_lanes: int = 1, receipt: ReceiptNumbers | None = None
    ) -> None:
        self.config = config
        self.lane = lane
        self.num_lanes = num_lanes
        self.planner = Planner(config.packing)
        self.ledger = Ledger()
        self.source_stats = [SourceStats() for _ in config.source.names]
        self.held: dict[int, Piece] = {}  # pieces pulled and not wholly packed, by number
        self.pending: list[Piece] = []  # pieces of the newest row that were not pulled yet
        self.row: Row | None = None  # read and not yet encoded; stays when encoding fails
        self.broken = ""  # why that row could not be read, if it could not
        self.done = False  # this epoch is used up
        self.packs = 0  # in this epoch (endless: since the beginning)
        self.epoch = 0
        self.rows_in_epoch = self.pieces_in_epoch = 0
        if receipt is None:
            self.reader = self._open(0)
        else:
            self._restore(Receipt.from_numbers(receipt))

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch. The one before must be used up."""
        if self.planner.buffered or (self.rows_in_epoch and not self.done):
            raise ValueError(
                f"lane {self.lane} cannot begin epoch {epoch}: it is in the middle of epoch {self.epoch}, and "
                f"{self.planner.buffered} tokens of it wait to be packed; the state does not fit together, or is of a "
                "run without an end (epochs=None)"
            )
        self.reader = self._open(epoch)  # first: if this fails, it is the old epoch that is used up
        self.epoch, self.packs, self.done = epoch, 0, False
        self.rows_in_epoch = self.pieces_in_epoch = 0

    def next_pack(self) -> Pack | None:
        """Plan and assemble one pack.

        Raises:
            ValueError: for a bad row, with its place. Nothing is consumed.
        """
        if self.done:
            return None
        spans = self.planner.next_pack(self._pull)
        if not spans:
            self.done = True
            return None
        packing, held = self.config.packing, self.held
        sequences, fragments, seq_lens = [], [], []
        for number, start, stop in spans:
            sequence, row_id, before, _, _, _, trained = piece = held[number]
            length = sequence.tokens.size
            if stop - start < length:
                if trained is None:
                    # Every fragment gives the same cuts, so the labels are counted once and not for each.
                    trained = trained_tokens(sequence, packing.cuts(length, start, stop))
                    held[number] = _piece((*piece[:-1], trained))
                sequence = sequence.cut(start, stop)
            sequences.append(sequence)
            seq_lens.append(stop - start)
            fragments.append(_fragment((row_id, before + start, before + stop, trained)))
            if self.source_stats:
                stats = self._stats(row_id)
                stats.packed += stop - start
                stats.trained += trained_tokens(sequence)
            if stop == length:
                del held[number]
        tokens, labels = assemble(
            sequences, max_seq_len=packing.max_seq_len, padding_idx=self.config.padding_idx
        )
        self.packs += 1
        self.ledger.packs += 1
        self.ledger.slots += packing.max_seq_len
        self.ledger.packed += sum(seq_lens)
        return Pack(
            tokens=tokens,
            labels=labels,
            seq_lens=tuple(seq_lens),
            fragments=tuple(fragments),
            epoch=0 if self.config.endless else self.epoch,
            number=self.packs - 1,
            lane=self.lane,
            receipt=self.receipt(),
        )

    def next_piece(self) -> Piece | None:
        """The next piece as it is read, for whoever plans an epoch as a whole; None when the rows are used up.

        A lane gives packs or pieces, not both.

        Raises:
            ValueError: as `next_pack`.
        """
        if self._pull() is None:
            return None
        piece = self.held.pop(self.planner.next_piece)
        self.planner.next_piece += 1
        return piece

    def receipt(self) -> ReceiptNumbers:
        """That from which a lane of the same config goes on. Taken between packs."""
        assert not self.planner.spans, "a receipt is taken between packs"
        if self.ledger.buffered != self.planner.buffered:
            raise RuntimeError(
                f"lane {self.lane} lost tokens: {self.ledger.buffered} should be buffered by the ledger "
                f"and {self.planner.buffered} are; this is a bug in streampack, do not trust this run"
            )
        waiting = self.planner.pieces
        if oldest := self.held[waiting[0]] if waiting else self.pending[0] if self.pending else None:
            epoch, cursor, first = oldest.epoch, oldest.cursor, oldest.first
        else:
            cursor = self.row.cursor if self.row else self.reader.cursor
            epoch, first = self.epoch, self.planner.next_piece
        consumed = (1 << self.planner.next_piece - first) - 1
        for piece in waiting:
            consumed ^= 1 << piece - first
        return Receipt(
            self.packs,
            self.done,
            epoch,
            cursor,
            first,
            self.planner.offset,
            self.planner.next_piece,
            consumed,
            self.ledger,
            tuple(self.source_stats),
        ).numbers()

    def _open(self, epoch: int, start: Cursor | None = None, *, replayed: int = 0) -> Reader:
        config = self.config
        reading = Reading(
            self.lane,
            num_lanes=self.num_lanes,
            epoch=epoch,
            seed=config.seed,
            shuffle_window=config.shuffle_window,
            start=start,
            stagger=config.packing.max_seq_len,
            replayed=replayed,
        )
        return config.source.read(reading)

    def _restore(self, receipt: Receipt) -> None:
        """Read again from the oldest waiting piece's row, and skip what is consumed."""
        # All pieces behind the last that is consumed wait, and no more can. A damaged state must not read on for ever.
        waiting = receipt.next_piece - receipt.first - receipt.consumed.bit_length()
        if waiting > (limit := self.config.packing.buffer_size):
            raise ValueError(
                f"lane {self.lane}: {waiting} pieces wait at the end of the state's, and buffer_size={limit} lets "
                f"{limit} wait; it is damaged, resume from another checkpoint"
            )
        self.packs, self.epoch = receipt.packs, receipt.epoch
        # Without an end, only a lane that never packed anything is over: see `_read`.
        self.done = receipt.done and not (self.config.endless and receipt.ledger.packed)
        self.rows_in_epoch = self.pieces_in_epoch = 1  # only an epoch read from its beginning tells
        self.ledger, self.source_stats = receipt.ledger, list(receipt.source_stats)
        replayed = receipt.next_piece - receipt.first
        self.reader = self._open(receipt.epoch, receipt.cursor, replayed=replayed)
        planner = self.planner
        planner.next_piece = receipt.first
        while planner.next_piece < receipt.next_piece:
            row = self._read()
            if row is None:
                raise ValueError(
                    f"lane {self.lane}: the state says {receipt.next_piece} pieces were read and the "
                    f"corpus ends after {planner.next_piece}; the data or the encoder changed"
                )
            consumed = receipt.consumed >> (planner.next_piece - receipt.first)
            # A mixture draws by what its rows train, so it encodes those that are consumed, too.
            skip = consumed & 1 and self.config.packing.keeps_one_piece_per_sample and not self.source_stats
            pieces = [] if skip else self._pieces(row, replay=True)
            self.row = None
            self.pieces_in_epoch += 1  # a replay may span whole epochs, which must not look empty
            for piece in pieces:
                if planner.next_piece == receipt.next_piece:
                    self.pending.append(piece)
                    continue
                if not consumed & 1:
                    planner.hold(planner.next_piece, piece.sample.tokens.size)
                    self.held[planner.next_piece] = piece
                planner.next_piece += 1
                consumed >>= 1
            if not pieces:  # packed or dropped: it had one number
                planner.next_piece += 1
        planner.offset = receipt.offset
        if planner.buffered != self.ledger.buffered:
            raise ValueError(
                f"lane {self.lane}: {planner.buffered} tokens wait after reading again, the state says "
                f"{self.ledger.buffered}; the data or the encoder changed since it was written"
            )

    def _pull(self) -> int | None:
        """Number the next piece, hold it and return its length; None at the end of the epoch."""
        while not (pending := self.pending):
            if (row := self._read()) is None:
                return None
            self.pending = self._pieces(row, replay=False)
            self.row = None
            if not self.pending:
                self._look_at_drops()
        piece = self.held[self.planner.next_piece] = pending.pop(0)
        self.pieces_in_epoch += 1
        length = piece.sample.tokens.size
        self.ledger.tokens_in += length
        if self.source_stats:
            self._stats(piece.row_id).tokens_in += length
        return length

    def _read(self) -> Row | None:
        while self.row is None:
            try:
                self.row = next(self.reader, None)
            except BadRecord as error:
                if self.config.quarantine is None:
                    raise error.unskipped() from None
                self.reader.skip()
                self.row = Row(BROKEN, error.cursor, error.row_id)
                self.broken = error.reason
            if self.row is None:
                # Without an end, a lane of which no row makes a piece would be read for ever.
                if not self.config.endless or not self.pieces_in_epoch:
                    return None
                self.epoch, self.rows_in_epoch, self.pieces_in_epoch = self.epoch + 1, 0, 0
                ended, self.reader = self.reader, self._open(self.epoch)
                self.reader.succeed(ended)
            else:
                self.rows_in_epoch += 1
        return self.row

    def _pieces(self, row: Row, *, replay: bool) -> list[Piece]:
        """Encode a row and cut it to pieces; none if it is dropped. A replay books nothing a second time."""
        config, (data, cursor, row_id) = self.config, row
        if data is BROKEN:
            return self._passed_by(row, self.broken, replay=replay)
        sample = config.sample(row)
        if isinstance(sample, str):
            return self._passed_by(row, sample, replay=replay)
        try:
            parts = config.cut(sample)
            trained = None
            if len(parts) > 1:
                trained = trained_tokens(sample, [start for start, _ in parts[1:]])
            untrained = not trained if len(parts) > 1 else bool(parts) and trains_nothing(parts[0][1])
            if untrained and config.untrained == "error":
                raise untrained_error(sample.tokens.size, config.packing)
        except ValueError as error:
            raise ValueError(f"{self._place(row)} {error}") from None
        if untrained and config.untrained == "drop":
            parts = []
        pieces, first = [], self.planner.next_piece
        for start, part in parts:
            pieces.append(_piece((part, row_id, start, self.epoch, cursor, first, trained)))
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
        """The tokens of a sample that are in none of its pieces. What pieces hold comes in as they are pulled."""
        lost = sample.tokens.size - sum(piece.sample.tokens.size for piece in pieces)
        if lost or not pieces:
            self.ledger.tokens_in += lost
            dropped = "untrained" if untrained else "overlong" if lost else "empty"
            self.ledger.drop("truncated" if pieces else dropped, lost)
        if not pieces:
            self.planner.next_piece += 1  # a dropped row has a number too, so that a replay can count
        return lost

    def _look_at_drops(self) -> None:
        """Say so early where every row is dropped: a corpus may take days to read."""
        planner = self.planner
        kept = self.ledger.packed or planner.buffered or self.held
        if planner.next_piece == FIRST_ROWS and not kept:  # a dropped row has one number
            warn_of_first_rows(self.lane, self.ledger)

    def _passed_by(self, row: Row, reason: str, *, replay: bool) -> list[Piece]:
        """A broken record is a dropped row: it has a number, and a replay books it no second time."""
        quarantine = self.config.quarantine
        assert quarantine is not None
        if not replay:
            source, before = self.config.source, self.ledger.dropped_samples["bad"]
            quarantine.skip(self.lane, source=source, row_id=row.row_id, reason=reason, before=before)
            self.ledger.drop("bad", 0)
            if self.source_stats:
                self._begin_stats(row)
            self.planner.next_piece += 1
        if row.data is not BROKEN:
            self.reader.charge([])
        return []

    def _stats(self, row_id: RowId) -> SourceStats:
        """The stats of a row's source in a mixture."""
        return self.source_stats[self.config.source.source_index(row_id)]

    def _begin_stats(self, row: Row) -> SourceStats:
        """The stats of the newest row's source; it counts how often the source was begun."""
        stats = self._stats(row.row_id)
        stats.epochs += self.reader.begins
        return stats

    def _place(self, row: Row) -> str:
        return self.config.source.locate(row.row_id)
