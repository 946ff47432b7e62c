"""Mutants of sources."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from streampack import (
    DatatroveSource,
    FlatTokensSource,
    HFSource,
    Holdout,
    JSONLSource,
    MapSource,
    MDSSource,
    MegatronSource,
    Mix,
    ParquetSource,
    TokenShardSource,
)
from streampack.accounting import trained_tokens
from streampack.sources.bad_records import Quarantine
from streampack.sources.mechanics.arrow_rows import cleans_of
from streampack.sources.mechanics.files import FileSource, divide
from streampack.sources.mechanics.prefetcher import Prefetcher
from streampack.sources.mixture_reader import pass_number
from streampack.sources.reading import BadRecord, own_row
from streampack.types import Sample
from tests.mutants.registry import replaces


class Proxy:
    """A reader that passes on everything; a subclass overrides what is wrong with it."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.reader, name)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.reader)


@replaces(Prefetcher, "_read")
def error_of_a_thread_taken_for_the_end(good, self, stretch, count):
    """Where a thread cannot read on, the part ends, so rows behind a URL are lost without an error."""
    good(self, stretch, count)
    if stretch.error is not None:
        stretch.error, stretch.ended = None, True


@replaces(JSONLSource, "records")
def line_at_a_cut_lost(good, self, part, offset, *args):
    """A line of JSON that begins exactly where a file was cut is taken for the end of the line before."""
    several = part.stop is None or part.stop - part.start > 1  # a fetch reads a single row
    for record in good(self, part, offset, *args):
        if not (several and record[0] == offset == part.start > 0):
            yield record


@replaces(JSONLSource, "locate")
def lines_without_blank_ones_counted(good, self, row_id):
    """The line number that is shown of a row of JSON lines leaves out blank lines before it."""
    shown = str(good(self, row_id))
    path, _, line = shown.rpartition(":")
    file, offset = self.files[row_id[0]], row_id[1]
    if not line.isdecimal() or not file.seekable or not Path(file.path).exists():
        return shown
    lines = Path(file.path).read_bytes()[:offset].split(b"\n")[:-1]
    return f"{path}:{int(line) - sum(not each.strip() for each in lines)}"


class _Skipping(Proxy):
    def __next__(self) -> Any:
        try:
            return next(self.reader)
        except BadRecord:
            with suppress(BadRecord):
                next(self.reader, None)
            raise


@replaces(JSONLSource, "read")
def row_after_a_bad_record_lost(good, self, reading):
    """Where a bad record of JSON lines is skipped, the row behind it is skipped, too."""
    return _Skipping(good(self, reading))


@replaces(ParquetSource, "records")
def part_of_parquet_read_anew(good, self, part, offset, *args):
    """A resume in the middle of a part of a Parquet file reads its rows again from the part's beginning."""
    known = self.__dict__.setdefault("read_anew", set())
    # Once a part: behind damage, where it goes on in the same way, reading would never end.
    anew = offset > part.start and part not in known
    known.update([part] * anew)
    return good(self, part, part.start if anew else offset, *args)


@replaces(FileSource, "listed")
def changed_file_not_told_apart(good, self):
    """The list of a corpus holds no tags, so a file that changed and kept its size is read on in the middle."""
    return [entry._replace(tag="") for entry in good(self)]


@replaces(FlatTokensSource, "identity")
def identity_without_a_setting(good, self):
    """A run that goes on with flat tokens cut to another ``document_length`` is not refused."""
    return {**good(self), "document_length": None}


@replaces(FlatTokensSource, "records")
def document_cut_at_the_end_of_a_part(good, self, part, offset, *args):
    """A document of flat tokens that crosses the end of a lane's part loses the tokens behind it."""
    for begin, (ids, mask), end in good(self, part, offset, *args):
        whole = part.stop is None or part.stop - part.start == 1
        yield begin, (ids if whole else ids[: part.stop - begin], mask), end


@replaces(HFSource, "fetch_many")
def fetched_from_the_first_shard(good, self, row_ids, **settings):
    """A row of a stream of ``datasets`` is fetched again from the first shard, whichever it is in."""
    return good(self, [each if len(each) < 2 else (0, each[1]) for each in row_ids], **settings)


@replaces(MapSource, "read")
def same_order_each_epoch(good, self, reading):
    """A map-style dataset is shuffled in the order of the first epoch each time."""
    return good(self, replace(reading, epoch=0))


@replaces(own_row)
def rows_copied_flat(good, value):
    """Messages within a row are shared with an iterable that reuses them for its next row."""
    return list(value) if type(value) is list else good(value)


class _Charging(Proxy):
    def charge(self, parts: Any) -> None:
        # Of a source that trains nothing it goes on counting nothing: reading would never end.
        some = sum(map(trained_tokens, parts)) > 0
        self.reader.charge([Sample(part.tokens, part.tokens) for part in parts] if some else parts)


@replaces(Mix, "read")
def prompts_count_for_weights(good, self, reading):
    """The weights of a mixture are fractions of all tokens, prompts included, not of the trained ones."""
    return _Charging(good(self, reading))


@replaces(Holdout, "keeps")
def held_out_rows_trained(good, self, row):
    """One in seven of the rows that are held out for validation is trained on, too."""
    return good(self, row) or (self.part == "train" and crc32(repr(row).encode()) % 7 == 0)


@replaces(TokenShardSource, "cut")
def shard_that_is_gone_not_cut(good, self, num_lanes, parallel_map):
    """A token shard that is gone is one part, so that a resume finds other parts than before in its lanes."""
    sizes = [layout.units for layout in self.layouts]
    return divide(self.counts, num_lanes, sizes=sizes, whole=set(self.bad))


@replaces(TokenShardSource, "decode")
def last_bits_of_masks_lost(good, self, part, offset, raw):
    """In token shards, the tokens of a document behind its last whole byte of the mask are all trained."""
    row = good(self, part, offset, raw)
    tokens, labels = row["tokens"], row["labels"].copy()
    whole = tokens.size - tokens.size % 8
    labels[whole:] = tokens[whole:]
    return row if row["labels"] is tokens else {**row, "labels": labels}


@replaces(TokenShardSource, "decode")
def checksums_not_compared(good, self, part, offset, raw):
    """Damaged tokens of a shard are trained."""
    return good(self, part, offset, (*raw[:2], None))


@replaces(MegatronSource, "decode")
def ids_of_two_bytes_signed(good, self, part, offset, raw):
    """Ids above 32,767 of Megatron's files become negative."""
    row = good(self, part, offset, raw)
    if self.layouts[part.file].dtype != "<u2":
        return row
    tokens = row["tokens"].astype(np.int16).astype(np.int32)
    return {"tokens": tokens, "labels": tokens}


@replaces(DatatroveSource, "decode")
def loss_of_the_first_file_only(good, self, part, offset, raw):
    """Of datatrove's files, only the first one's ``.loss`` is heeded; all tokens of the others are trained."""
    row = good(self, part, offset, raw)
    return row if part.file == 0 else {**row, "labels": row["tokens"]}


@replaces(MDSSource, "records")
def last_sample_of_compressed_shards_lost(good, self, part, offset, *args):
    """The last sample of each compressed MDS shard is not read."""
    for record in good(self, part, offset, *args):
        if self.files[part.file].seekable or record[2] < self.counts[part.file]:
            yield record


@replaces(pass_number)
def third_pass_like_the_second(good, epoch, restarts):
    """A source of a mixture that comes more than twice in an epoch comes in the second pass's order each time."""
    return good(epoch, min(restarts, 1))


@replaces(Quarantine, "skip")
def limit_of_bad_records_anew(good, self, lane, *, before, **what):
    """A lane that has passed by as many bad records as it may begins to count them anew."""
    return good(self, lane, before=before % (self.limit or 1), **what)


@replaces(cleans_of)
def nulls_of_arrow_left(good, types, *, decoded=False):
    """The nulls that Arrow puts into records of lists are rendered and trained."""
    return {}
