"""Mutants of sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from streampack.sources.base import own_row
from streampack.sources.files import FileSource
from streampack.sources.mixture import pass_number
from streampack.types import Sample
from tests.mutants.registry import mutant, patch, patch_function


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


@mutant
def line_at_a_cut_lost() -> None:
    """A line of JSON that begins exactly where a file was cut is taken for the end of the line before."""

    def make(good: Any) -> Any:
        def records(self: Any, part: Any, offset: int, *args: Any) -> Iterator[Any]:
            several = part.stop is None or part.stop - part.start > 1  # a fetch reads a single row
            for record in good(self, part, offset, *args):
                if not (several and record[0] == offset == part.start > 0):
                    yield record

        return records

    patch(JSONLSource, "records", make)


@mutant
def lines_without_blank_ones_counted() -> None:
    """The line number that is shown of a row of JSON lines leaves out blank lines before it."""

    def make(good: Any) -> Any:
        def locate(self: Any, row_id: Any) -> str:
            shown = str(good(self, row_id))
            path, _, line = shown.rpartition(":")
            file, offset = self.files[row_id[0]], row_id[1]
            if not line.isdecimal() or not file.seekable:
                return shown
            lines = Path(file.path).read_bytes()[:offset].split(b"\n")[:-1]
            return f"{path}:{int(line) - sum(not each.strip() for each in lines)}"

        return locate

    patch(JSONLSource, "locate", make)


@mutant
def row_after_a_bad_record_lost() -> None:
    """Where a bad record of JSON lines is skipped, the row behind it is skipped, too."""

    class Skipping(Proxy):
        def skip(self) -> None:
            self.reader.skip()
            try:
                next(self.reader, None)
            except ValueError:
                self.reader.skip()

    patch(JSONLSource, "read", lambda good: lambda self, reading: Skipping(good(self, reading)))


@mutant
def part_of_parquet_read_anew() -> None:
    """A resume in the middle of a part of a Parquet file reads its rows again from the part's beginning."""

    def make(good: Any) -> Any:
        def records(self: Any, part: Any, offset: int, *args: Any) -> Any:
            known = self.__dict__.setdefault("read_anew", set())
            # Once a part: behind damage, where it goes on in the same way, reading would never end.
            anew = offset > part.start and part not in known
            known.update([part] * anew)
            return good(self, part, part.start if anew else offset, *args)

        return records

    patch(ParquetSource, "records", make)


@mutant
def changed_file_not_told_apart() -> None:
    """The list of a corpus holds no tags, so a file that changed and kept its size is read on in the middle."""

    def make(good: Any) -> Any:
        return lambda self: [entry._replace(tag="") for entry in good(self)]

    patch(FileSource, "listed", make)


@mutant
def identity_without_a_setting() -> None:
    """A run that goes on with flat tokens cut to another ``document_length`` is not refused."""

    def make(good: Any) -> Any:
        return lambda self: {**good(self), "document_length": None}

    patch(FlatTokensSource, "identity", make)


@mutant
def document_cut_at_the_end_of_a_part() -> None:
    """A document of flat tokens that crosses the end of a lane's part loses the tokens behind it."""

    def make(good: Any) -> Any:
        def records(self: Any, part: Any, offset: int, *args: Any) -> Iterator[Any]:
            for begin, raw, end in good(self, part, offset, *args):
                whole = part.stop is None or part.stop - part.start == 1
                yield begin, raw if whole else raw[: part.stop - begin], end

        return records

    patch(FlatTokensSource, "records", make)


@mutant
def fetched_from_the_first_shard() -> None:
    """A row of a stream of ``datasets`` is fetched again from the first shard, whichever it is in."""

    def make(good: Any) -> Any:
        return lambda self, row_id: good(self, row_id if len(row_id) < 2 else (0, row_id[1]))

    patch(HFSource, "fetch", make)


@mutant
def same_order_each_epoch() -> None:
    """A map-style dataset is shuffled in the order of the first epoch each time."""
    patch(MapSource, "read", lambda good: lambda self, reading: good(self, replace(reading, epoch=0)))


@mutant
def rows_copied_flat() -> None:
    """Messages within a row are shared with an iterable that reuses them for its next row."""

    def make(good: Any) -> Any:
        return lambda value: list(value) if type(value) is list else good(value)

    patch_function(own_row, make)


@mutant
def prompts_count_for_weights() -> None:
    """The weights of a mixture are fractions of all tokens, prompts included, not of the trained ones."""

    class Charging(Proxy):
        def charge(self, parts: Any) -> None:
            # Of a source that trains nothing it goes on counting nothing: reading would never end.
            some = sum(map(trained_tokens, parts)) > 0
            self.reader.charge([Sample(part.tokens, part.tokens) for part in parts] if some else parts)

    patch(Mix, "read", lambda good: lambda self, reading: Charging(good(self, reading)))


@mutant
def inner_weights_equal() -> None:
    """The sources of a mixture within a mixture have equal weights, whatever it says."""

    def make(good: Any) -> Any:
        def init(self: Any, sources: Any, *, stop: str = "all_exhausted", **settings: Any) -> None:
            def levelled(entry: Any) -> Any:
                inner = entry.get("source") if isinstance(entry, Mapping) else None
                if not isinstance(inner, Mix):
                    return entry
                entries = [replace(each, weight=1.0) for each in inner.entries]
                return {**entry, "source": Mix(entries, stop=inner.stop)}

            good(self, [levelled(entry) for entry in sources], stop=stop, **settings)

        return init

    patch(Mix, "__init__", make)


@mutant
def held_out_rows_trained() -> None:
    """One in seven of the rows that are held out for validation is trained on, too."""

    def make(good: Any) -> Any:
        def keeps(self: Any, row: Any) -> bool:
            return good(self, row) or (self.part == "train" and crc32(repr(row).encode()) % 7 == 0)

        return keeps

    patch(Holdout, "keeps", make)


@mutant
def last_bits_of_masks_lost() -> None:
    """In token shards, the tokens of a document behind its last whole byte of the mask are all trained."""

    def make(good: Any) -> Any:
        def decode(self: Any, part: Any, offset: int, raw: Any) -> Any:
            row = good(self, part, offset, raw)
            tokens, labels = row["tokens"], row["labels"].copy()
            whole = tokens.size - tokens.size % 8
            labels[whole:] = tokens[whole:]
            return row if row["labels"] is tokens else {**row, "labels": labels}

        return decode

    patch(TokenShardSource, "decode", make)


@mutant
def ids_of_two_bytes_signed() -> None:
    """Ids above 32,767 of Megatron's files become negative."""

    def make(good: Any) -> Any:
        def decode(self: Any, part: Any, offset: int, raw: Any) -> Any:
            row = good(self, part, offset, raw)
            if self.described[part.file].dtype != "<u2":
                return row
            tokens = row["tokens"].astype(np.int16).astype(np.int32)
            return {"tokens": tokens, "labels": tokens}

        return decode

    patch(MegatronSource, "decode", make)


@mutant
def loss_of_the_first_file_only() -> None:
    """Of datatrove's files, only the first one's ``.loss`` is heeded; all tokens of the others are trained."""

    def make(good: Any) -> Any:
        def decode(self: Any, part: Any, offset: int, raw: Any) -> Any:
            row = good(self, part, offset, raw)
            return row if part.file == 0 else {**row, "labels": row["tokens"]}

        return decode

    patch(DatatroveSource, "decode", make)


@mutant
def last_sample_of_compressed_shards_lost() -> None:
    """The last sample of each compressed MDS shard is not read."""

    def make(good: Any) -> Any:
        def records(self: Any, part: Any, offset: int, *args: Any) -> Iterator[Any]:
            for record in good(self, part, offset, *args):
                if self.files[part.file].seekable or record[2] < self.counts[part.file]:
                    yield record

        return records

    patch(MDSSource, "records", make)


@mutant
def third_pass_like_the_second() -> None:
    """A source of a mixture that comes more than twice in an epoch comes in the second pass's order each time."""
    patch_function(pass_number, lambda good: lambda epoch, restarts: good(epoch, min(restarts, 1)))


@mutant
def limit_of_bad_records_anew() -> None:
    """A lane that has passed by as many bad records as it may begins to count them anew."""

    def make(good: Any) -> Any:
        return lambda self, lane, *, before, **what: good(
            self, lane, before=before % (self.limit or 1), **what
        )

    patch(Quarantine, "skip", make)
