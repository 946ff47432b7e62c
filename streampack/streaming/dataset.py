"""`IterablePackedDataset`: a stream of samples in, a stream of packs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from streampack.accounting import Ledger, SourceStats, warn_of_untrained
from streampack.distributed.ranks import ranks_here, refuse_several_ranks
from streampack.lanes.balance import default_window, require_window
from streampack.lanes.lane_config import UNTRAINED, LaneConfig, must_check
from streampack.lanes.lane_state import LaneEvent, LaneState, Snapshot
from streampack.lanes.number_of_lanes import default_lanes, require_lanes
from streampack.lanes.round_robin import open_lanes, round_robin
from streampack.packing.encoders import TokensEncoder
from streampack.packing.foreign_loader import refuse_foreign_loader
from streampack.packing.settings import Packing
from streampack.sources.as_source import as_source
from streampack.sources.bad_records import SkipBad, quarantine_for
from streampack.sources.mixture import Mix
from streampack.sources.source import shared_by_lanes
from streampack.storage.prefetch import PREFETCH_BYTES
from streampack.streaming.corpus_changes import CorpusChanges, Resumed
from streampack.streaming.estimate import Estimate, estimate
from streampack.streaming.mixing import AUTO, SHUFFLE_WINDOW, auto_window
from streampack.streaming.pack_dicts import PackDicts
from streampack.streaming.position import Position, Progress
from streampack.streaming.run_identity import OF_READING, RunIdentity
from streampack.streaming.run_state import RunState, as_dicts, checked_state, part_of, state_of
from streampack.streaming.trace import trace
from streampack.types import Fragment, Pack, Sample
from streampack.validation import (
    refuse_text,
    require,
    require_positive,
    require_token_id,
    warn_user,
)

log = logging.getLogger(__name__)


class IterablePackedDataset(IterableDataset[dict[str, Any]]):
    """Packs of ``max_seq_len`` tokens, made while they are consumed, from samples of any lengths.

    >>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3, 4])]
    >>> for pack in IterablePackedDataset(rows, max_seq_len=8):
    ...     print(pack["tokens"].tolist(), pack["seq_lens"].tolist(), pack["num_seqs"])
    [0, 0, 0, 0, 0, 3, 3, 3] [5, 3] 2
    [1, 1, 1, 1, 4, 4, 4, 4] [4, 4] 2
    [2, 2, 0, 0, 0, 0, 0, 0] [2, 6] 1

    Yields dicts in torchtune's format: ``tokens``, ``labels``, ``input_pos`` (int64, ``[max_seq_len]``) and
    ``seq_lens``, whose last entry is the padding, if any. ``num_seqs`` counts the real sequences, and `trace` leads
    from ``fragments`` back to the rows. Labels are unshifted, the first label of every sequence is -100, and positions
    restart at 0.

    Args:
        source: a `Source` or a `Mix` of several; a path, glob or folder of files; a map-style dataset of ``{"tokens",
            "labels"}`` or ``{"input_ids"}``; columns of such, also as a pandas frame; or a deterministic iterable.
        encoder: makes a `Sample` of a row. Rows of token ids need none; sources of a `Mix` may have their own.
        vocab_size: if given, token ids must be below it.

        max_seq_len: tokens in a pack.
        strategy: ``"exact_fit"`` (default), ``"best_fit"``, ``"first_fit"`` or ``"next_fit"``. ``"padded"`` packs
            nothing, to compare with packing: each pack is one sample, and a batch is padded to its longest.
        split_across_pack: for pretraining: packs are always full, and a sample that crosses a pack's end continues in
            the next. Refuses a ``strategy``.
        buffer_size: buffered samples per lane. No sample waits for more packs than that.
        max_seqs_per_pack: the most sequences in a pack, for `cu_seqlens` of a fixed length. A pack that reaches it is
            padded.
        pad_seqs_to: pad every sequence to a multiple of this many tokens: 2 x n for context parallelism over n ranks.
        padding_idx: the token that fills a pack's end.

        overlong: what to do with a sample longer than ``max_seq_len``: ``"error"``, ``"drop"``, ``"truncate"`` (cut off
            its end, but keep the encoder's EOS), ``"truncate_left"`` (cut off its beginning) or ``"split"``. Default:
            ``"error"``; with ``split_across_pack``, ``"split"``.
        max_document_tokens: drop samples of more tokens, and count them as ``overlong``. A row with more than 16
            characters for each of these tokens is not encoded, and counts as 0 tokens. Default: no limit.
        untrained: what to do with a sample that trains no token, or a group with such an answer: ``"keep"``,
            ``"drop"`` or ``"error"``. Default: keep it and warn at the first; a step without a trained token is an
            error in recipes and under Trainer. A group is dropped if ``overlong`` cut off all that an answer trains.
        skip_bad: skip, count and list records that cannot be read or encoded; by default they are errors. ``True``
            skips up to 1 % of the rows that a lane has read, at least 100. A number is another limit, below 1 a
            fraction. A folder is where they are listed. A `Quarantine`, or a mapping of ``folder`` and ``limit``, sets
            both. A part of a file that cannot be read is one record.
        prefetch: for files behind URLs: bytes that a process fetches in advance, for all of its lanes together, beside
            two shuffle windows a lane.
        corpus_lists: a folder that keeps the lists of files. A resume needs it after files, or sources of a mixture,
            were added, removed or changed.

        shuffle: read in a shuffled order, a function of (seed, epoch, lane): parts of files, and rows within windows of
            2,048 or of the given number. Map-style data are shuffled entirely. ``"auto"`` chooses the smallest window
            with which the rows of one file lie within 90 % of an epoch, or the largest that fits into 256 MiB for all
            lanes; a resume keeps it.
        seed: of the shuffled order.
        epochs: how often the data is read. None reads without end and never emits a part-empty pack.
        num_lanes: the streams that the data is divided into, fixed for the life of a run. Steps hold the same packs on
            any number of ranks that divides it. Default, by the size of the data: 1, 2, 4 or 8, from 100 rows or 64 KiB
            a lane; 24 or 48, from 2,000 rows or 1.25 MiB; 1 for an iterable, at most one for each compressed file.
            Ranks that do not divide it get the next multiple of theirs. Your own number must give each rank of a new
            run a lane; on more ranks, a resumed run yields null packs. At most 65,536, and above 1,024 no more than
            rows in memory.
        balance_window: packs that each lane plans in advance and emits by attention cost, so that the ranks of a step
            have about the same work; 0 is off. A sample waits for at most ``buffer_size + 2 * balance_window`` packs.
            Default: 64 for several ranks and ``max_seq_len`` from 8,192 on; otherwise, with images or ``"padded"``, 0.
            With ``"padded"`` it puts samples of about the same length into a step. Fixed for the life of a run.
        max_media: the most media in a pack, such as patches of images, as their encoder counts them. Default: no limit.

    Raises:
        ValueError: for a bad setting, at construction; for a bad row, with its place, when it is read. The error does
            not consume the row.
    """

    def __init__(
        self,
        source: Any,
        *,
        max_seq_len: int,
        encoder: Callable[[Mapping[str, Any]], Sample] | None = None,
        strategy: str | None = None,
        split_across_pack: bool = False,
        buffer_size: int = 128,
        overlong: str | None = None,
        max_document_tokens: int | None = None,
        max_seqs_per_pack: int | None = None,
        pad_seqs_to: int = 1,
        untrained: str | None = None,
        shuffle: bool | int | str = False,
        seed: int = 0,
        epochs: int | None = 1,
        num_lanes: int | None = None,
        padding_idx: int = 0,
        vocab_size: int | None = None,
        skip_bad: SkipBad = False,
        prefetch: int = PREFETCH_BYTES,
        corpus_lists: str | os.PathLike[str] | None = None,
        balance_window: int | None = None,
        max_media: int | None = None,
    ) -> None:
        super().__init__()
        if untrained is not None:
            require(untrained, "untrained", UNTRAINED)
        for value, name in ((epochs, "epochs"), (vocab_size, "vocab_size")):
            if value is not None:
                require_positive(value, name)
        seed = require_positive(seed, "seed", least=0)
        self._auto_shuffle = shuffle == AUTO
        if not self._auto_shuffle:
            refuse_text(shuffle, "shuffle", "True, False, 'auto' or a number of rows")
        padding_idx = require_token_id(padding_idx, "padding_idx", vocab_size=vocab_size)
        packing = Packing(
            max_seq_len,
            strategy=strategy,
            buffer_size=buffer_size,
            split_across_pack=split_across_pack,
            overlong=overlong,
            max_seqs_per_pack=max_seqs_per_pack,
            pad_seqs_to=pad_seqs_to,
            max_media=max_media,
        )
        if max_document_tokens is not None:
            require_positive(max_document_tokens, "max_document_tokens", least=packing.max_seq_len)
        self.prefetch = require_positive(prefetch, "prefetch", least=0)
        source, encode = as_source(source), TokensEncoder() if encoder is None else encoder
        num_lanes = None if num_lanes is None else require_lanes(num_lanes, "num_lanes", source)
        window: Any = SHUFFLE_WINDOW * shuffle if isinstance(shuffle, bool) else shuffle
        if self._auto_shuffle:
            window = auto_window(source, num_lanes or default_lanes(source, 1), seed=seed)
        self.lane_config = LaneConfig(
            source=source,
            encode=encode,
            packing=packing,
            seed=seed,
            shuffle_window=require_positive(window, "shuffle", least=0),
            endless=epochs is None,
            untrained=untrained,
            max_document_tokens=max_document_tokens,
            padding_idx=padding_idx,
            vocab_size=vocab_size,
            checks=must_check(source, encode, vocab_size),
            quarantine=quarantine_for(skip_bad),
        )
        self.lane_config.check_shards()
        self.epochs = epochs
        # As the user set them, as a state has them, or as the run began with them; None until then.
        self.num_lanes = num_lanes
        self.balance_window = None if balance_window is None else require_window(balance_window)
        if self.balance_window and self.lane_config.reads_images:
            raise ValueError(
                f"balance_window={balance_window} with images: a resume would decode the images of a window again, and "
                "one that is gone would change its packs; leave balance_window out"
            )
        # What the user set; it holds where a state leaves it open.
        self._asked_for = {"num_lanes": self.num_lanes, "balance_window": self.balance_window}
        self._of_state = set[str]()  # which of them the loaded state has
        self.position = Position(epochs or 1)
        self._ranks = 1  # of the process that pickled this for a worker process
        self._shared_logged = False
        self._identity = RunIdentity(self.lane_config)
        self._changes = CorpusChanges(source, folder=corpus_lists)
        self._estimates: dict[tuple[int, int], Estimate] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return PackDicts(self._start, look_at=self._look_at)

    def _look_at(self, event: LaneEvent) -> None:
        """Warn at the first event of a run that knows an untrained sample, unless ``untrained`` was set."""
        if event.example and self.lane_config.untrained is None and self.position.first_untrained():
            ledger = replace(Ledger.from_numbers(event.state["ledger"]), example=event.example)
            warn_of_untrained(ledger, max_seq_len=self.lane_config.packing.max_seq_len)

    def _start(self) -> tuple[Progress, Iterator[LaneEvent]]:
        refuse_several_ranks(self._ranks)
        refuse_foreign_loader(self)
        worker = get_worker_info()
        consumer, consumers = (worker.id, worker.num_workers) if worker else (0, 1)
        if consumers > 1 and self.lane_config.source.varies_by_process:
            raise ValueError(
                f"{consumers} worker processes would take turns with the rows of an iterable, and lose rows if it "
                "shares them out by itself, as datasets do that ask torch for their worker; iterate a "
                "PackedDataLoader, or use one worker"
            )
        progress = self.position.start(shuffled=self.lane_config.shuffle_window > 0)
        begin = progress.begin
        self.settle(lanes_of=1, window_of=1)
        events = self.events(consumer, consumers, lane_states=begin.lane_states, epoch=begin.epoch)
        if consumer == 0:
            self._log_shared()
        return progress, events

    def stream(self, consumer: int = 0, consumers: int = 1) -> Iterator[Pack]:
        """Return the packs of one of several consumers (ranks x workers); this fixes num_lanes and balance_window.

        Consumer c owns lanes c, c + consumers, and so on. Where it owns none, it makes no pack.
        """
        events = self.events(consumer, consumers)
        self.settle(lanes_of=1, window_of=consumers)
        return (event.pack for event in events if event.pack is not None)

    def settle(self, *, lanes_of: int, window_of: int) -> None:
        """Fix the number of lanes and the balance window, with the defaults for these numbers of ranks."""
        self.num_lanes, self.balance_window = self.lanes_for(lanes_of), self.window_for(window_of)

    def events(
        self,
        consumer: int = 0,
        consumers: int = 1,
        *,
        lane_states: Mapping[int, Snapshot] | None = None,
        epoch: int | None = None,
        first_epoch: int | None = None,
    ) -> Generator[LaneEvent]:
        """Return the packs of `stream` and the ends of its lanes' epochs, each with the lane's state after it.

        Of lanes without a state the first epoch is ``epoch``; lanes that have ended one before ``first_epoch`` begin
        that one.
        """
        if not 0 <= consumer < consumers:
            raise ValueError(f"consumer={consumer} of consumers={consumers} cannot be; count from 0")
        num_lanes = self.lanes_for(1)
        config = replace(self.lane_config, balance_window=self.window_for(consumers))
        begin = self.position.following()
        states = begin.lane_states if lane_states is None else lane_states
        first = begin.epoch if epoch is None else epoch
        lanes = range(consumer, num_lanes, consumers)
        opened = open_lanes(
            config,
            lanes,
            num_lanes=num_lanes,
            states=states,
            # A lane that resumes continues its own epoch.
            first_epoch=lambda lane: (
                first_epoch if first_epoch is not None else 0 if lane in states else first
            ),
            prefetch=self.prefetch,
        )
        last_epoch = None if self.epochs is None else first + self.epochs - 1
        return round_robin(opened, last_epoch=last_epoch, alone=consumers == 1)

    def _log_shared(self) -> None:
        if not self._shared_logged and self.num_lanes is not None:
            with suppress(OSError):  # reading raises it again, and can be tried again
                for what in shared_by_lanes(self.lane_config.source, self.num_lanes):
                    log.warning("%s", what)
                self._shared_logged = True

    def _frozen(self, *, lists_bad: bool) -> IterablePackedDataset:
        """Return a copy that keeps its settings, whatever is loaded later, and may list no bad records."""
        copied, config = copy(self), self.lane_config
        if not lists_bad and config.quarantine is not None:
            quarantine = replace(config.quarantine, folder=None, quiet=True)
            copied.lane_config = replace(config, quarantine=quarantine)
        return copied

    @property
    def epoch(self) -> int:
        """Epoch, from 0, at which a new iterator starts."""
        return self.position.following().epoch

    def lanes_for(self, ranks: int) -> int:
        """Return the number of lanes: that of the state or of the user, or the default for the data on these ranks.

        Raises:
            ValueError: if a new run has fewer lanes than ranks. A resumed run yields null packs there.
        """
        lanes = self.num_lanes or default_lanes(self.lane_config.source, ranks)
        if lanes < ranks and "num_lanes" not in self._of_state:
            raise ValueError(
                f"num_lanes={lanes} gives {ranks - lanes} of {ranks} ranks nothing to read; in a new run, set "
                f"num_lanes={ranks} or a multiple of every number of ranks that you may resume on, or use fewer ranks"
            )
        return lanes

    def window_for(self, ranks: int) -> int:
        """Return the ``balance_window`` of this many ranks."""
        config = self.lane_config  # images of 64 packs would be decoded twice, for they do not wait in memory
        default = 0 if config.reads_images else default_window(config.packing, ranks=ranks)
        return default if self.balance_window is None else self.balance_window

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, that the next iteration begins with; it decides the order when shuffling.

        Without it, an iteration of the dataset or of a loader begins the next epoch, or continues after the last pack
        that the newest one yielded in this process, if that stopped early. Call it before each iteration of torch's
        DataLoader with workers, which report nothing. Another epoch than the loaded state's discards the state.
        """
        self.position.set_epoch(require_positive(epoch, "epoch", least=0))

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last pack yielded: ``{"lanes": {lane: {...}}, ...}``, plain values, a new dict.

        It may be saved as JSON. In worker processes of torchdata's loader it has the lanes of the worker. Merged, one
        state with the ``lanes`` of all is that of the run; lanes of other steps of a worker are refused, but a worker
        may be some batches before another.

        Raises:
            ValueError: if it is read by a `PackedDataLoader` on several ranks, or by worker processes of torch's
                DataLoader, where the state is theirs.
        """
        state, worker = self.position.complete_state(), get_worker_info()
        if worker is None or not state.partial:
            return self._state_of(state, as_dicts(state.lane_states))
        self.num_lanes = self.lanes_for(1)  # as `_start` does
        own = range(worker.id, self.num_lanes, worker.num_workers)
        return self._state_of(state, part_of(state.lane_states, own))

    def _state_of(self, state: RunState, lanes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        weights = {} if self.mix is None else {"weights": self.mix.target_fractions}  # which may change
        head = {
            "identity": self._identity.plain(),
            "epoch": state.epoch,
            "slot": state.slot,
            "packs_per_step": state.packs_per_step,
            "partial": state.partial,
            "num_lanes": self.num_lanes,
            # As long as nothing was read, a resume may choose another.
            "balance_window": self.balance_window if lanes else None,
            **self._changes.state(self.num_lanes),
            **weights,
        }
        return state_of(head, lanes)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state: the next iteration begins after the last pack yielded when it was taken.

        Raises:
            ValueError: if the state is from another corpus, encoder or config, or is no state.
        """
        resumed = self._checked(state)
        loaded = resumed.loaded
        if self.mix is not None and (changes := self.mix.changed(state.get("weights"))):
            warn_user(changes)
            loaded = loaded.with_lanes(LaneState.closed)
        self._resume(loaded, resumed)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Load the state of a run with other settings: the next iteration continues after what that run has packed.

        The encoder, the packing and a mixture's weights may be others. The corpus, ``shuffle`` and ``seed`` must be
        those of the run, whose ``num_lanes`` is kept. Packed rows are never read again. Buffered rows are encoded, cut
        and packed again if none of their tokens is packed. The buffered rest of other rows is dropped and counted as
        ``removed``, and so are the unemitted packs of an open ``balance_window``: at most one window a lane. Packs,
        ledger and statistics count from zero, and ``epochs`` from the run's beginning.

        >>> rows = [{"tokens": [i] * 4, "labels": [i] * 4} for i in range(6)]
        >>> short = IterablePackedDataset(rows, max_seq_len=4, num_lanes=1)
        >>> packs = iter(short)
        >>> next(packs)["tokens"].tolist(), next(packs)["tokens"].tolist()
        ([0, 0, 0, 0], [1, 1, 1, 1])
        >>> long = IterablePackedDataset(rows, max_seq_len=8)
        >>> long.continue_from(short.state_dict())
        >>> [pack["tokens"].tolist() for pack in long]
        [[2, 2, 2, 2, 3, 3, 3, 3], [4, 4, 4, 4, 5, 5, 5, 5]]

        Raises:
            ValueError: if the state is from another corpus or order, if all ``epochs`` are read, or if it is no state.
        """
        resumed = self._checked(state, names=OF_READING)
        loaded = resumed.loaded
        if self.epochs is not None and loaded.epochs_read >= self.epochs:
            raise ValueError(
                f"nothing is left to read: the earlier run has read the data {loaded.epochs_read} times, and "
                f"epochs={self.epochs} counts those; set epochs to {loaded.epochs_read + 1} or more, or begin the "
                "data again"
            )
        self._resume(loaded.restarted(), resumed)

    def _checked(self, state: Mapping[str, Any], *, names: Collection[str] | None = None) -> Resumed:
        checked = checked_state(state)
        config, identity = self.lane_config, self._identity
        if self._auto_shuffle:  # a run keeps its window, also where files were added since
            config = replace(config, shuffle_window=state["identity"]["shuffle"] or SHUFFLE_WINDOW)
            identity = RunIdentity(config)
        resumed = self._changes.resume(state, checked, config)
        identity.require(state["identity"], names=names, changed=resumed.changed)
        if resumed.loaded.partial and get_worker_info() is None:
            raise ValueError(
                "the state is of one worker process, and the lanes of the others would begin their epoch again; give "
                "the merged states of all workers: one of them, with the lanes of all in its lanes"
            )
        self.lane_config, self._identity = config, identity
        return resumed

    def _resume(self, loaded: RunState, resumed: Resumed) -> None:
        if resumed.changed:
            warn_user(resumed.warning)
        self.lane_config = replace(self.lane_config, earlier=resumed.earlier)
        self._changes.histories = resumed.histories
        found = {name: getattr(loaded, name) for name in self._asked_for}
        for name, before in found.items():
            asked = self._asked_for[name]
            if None not in (before, asked) and before != asked and name not in self._of_state:
                warn_user(
                    f"{name}={asked} is not used: the state was made with {name}={before}, which a run keeps; start "
                    "a new run for another number"
                )
            setattr(self, name, asked if before is None else before)
        self._of_state = {name for name, before in found.items() if before is not None}
        if loaded.ledger.untrained:
            self.position.first_untrained()  # which the run before has said
        self.position.command(loaded)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranks": ranks_here() or 1}

    def keep_corpus_lists(self, folder: str | os.PathLike[str]) -> None:
        """Keep the lists of the files in a folder, where a resume finds them that is given it as ``corpus_lists``."""
        self._changes.kept_in = Path(folder)

    def ledger(self) -> Ledger:
        """Return the ledger as of the last pack; raise as `state_dict` does."""
        return self.position.complete_state().ledger

    @property
    def mix(self) -> Mix | None:
        """The source, if it is a mixture."""
        return self.lane_config.mix

    def source_stats(self) -> dict[str, SourceStats]:
        """Return the counts of each source of a mixture as of the last pack; raise as `state_dict` does."""
        return self._source_stats_of(self.position.complete_state().lane_states)

    def _source_stats_of(self, lane_states: Mapping[int, Snapshot]) -> dict[str, SourceStats]:
        names = [] if self.mix is None else self.mix.names
        lanes = [
            [SourceStats(*numbers) for numbers in state["source_stats"]] for state in lane_states.values()
        ] or [[SourceStats()] * len(names)]
        return {name: SourceStats.total(each) for name, *each in zip(names, *lanes, strict=True)}

    def trace(self, fragment: Fragment) -> dict[str, Any]:
        """Find the row of a sequence in a pack: its place, its data, and the fragment's tokens.

        Where the encoder can decode (those with a tokenizer can), ``text`` is what the tokens say.

        >>> data = IterablePackedDataset([{"tokens": [7, 8], "labels": [7, 8]}], max_seq_len=4)
        >>> [pack] = data
        >>> data.trace(pack["fragments"][0])
        {'place': 'sample 0', 'row': {'tokens': [7, 8], 'labels': [7, 8]}, 'tokens': [7, 8]}
        """
        return trace(self.lane_config, fragment)

    def estimate(self, *, rows: int = 256, num_lanes: int | None = None) -> Estimate:
        """Estimate the packs of an epoch from about ``rows`` rows, all over the corpus.

        Each of ``num_lanes``, by default the run's, has a part-empty last pack.

        Raises:
            ValueError: if the source cannot tell its size.
        """
        key = (rows, self.lanes_for(1) if num_lanes is None else num_lanes)
        if key not in self._estimates:
            self._estimates[key] = estimate(self.lane_config, rows=rows, num_lanes=key[1])
        return self._estimates[key]
