"""A lane: one stream of rows, encoded, planned and assembled into packs, that can resume from a state."""

from __future__ import annotations

from streampack.accounting import Ledger, SourceStats, trained_tokens
from streampack.packing.assemble import assemble
from streampack.packing.planner import Planner
from streampack.storage.read_ahead import ReadAhead
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import LaneEvent, LaneState
from streampack.streaming.piece_reader import Piece, PieceReader
from streampack.types import Fragment, Pack


class Lane:
    """Make the packs of one lane, from its beginning or from a state.

    The constructor reads nothing, so that `prepare` can be called for many lanes first. With a state, `restore` must be
    called before anything else.

    The packs are a function of (config, seed, lane, state). An error (a broken row, a failing disk) consumes nothing:
    the next call tries the same row again.

    The lane asks its planner for the next pack, and the planner pulls pieces from the piece reader as it needs them:

        Lane.next_pack -> Planner.next_pack -> PieceReader.next -> Source reader, encoder

    `next_pack` returns None when the epoch's rows and the buffer are used up; `start_epoch` then begins the next one.
    With ``endless``, epochs follow one another by themselves, and it returns None only if no row makes a piece.
    """

    def __init__(
        self,
        config: LaneConfig,
        *,
        lane: int = 0,
        num_lanes: int = 1,
        state: LaneState | None = None,
        first_epoch: int = 0,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.config = config
        self.lane = lane
        self.first_epoch = first_epoch
        self.piece_reader = PieceReader(config, lane=lane, num_lanes=num_lanes, read_ahead=read_ahead)
        self.planner: Planner[Piece] = Planner(config.packing, self.piece_reader.next)
        self.done = False  # whether this epoch is used up
        self.packs = 0  # made in this epoch; with ``endless``, since the beginning
        self.state_to_restore = state
        if state is None:
            self.piece_reader.open(first_epoch)
        else:
            self._require_bounded(state)
            self.piece_reader.open_at(state)

    @property
    def epoch(self) -> int:
        """The epoch that is read, from 0."""
        return self.piece_reader.epoch

    @property
    def ledger(self) -> Ledger:
        """Counts of the tokens read, packed and dropped."""
        return self.piece_reader.ledger

    @property
    def source_stats(self) -> list[SourceStats]:
        """Counts of each source of a mixture; empty without a mixture."""
        return self.piece_reader.source_stats

    def consumed(self) -> tuple[float | None, ...]:
        """Return about which fraction of this lane was read in this pass, of each source; None if unknown."""
        return self.piece_reader.reader.consumed()

    def prepare(self) -> None:
        """Begin to fetch what the lane reads next, if it is behind a URL. It changes no pack and raises no error."""
        self.piece_reader.reader.prepare()

    def restore(self) -> None:
        """Read again what waited in the state, if there is one; begin ``first_epoch`` if the lane has ended before.

        Raises:
            ValueError: if the state does not fit the data, or is damaged.
        """
        if self.state_to_restore is not None:
            self._restore(self.state_to_restore)
            self.state_to_restore = None
        if self.epoch < self.first_epoch:
            self.start_epoch(self.first_epoch)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch. The one before must be used up."""
        if self.planner.buffered or (self.piece_reader.epoch_has_rows and not self.done):
            raise ValueError(
                f"lane {self.lane} cannot begin epoch {epoch}: it is in the middle of epoch {self.epoch}, and "
                f"{self.planner.buffered} tokens of it wait to be packed; the state does not fit together, or is of a "
                "run without an end (epochs=None)"
            )
        # Before the line below: if it fails, the lane still stands at the old epoch's end.
        self.piece_reader.begin_epoch(epoch)
        self.packs, self.done = 0, False

    def next_event(self) -> LaneEvent:
        """Return the next pack, or the end of the epoch, with the state after it.

        Raises:
            ValueError: for a bad row, with its place. Nothing is consumed.
        """
        pack = self.next_pack()
        return LaneEvent(self.lane, 0 if self.config.endless else self.epoch, pack, self.state())

    def next_pack(self) -> Pack | None:
        """Plan and assemble one pack; None at the end of the epoch.

        Raises:
            ValueError: for a bad row, with its place. Nothing is consumed.
        """
        if self.done:
            return None
        placed = self.planner.next_pack()
        if not placed:
            self.done = True
            return None
        packing, mixed = self.config.packing, bool(self.source_stats)
        sequences, fragments, seq_lens = [], [], []
        for piece, start, stop in placed:
            sequence, length = piece.sample, stop - start
            if length < piece.length:
                if piece.trained is None:
                    # `label_weights` divides by the trained tokens of the whole sample, so that a split sample weighs
                    # as much as another. All cuts of a piece follow from this one fragment, so they are counted once.
                    piece.trained = trained_tokens(sequence, packing.cuts(piece.length, start, stop))
                sequence = sequence.cut(start, stop)
            sequences.append(sequence)
            seq_lens.append(length)
            fragments.append(Fragment(piece.row_id, piece.start + start, piece.start + stop, piece.trained))
            if mixed:
                stats = self.piece_reader.stats(piece.row_id)
                stats.packed += length
                stats.trained += trained_tokens(sequence)
        tokens, labels = assemble(
            sequences, max_seq_len=packing.max_seq_len, padding_idx=self.config.padding_idx
        )
        self.packs += 1
        ledger = self.ledger
        ledger.packs += 1
        ledger.capacity += packing.max_seq_len
        ledger.packed += sum(seq_lens)
        return Pack(
            tokens=tokens,
            labels=labels,
            seq_lens=tuple(seq_lens),
            fragments=tuple(fragments),
            epoch=0 if self.config.endless else self.epoch,
            number=self.packs - 1,
            lane=self.lane,
        )

    def state(self) -> LaneState:
        """Return a snapshot to resume from. Call it between packs only."""
        planner, reader = self.planner, self.piece_reader
        assert not planner.placed, "a state is taken between packs"
        if self.ledger.buffered != planner.buffered:
            raise RuntimeError(
                f"lane {self.lane} lost tokens: the ledger counts {self.ledger.buffered} buffered tokens "
                f"and the planner holds {planner.buffered}; this is a bug in streampack, do not trust this run"
            )
        if planner.waiting:
            oldest = planner.waiting[0]
            epoch, cursor, first = oldest.epoch, oldest.cursor, oldest.row_first
        else:
            epoch, cursor, first = reader.position()
        # Bit i is set if piece first + i is packed or dropped: set all bits, and clear those of the waiting pieces.
        consumed = (1 << reader.next_number - first) - 1
        for piece in planner.waiting:
            consumed ^= 1 << piece.number - first
        log = reader.log
        log.forget(first)
        return LaneState(
            packs=self.packs,
            done=self.done,
            epoch=epoch,
            cursor=cursor,
            first=first,
            offset=planner.offset,
            next_piece=reader.next_number,
            consumed=consumed,
            ledger=self.ledger.copy(),
            rows=log.digits,
            epochs=log.numbered_epochs(),
            windows=log.numbered_windows(),
            front=reader.reader.front,
            source_stats=tuple(stats.copy() for stats in self.source_stats),
            reached=reader.reached,
            bad_shards=tuple(reader.bad_shards),
        )

    def _require_bounded(self, state: LaneState) -> None:
        """Refuse a state by which more would be read again than a lane can have read."""
        # All pieces after the last consumed one wait, and at most `buffer_size` can. Without this check, a damaged
        # state could make the lane read the whole corpus.
        waiting = state.next_piece - state.first - state.consumed.bit_length()
        if waiting > (limit := self.config.packing.buffer_size):
            raise ValueError(
                f"lane {self.lane}: the state has {waiting} waiting pieces after the last consumed one, and "
                f"buffer_size={limit} allows {limit}; it is damaged, resume from another checkpoint"
            )

    def _restore(self, state: LaneState) -> None:
        """Read again from the row of the oldest waiting piece, and skip what is consumed."""
        self.packs = state.packs
        # A state that was saved at the end of the last epoch may be continued with epochs=None. There, a lane has an
        # end only if none of its rows makes a piece.
        self.done = state.done and not (self.config.endless and state.ledger.packed)
        pieces, removed = self.piece_reader.replay(state)
        oldest = state.first + (~state.consumed & state.consumed + 1).bit_length() - 1
        self.planner.restore(pieces, offset=state.offset if pieces and pieces[0].number == oldest else 0)
        lost = self.ledger.buffered - self.planner.buffered
        if removed and lost > 0:
            self.ledger.drop("removed", lost, samples=removed)
        elif lost:
            raise ValueError(
                f"lane {self.lane}: {self.planner.buffered} tokens wait after reading again, the state says "
                f"{self.ledger.buffered}; the data or the encoder changed since it was written"
            )
