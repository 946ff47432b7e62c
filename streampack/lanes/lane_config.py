"""The configuration that all lanes of a run share: the source, the encoder, how samples become pieces; their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from streampack.lanes.window_reader import WindowReader
from streampack.packing.assemble import null_pack
from streampack.packing.encoders import Encoder, TokensEncoder, eos_of, require_encoder
from streampack.packing.groups import Group, cut_group, require_whole_groups
from streampack.packing.media import MediaSample, has_room, require_room
from streampack.packing.samples import check_ids, sample_from_row, with_eos_of
from streampack.packing.settings import Packing
from streampack.sources.bad_records import Quarantine, require_sound
from streampack.sources.mechanics.arrow_rows import ArrowRow
from streampack.sources.mechanics.files import FileSource
from streampack.sources.mixture import Mix
from streampack.sources.reading import BadRecord, Division, Reader, Reading
from streampack.sources.source import Source
from streampack.storage.prefetch import Prefetch
from streampack.types import IGNORE_INDEX, INT32, Cursor, Pack, Row, RowId, Sample

UNTRAINED = ("keep", "drop", "error")
CHARACTERS_OF_A_TOKEN = 16
"""A row with more characters for each of ``max_document_tokens`` is dropped unencoded: 3 MB take seconds to encode. A
text of so few tokens is hardly more than blanks or one repeated sign."""
GIANT = Sample(np.zeros(0, INT32), np.zeros(0, INT32))
"""Sample that stands for such a text; no other sample is empty."""
Encode = Callable[[Mapping[str, Any]], Sample]


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """The configuration that all lanes of a run share."""

    source: Source
    encode: Encode
    packing: Packing
    seed: int = 0
    shuffle_window: int = 0
    endless: bool = False  # an epoch's end rolls into the next without a flush
    untrained: str | None = None  # one of UNTRAINED; None keeps such samples, and warns
    max_document_tokens: int | None = None  # longer samples are dropped
    padding_idx: int = 0
    vocab_size: int | None = None
    checks: bool = True  # every sample; an encoder may be known to make none but good ones
    quarantine: Quarantine | None = None  # None: a broken record is an error
    balance_window: int = 0  # packs that are planned and then emitted by cost; 0: emitted as planned
    earlier: Mapping[str, Sequence[Division]] = field(default_factory=dict)  # see Reading
    eos_ids: frozenset[int | None] = field(init=False)  # of the encoders
    reads_beside: bool = field(init=False)  # whether an encoder reads images beside the data

    def __post_init__(self) -> None:
        for encoder in self.encoders:
            require_encoder(encoder)
            if getattr(encoder, "makes_groups", False):
                require_whole_groups(self.packing, what="the encoder makes groups")
        ids = frozenset(eos_of(getattr(encoder, "tokenizer", encoder)) for encoder in self.encoders)
        object.__setattr__(self, "eos_ids", ids)
        object.__setattr__(self, "reads_beside", any(hasattr(each, "beside") for each in self.encoders))

    @property
    def longest_read(self) -> float:
        """The most seconds that one read may take: in requests, and in waits for storage that does not answer."""
        return max(leaf.patience for leaf in self.source.leaves().values())

    @property
    def may_not_end(self) -> bool:
        """Whether a source may have no end, as an iterable or a stream may."""
        return any(
            leaf.size is None and not isinstance(leaf, FileSource) for leaf in self.source.leaves().values()
        )

    @property
    def mix(self) -> Mix | None:
        """The source, if it is a mixture."""
        return self.source if isinstance(self.source, Mix) else None

    @property
    def encoders(self) -> list[Encode]:
        """The run's encoder, and those that sources of a mixture have of their own."""
        own = [entry.encoder for entry in (self.mix.entries if self.mix else ())]
        return [self.encode, *(encoder for encoder in own if encoder is not None)]

    @property
    def reads_images(self) -> bool:
        """Whether an encoder says that it is one of images, or packs have a limit of them."""
        return self.packing.max_media is not None or any(
            getattr(each, "reads_images", False) for each in self.encoders
        )

    def open(
        self,
        lane: int,
        *,
        num_lanes: int,
        epoch: int,
        start: Cursor | None = None,
        prefetch: Prefetch | None = None,
    ) -> Reader:
        """Open a lane's rows of an epoch, at a cursor or at its beginning."""
        reading = Reading(
            lane,
            num_lanes=num_lanes,
            epoch=epoch,
            seed=self.seed,
            shuffle_window=self.shuffle_window,
            start=start,
            stagger=self.packing.max_seq_len,
            prefetch=prefetch,
            earlier=self.earlier,
            wrap=self._in_windows,
        )
        reader = self.source.read(reading)
        return reader if self.source.names else self._in_windows(reader, self.source, None)

    def _in_windows(self, reader: Reader, source: Source, encoder: Encode | None) -> Reader:
        """Return a reader that encodes the rows of a source in windows, if its encoder gains from that.

        Rows of an iterable are encoded one by one, because they may come slowly.
        """
        encode, leaves = encoder or self.encode, source.leaves().values()
        waits = not all(leaf.map_style or isinstance(leaf, FileSource) for leaf in leaves)
        if not isinstance(encode, Encoder) or encode.batch_rows == 1 or waits:
            return reader
        return WindowReader(
            reader,
            partial(self._encoded, encode),
            rows=encode.batch_rows,
            characters=partial(_characters, encode),
            copies=any(leaf.map_style for leaf in leaves),
        )

    def _encoded(self, encode: Encoder, rows: Sequence[Row]) -> list[Row]:
        """Encode some rows together, all but giants. Where that fails, `sample` encodes them one by one."""
        most = self.max_document_tokens or math.inf
        some = [row for row in rows if _characters(encode, row) <= CHARACTERS_OF_A_TOKEN * most]
        try:
            made = list(
                encode.encode_many(
                    [dict(row.data) if type(row.data) is ArrowRow else row.data for row in some]
                )
            )
        except Exception:
            return list(rows)
        if len(made) != len(some):
            raise ValueError(
                f"{type(encode).__name__}.encode_many returned {len(made)} samples for {len(some)} rows; return one "
                "for each row, or its exception"
            )
        found = dict(zip(map(id, some), made, strict=True))
        return [row._replace(made=found.get(id(row))) for row in rows]

    def null_pack(self) -> Pack:
        """Return a pack of padding only, which a rank takes where it has no pack and others do.

        Of samples that keep their rows it is the first of the data, with nothing to train.
        """
        if not hasattr(self.encode, "collate"):
            return null_pack(self.packing.pack_len(0), padding_idx=self.padding_idx)
        row_id = self.source.examples(1)[0].row_id
        [row] = self.source.fetch_many([row_id])
        sample = self.encoder(row_id)(row)
        return Pack(sample.tokens, np.full_like(sample.labels, IGNORE_INDEX), (), (), media=(sample,))

    def check_shards(self) -> None:
        """Warn of files that are known to be unreadable; raise if bad records are not skipped."""
        require_sound(self.source, self.quarantine)

    def encoder(self, row_id: RowId) -> Encode:
        """Return the encoder of a row's source, for the rows of the file that the row is in."""
        found = self.source.encoder(row_id) or self.encode
        return encoder_beside(found, self.source, row_id) if self.reads_beside else found

    def sample(self, row: Row, *, unchecked: list[tuple[RowId, Sample]] | None = None) -> Sample:
        """Encode and check a row.

        Args:
            row: of the source.
            unchecked: receives samples whose ids the caller checks with `check_ids`: 64 at once take a quarter of the
                time. Where bad records are skipped, samples are checked here.

        Raises:
            BadRecord: for a row that makes no sample, if bad records are skipped.
            Exception: the encoder's, with the place of the row, if they are not, or if a server does not answer.
        """
        try:
            encode, data, sample, sound = self.encoder(row.row_id), row.data, row.made, not self.checks
            if isinstance(sample, Exception):
                raise sample
            if sample is None and type(data) is ArrowRow:
                if type(encode) is not TokensEncoder:
                    data = dict(data)  # functions of users may change it, or add to its lists
                elif (ids := encode.checked_in(data.batch)) is not None and (
                    self.vocab_size is None or ids.below <= self.vocab_size
                ):
                    sample, sound = ids.sample(data.index), True
            if sample is None:
                if is_giant(encode, data, self.max_document_tokens):
                    return GIANT
                sample = encode(data)
            if not sound:
                # Encoders of this package return a `Sample` in new memory. Other encoders may return other forms, or
                # memory that they use again, so that is converted and copied.
                if not type(encode).__module__.startswith("streampack."):
                    sample = sample_from_row(sample)
                if unchecked is not None and self.quarantine is None and not isinstance(sample, MediaSample):
                    unchecked.append((row.row_id, sample))
                else:
                    check_ids([sample], self.vocab_size)
            if not sample.tokens.size:
                raise ValueError("it has no token; mend the row, or leave it out (skip_bad: True)")
            if isinstance(sample, MediaSample):
                require_room(sample, self.packing)
        except Exception as error:
            if self.quarantine is not None and not isinstance(error, ConnectionError):
                reason = f"{type(error).__name__}: {error}"
                raise BadRecord(reason, row_id=row.row_id, locate=self.source.locate) from error
            place = self.source.locate(row.row_id)
            if isinstance(error, ValueError):
                raise ValueError(f"{place}: {error}") from error
            if isinstance(error, StopIteration):  # would end the stream in silence
                raise RuntimeError(f"{place}: the encoder raised StopIteration") from error
            error.add_note(f"while encoding {place}")
            raise
        return sample

    def check_ids(self, unchecked: Sequence[tuple[RowId, Sample]]) -> None:
        """Check the ids of samples that `sample` has left unchecked, at least one."""
        try:
            check_ids([sample for _, sample in unchecked], self.vocab_size)
        except ValueError as error:
            if len(unchecked) == 1:
                raise ValueError(f"{self.source.locate(unchecked[0][0])}: {error}") from None
            for each in unchecked:
                self.check_ids([each])

    def drops_untrained(self, sample: Sample, parts: Sequence[tuple[int, Sample]]) -> bool:
        """Return whether the parts of a sample are dropped if they train nothing.

        By default a group is, if a cut took all that is trained of an answer: a pair would compare a log-probability of
        0. A group that came so is kept, because its encoder may mean it.
        """
        was_cut = isinstance(sample, Group) and parts[0][1] is not sample
        return self.untrained == "drop" or (self.untrained is None and was_cut)

    def cut(self, sample: Sample) -> list[tuple[int, Sample]]:
        """Return the pieces that a sample becomes, each with its start in the sample; none if it is dropped."""
        length, most = sample.tokens.size, self.max_document_tokens
        if sample is GIANT or (most is not None and length > most):
            return []
        if type(sample) is Group:
            return cut_group(sample, self.packing)
        if isinstance(sample, MediaSample):
            return [(0, sample)] if has_room(sample, self.packing) else []
        if 0 < length <= self.packing.max_seq_len:  # most are
            return [(0, sample)]
        bounds = self.packing.pieces_of(length)
        if bounds == [(0, length)]:
            return [(0, sample)]
        pieces = [(start, sample.cut(start, stop)) for start, stop in bounds]
        if bounds and bounds[-1][1] < length:  # cut on the right
            pieces = [(start, with_eos_of(sample, piece, self.eos_ids)) for start, piece in pieces]
        return pieces


def _characters(encode: Encoder, row: Row) -> int:
    """Return how many characters of a row are encoded; 0 for a row that its encoder will refuse."""
    try:
        return encode.characters(row.data)
    except Exception:
        return 0


def is_giant(encode: Encode, data: Any, most: int | None) -> bool:
    """Return whether a row has more than `CHARACTERS_OF_A_TOKEN` characters for each of ``most`` tokens."""
    if most is None or not (isinstance(encode, Encoder) and isinstance(data, Mapping)):
        return False
    return encode.characters(data) > CHARACTERS_OF_A_TOKEN * most


def encoder_beside(encode: Encode, source: Source, row_id: RowId) -> Encode:
    """Return an encoder for the rows of the file that a row is in; most are the same for all files."""
    beside: Callable[[str | None], Encode] | None = getattr(encode, "beside", None)
    return encode if beside is None else beside(source.path_of(row_id))


def must_check(source: Source, encode: Encode, vocab_size: int | None) -> bool:
    """Return whether samples must be checked: their ids may be outside the vocabulary, for all the encoder knows."""
    if source.names or not isinstance(encode, Encoder):  # a mixture's sources may have encoders of their own
        return True
    bound = encode.ids_below(source.ids_below)
    return bound is None or (vocab_size is not None and bound > vocab_size)
