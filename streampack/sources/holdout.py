"""`Holdout`, a fraction of a source that is chosen by the content of rows, and `hold_out`, which splits a source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from streampack.fingerprint import plain
from streampack.sources.examples import Example, marks
from streampack.sources.mechanics.arrow_rows import column_of
from streampack.sources.mixture import Mix
from streampack.sources.reading import BadRecord, Reader, Reading
from streampack.sources.source import Source
from streampack.sources.wrapped import WrappedSource
from streampack.types import Cursor, Row
from streampack.validation import require

PARTS = ("train", "validation")


class Holdout(WrappedSource):
    """One part of a source: the rows held out for validation, or the others, for training.

    A hash of a row's content decides which part it belongs to. So the split is the same on any topology and in any
    order, rows can be added without changing it, and equal rows are always in the same part. Both parts read the whole
    source, and skip the rows of the other part.

    >>> from streampack.sources import MapSource, Reading
    >>> rows = MapSource([{"tokens": [i], "labels": [i]} for i in range(1000)])
    >>> train, held_out = (Holdout(rows, fraction=0.1, part=part) for part in PARTS)
    >>> len(list(train.read(Reading()))), len(list(held_out.read(Reading())))
    (901, 99)

    Args:
        source: any source.
        fraction: the fraction of rows to hold out, above 0 and below 1.
        part: ``"train"`` or ``"validation"``.

    Raises:
        ValueError: for another fraction or part.
    """

    def __init__(self, source: Source, *, fraction: float, part: str) -> None:
        if not 0 < fraction < 1:
            raise ValueError(
                f"fraction={fraction} of the rows cannot be held out; give a number between 0 and 1"
            )
        require(part, "part", PARTS)
        super().__init__(source)
        self.fraction = fraction
        self.part = part
        self._examples: list[Example] | None = None

    @override
    def identity(self) -> dict[str, Any]:
        """Return that of the source, and what decides which rows are held out: the columns, too."""
        if self._examples is None:
            self._examples = self.source.examples()
        first = next((row.data for row in self._examples if isinstance(row.data, Mapping)), None)
        return {
            "source": "Holdout",
            "of": self.source.identity(),
            "fraction": self.fraction,
            "part": self.part,
            "columns": None if first is None else ", ".join(sorted(map(str, first))),
            "hashed": marks(self._examples),
        }

    @override
    def read(self, reading: Reading) -> Reader:
        return _Kept(self.source.read(reading), self)

    @override
    def natural_lanes(self) -> int:
        fraction = self.fraction if self.part == "validation" else 1 - self.fraction
        return max(1, round(fraction * self.source.natural_lanes()))

    @override
    def sample(self, count: int) -> tuple[list[Example], float]:
        rows, scale = self.source.sample(count)  # `keeps` reduces both alike
        return [row for row in rows if row.data is None or self._keeps_if_sound(row)], scale

    def _keeps_if_sound(self, row: Example) -> bool:
        with suppress(Exception):  # raised where the row is read for training
            return self.keeps(row.data)
        return False

    def keeps(self, row: Any) -> bool:
        """Return whether a row belongs to this part: a mapping, or a bare list of ids."""
        if not isinstance(row, Mapping):
            row = {"": row}
        parts: list[bytes] = []
        previous, content = None, b""
        for column in sorted(row, key=str):
            value = column_of(row, column)
            if value is not previous:  # labels are often the tokens themselves
                previous, content = value, _content_of(value)
            parts += f"{column!r} {len(content)} ".encode(), content
        digest_of_row = hashlib.blake2b(b"".join(parts), digest_size=8).digest()
        held_out = int.from_bytes(digest_of_row, "big") < self.fraction * 2**64
        return held_out == (self.part == "validation")


def _content_of(value: Any) -> bytes:
    """Return a value as bytes that are equal for equal lists, arrays and tensors.

    Token ids are most of a row, and are hashed as numbers: to write them out in digits took ten times as long. That
    those 2^32 apart are hashed alike only puts their rows in one part.
    """
    if hasattr(value, "__array__") or (isinstance(value, list | tuple) and set(map(type, value)) == {int}):
        with suppress(TypeError):  # numpy has no bfloat16
            ids = np.asarray(value)
            if ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size:
                return b"ids " + ids.astype("<i4", copy=False).tobytes()
    return b"plain " + repr(plain(value)).encode()


class _Kept(Reader):
    """Reads the rows of one part, and passes over the others. A row whose content cannot be hashed is a bad record."""

    def __init__(self, reader: Reader, part: Holdout) -> None:
        self.reader = reader
        self.part = part
        # Of a row that could not be judged, though it may be another time.
        self.unjudged: Cursor | None = None

    @property
    def cursor(self) -> Cursor:
        return self.reader.cursor if self.unjudged is None else self.unjudged

    @override
    def __next__(self) -> Row:
        while True:
            before = self.reader.cursor
            row = next(self.reader)
            try:
                if self.part.keeps(row.data):
                    return row
            except OSError:  # of a value that is read late; the record is not to blame
                self.unjudged = before
                raise
            except Exception as error:
                reason = f"its content, by which rows are held out, cannot be hashed: {type(error).__name__}: {error}"
                raise BadRecord(reason, row_id=row.row_id, locate=self.part.locate) from error

    @override
    def prepare(self) -> None:
        self.reader.prepare()

    @override
    def lacks(self, until: Cursor) -> bool:
        return self.reader.lacks(until)


def hold_out(source: Source, *, fraction: float | Mapping[str, float]) -> tuple[Source, Source]:
    """Split a source with `Holdout`, and return (training part, held-out part).

    Of a mixture, a fraction of each source is held out: the same one, or those given by the sources' names. Of a source
    that is not named, or with 0, nothing is. The held-out mixture has the same weights, and ends when the first of its
    sources does, so that no row is evaluated twice.

    Raises:
        ValueError: for a fraction that cannot be, or of a source that is not there; if nothing is held out.
    """
    names = source.names or [""]
    fractions = fraction if isinstance(fraction, Mapping) else dict.fromkeys(names, fraction)
    if unknown := sorted(set(fractions) - set(names)):
        raise ValueError(
            f"a fraction is held out of {unknown[0]!r}, and the sources are {', '.join(names) or 'no mixture'}; name "
            "those that are there, or give one number for all"
        )
    if not any(fractions.values()):
        raise ValueError("nothing is held out of any source; give one at least a fraction above 0")
    if not isinstance(source, Mix):
        train, held_out = (Holdout(source, fraction=fractions[""], part=part) for part in PARTS)
        return train, held_out
    training, validation = list(source.entries), []
    for i, entry in enumerate(source.entries):
        if own := fractions.get(entry.name):
            training[i], held = (
                replace(entry, source=Holdout(entry.source, fraction=own, part=part)) for part in PARTS
            )
            validation.append(held)
    return Mix(training, stop=source.stop), Mix(validation, stop="first_exhausted")
