"""A lane: one stream of rows, encoded, planned and assembled into packs, that can resume from a state."""

from __future__ import annotations

from collections import deque

from streampack.accounting import Ledger, SourceStats, trained_tokens
from streampack.packing.assemble import assemble
from streampack.packing.groups import Group, pack_groups
from streampack.packing.planner import Planner
from streampack.storage.read_ahead import ReadAhead
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import DAMAGED, LaneEvent, LaneState, lowest_zero
from streampack.streaming.pack_windows import PackWindows, consumed_pieces
from streampack.streaming.piece_reader import Piece, PieceReader
from streampack.streaming.replay import Replay
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
        self.windows = PackWindows(config, self.planner, self.piece_reader)  # with ``balance_window``
        self.replay: Replay | None = None  # of the state, until `restore`
        if state is None:
            self.piece_reader.open(first_epoch)
        else:
            self._require_bounded(state)
            self.replay = Replay(self.piece_reader, state)

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
        if self.replay is not None:
            self._restore(self.replay)
            self.replay = None
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
        if self.config.balance_window:
            placed = self.windows.next_pack(self.state)
        else:
            placed = self.planner.next_pack()
        if not placed:
            self.done = True
            return None
        packing, mixed = self.config.packing, bool(self.source_stats)
        sequences, fragments = [], []
        seq_lens: list[int] = []
        grouped = False
        packed = 0
        for piece, start, stop in placed:
            sequence, length = piece.sample, stop - start
            packed += length
            if length < piece.length:
                if piece.trained is None:
                    # `label_weights` divides by the trained tokens of the whole sample, so that a split sample weighs
                    # as much as another. All cuts of a piece follow from this one fragment, so they are counted once.
                    piece.trained = trained_tokens(sequence, packing.cuts(piece.length, start, stop))
                sequence = sequence.cut(start, stop)
            sequences.append(sequence)
            if type(sequence) is Group:
                grouped = True
                seq_lens += sequence.lengths
                fragments += [Fragment(piece.row_id, *bounds) for bounds in sequence.bounds]
            else:
                seq_lens.append(padded := packing.padded(length))
                fragments.append(
                    Fragment(
                        piece.row_id, piece.start + start, piece.start + stop, piece.trained, padded - length
                    )
                )
            if mixed:
                stats = self.piece_reader.stats(piece.row_id)
                stats.packed += length
                stats.trained += trained_tokens(sequence)
        tokens, labels = assemble(
            sequences,
            max_seq_len=packing.max_seq_len,
            padding_idx=self.config.padding_idx,
            pad_seqs_to=packing.pad_seqs_to,
        )
        groups = pack_groups(sequences, labels, max_seq_len=packing.max_seq_len) if grouped else None
        self.packs += 1
        ledger = self.ledger
        ledger.packs += 1
        ledger.capacity += packing.max_seq_len
        ledger.packed += packed
        return Pack(
            tokens=tokens,
            labels=labels,
            seq_lens=tuple(seq_lens),
            fragments=tuple(fragments),
            epoch=0 if self.config.endless else self.epoch,
            number=self.packs - 1,
            lane=self.lane,
            groups=groups,
        )

    def state(self) -> LaneState:
        """Return a snapshot to resume from. Call it between packs only."""
        planner, reader = self.planner, self.piece_reader
        assert not planner.placed, "a state is taken between packs"
        if self.ledger.buffered != self._held:
            raise RuntimeError(
                f"lane {self.lane} lost tokens: the ledger counts {self.ledger.buffered} buffered tokens "
                f"and the lane holds {self._held}; this is a bug in streampack, do not trust this run"
            )
        if self.windows.open is not None:
            return self.windows.open.state(
                packs=self.packs, ledger=self.ledger, source_stats=self.source_stats
            )
        if planner.waiting:
            oldest = planner.waiting[0]
            epoch, cursor, first = oldest.epoch, oldest.cursor, oldest.row_first
        else:
            epoch, cursor, first = reader.position()
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
            consumed=consumed_pieces(planner, reader, first=first),
            ledger=self.ledger.copy(),
            rows=log.digits,
            epochs=log.numbered_epochs(epoch),
            windows=log.numbered_windows(),
            front=reader.reader.front,
            source_stats=tuple(stats.copy() for stats in self.source_stats),
            reached=reader.reached,
            bad_shards=tuple(reader.bad_shards),
            bad_in_pass=reader.bad_of_state,
            whole=reader.newest_is_whole,
        )

    @property
    def _held(self) -> int:
        """Tokens that were read and are in no pack that was handed out."""
        return self.planner.buffered + self.windows.tokens + self.piece_reader.pending_tokens

    @property
    def _most_waiting(self) -> int:
        """The most pieces that can wait, those of a window of planned packs among them."""
        packing = self.config.packing
        in_window = self.config.balance_window * (packing.max_seqs_per_pack or packing.max_seq_len)
        return packing.buffer_size + in_window

    def _require_bounded(self, state: LaneState) -> None:
        """Refuse a state by which more would be read again than a lane can have read."""
        # All pieces after the last consumed one wait, and at most `buffer_size` can. Without this check, a damaged
        # state could make the lane read the whole corpus.
        packing, window = self.config.packing, self.config.balance_window
        waiting, limit = state.next_piece - state.first - state.consumed.bit_length(), self._most_waiting
        if waiting > limit and not state.anew:  # with other settings, more may have waited
            raise ValueError(
                f"lane {self.lane}: the state has {waiting} waiting pieces after the last consumed one, and "
                f"buffer_size={packing.buffer_size} and balance_window={window} allow {limit}; it is damaged, resume "
                "from another checkpoint"
            )
        if state.open_window is not None and not window:
            raise ValueError(
                f"lane {self.lane}: the state has an open window and balance_window is 0" + DAMAGED
            )

    def _restore(self, replay: Replay) -> None:
        """Read again from the row of the oldest waiting piece, and skip what is consumed."""
        state = replay.state
        self.packs = state.packs
        # A state that was saved at the end of the last epoch may be continued with epochs=None. There, a lane has an
        # end only if none of its rows makes a piece.
        self.done = state.done and not (self.config.endless and (state.ledger.packed or state.anew))
        if state.anew:
            self._restore_anew(replay)
            return
        pieces, removed = replay.run()
        window = state.open_window
        behind = len(pieces) if window is None else sum(piece.number < window.next_piece for piece in pieces)
        waiting, later = pieces[:behind], pieces[behind:]
        # The offset is that of the piece that waited longest. If its row is gone, the next one has none.
        oldest = state.first + lowest_zero(state.spared)
        self.planner.restore(waiting, offset=state.offset if pieces and pieces[0].number == oldest else 0)
        if window is not None:
            self.windows.plan_again(state, window, deque(later))
        lost = self.ledger.buffered - self._held
        # A window that was closed where the corpus changed may have handed out parts of pieces.
        if lost > 0 and (removed or (self.config.balance_window and self.config.packing.split_across_pack)):
            self.ledger.drop("removed", lost, samples=removed)
        elif lost:
            raise ValueError(
                f"lane {self.lane}: {self._held} tokens wait after reading again, the state says "
                f"{self.ledger.buffered}; the data or the encoder changed since it was written"
            )

    def _restore_anew(self, replay: Replay) -> None:
        """Read again what waited with other settings, and let it wait as it is with these."""
        pieces = replay.run_anew()
        if len(pieces) > (limit := self._most_waiting):
            packing, window = self.config.packing, self.config.balance_window
            raise ValueError(
                f"lane {self.lane}: {len(pieces)} pieces of the rows that the earlier run had read wait, and "
                f"buffer_size={packing.buffer_size} and balance_window={window} allow {limit}; set buffer_size to "
                f"{len(pieces)} or more, or to what it was"
            )
        self.planner.restore(pieces, offset=0)
