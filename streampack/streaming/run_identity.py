"""The identity of a run: corpus, encoders and settings, which states and ranks are compared by."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from streampack.packing.encoders import TokensEncoder, qualified_name
from streampack.packing.groups import Group
from streampack.sources.corpus_identity import difference, identity_of, state_of
from streampack.sources.examples import EXAMPLES, UNKNOWN, Example, MarkedRows, differs_at, mark
from streampack.sources.source import Source
from streampack.streaming.lane_config import Encode, LaneConfig
from streampack.validation import warn_user

OF_READING = ("corpus", "shuffle_window", "seed")
"""Parts of an identity that decide which rows a lane reads, and in which order."""


class RunIdentity:
    """All that decides which tokens share a pack: corpus, encoders, settings. It is computed when first asked for."""

    def __init__(self, config: LaneConfig) -> None:
        self.config = config
        self._parts: dict[str, Any] | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The parts by name: plain values, mappings of them, and `Compared`."""
        if self._parts is None:
            self._parts = _parts_of(self.config)
        return self._parts

    def plain(self, *, listed: bool = False) -> dict[str, Any]:
        """Return the parts as plain values, as a state keeps them.

        Args:
            listed: leave out what would have to be read from all files; ranks compare the rest when a run begins.
        """
        found: dict[str, Any] = state_of(self.parts, listed=listed)
        return found

    def difference(
        self, theirs: Any, *, names: Collection[str] | None = None, changed: Collection[str] = ()
    ) -> str | None:
        """Say what differs first from the identity in a state, or from the parts of it that are named; None if equal.

        Args:
            theirs: the identity in the state.
            names: of the parts to compare; by default all.
            changed: the sources whose files changed, by their names in a mixture, otherwise an empty name. Of those
                neither files nor rows are compared, so of the encoder only what its ``fingerprint`` returns.
        """
        ours: Mapping[str, Any] = self.parts
        if changed and isinstance(theirs, Mapping):
            theirs, ours = without_files(theirs, changed), without_files(ours, changed)
        if names is not None:
            ours = {name: part for name, part in ours.items() if name in names}
        return difference(theirs, ours)

    def require(
        self, theirs: Any, *, names: Collection[str] | None = None, changed: Collection[str] = ()
    ) -> None:
        """Raise a ValueError that says what `difference` finds."""
        words = self.difference(theirs, names=names, changed=changed)
        if words is not None:
            raise ValueError(
                f"the state was made {words}; resume with what the run began with, or start a new run"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "_parts": None}  # each process computes it again


def _parts_of(config: LaneConfig) -> dict[str, Any]:
    """Return all that decides which tokens share a pack: plain values, mappings of them, and `Compared`."""
    packing, mix = config.packing, config.mix
    encoder: Any = Encoded.of(config.encode, config.source) if mix is None else {}
    if mix is not None:
        encoder = {
            entry.name: Encoded.of(entry.encoder or config.encode, entry.source) for entry in mix.entries
        }
    return {
        "corpus": identity_of(config.source),
        "encoder": encoder,
        "max_seq_len": packing.max_seq_len,
        "split_across_pack": bool(packing.split_across_pack),
        "strategy": None if packing.split_across_pack else packing.strategy,  # without effect there
        "buffer_size": packing.buffer_size,
        "overlong": packing.overlong,
        "truncate_side": packing.truncate_side,
        "max_seqs_per_pack": packing.max_seqs_per_pack,
        "pad_seqs_to": packing.pad_seqs_to,
        "truncate_eos": config.truncate_eos,
        "max_document_tokens": config.max_document_tokens,
        "empty": config.empty,
        "untrained": "drop" if config.untrained == "drop" else "keep",  # "error" drops nothing
        "shuffle_window": config.shuffle_window,
        "balance_cost": asdict(config.balance_cost),
        "seed": config.seed,
    }


@dataclass(frozen=True)
class Encoded:
    """Identity of an encoder: digests of what it makes of a few fixed rows of its source.

    The name is used in messages only: a function that was renamed is the same encoder, a closure over another value is
    not.

    Args:
        name: the name of the function or class.
        fingerprint: what the encoder's own ``fingerprint`` returns; None if it has none.
        samples: digests of the samples that it made.
    """

    name: str
    fingerprint: str | None
    samples: MarkedRows

    @classmethod
    def of(cls, encode: Encode, source: Source) -> Encoded:
        """Encode up to twelve rows of the source, twice; samples that differ are left out, with a warning."""
        own = getattr(encode, "fingerprint", None)
        fingerprint = None if own is None else str(own())
        name = name_of(encode)[:200]
        # If rows are tokens already, the encoder is known by its columns' names, which its fingerprint holds.
        rows = [] if type(encode) is TokensEncoder else source.examples(EXAMPLES)
        marks = [_mark(encode, row) for row in rows]
        again = [_mark(encode, row) for row in rows]
        varying = [i for i, pair in enumerate(zip(marks, again, strict=True)) if pair[0] != pair[1]]
        if varying:
            place = source.locate(rows[varying[0]].row_id)
            warn_user(
                f"the encoder {name} makes other tokens of the same row each time ({place}): a resumed run trains "
                "other tokens of the rows that waited; draw what is random from the row itself",
            )
        kept = tuple(UNKNOWN if i in varying else made for i, made in enumerate(marks))
        places = MarkedRows.of(rows, source.locate).places if rows else ()
        return cls(name, fingerprint, MarkedRows(kept, places))

    def state(self) -> dict[str, Any]:
        """Implement `Compared`."""
        return {"name": self.name, "fingerprint": self.fingerprint, "samples": self.samples.state()}

    def listed(self) -> dict[str, Any]:
        """Implement `Compared`."""
        return self.state()

    def unknown_rows(self) -> Encoded:
        """Return the identity without what it makes of the rows."""
        return replace(self, samples=MarkedRows((UNKNOWN,), ()))

    def difference(self, theirs: Any) -> str | None:
        """Implement `Compared`."""
        known = theirs if isinstance(theirs, Mapping) else {}
        name, fingerprint, samples = (known.get(key) for key in ("name", "fingerprint", "samples"))
        before = f"{name} made" if isinstance(name, str) and name != self.name else "it made then"
        if not isinstance(samples, str):
            return "nothing is known of it"
        number = differs_at(samples.split(" ") if samples else [], self.samples.marks)
        if number is not None and number < len(self.samples.places):
            return f"{self.name} makes other tokens of {self.samples.places[number]()} than {before}"
        if number is not None:
            return f"{self.name} is given other rows"
        if type(fingerprint) is not type(self.fingerprint) or fingerprint != self.fingerprint:
            return f"the fingerprint of {self.name} is {self.fingerprint!r} and was {fingerprint!r}"
        return None


OF_FILES = ("files", "hashed")
"""Entries of a source's identity that follow from its files."""


def without_files(parts: Mapping[str, Any], changed: Collection[str]) -> dict[str, Any]:
    """Return the parts of an identity, less what follows from the files of the sources that changed."""
    corpus, encoder = parts.get("corpus"), parts.get("encoder")
    if not isinstance(corpus, Mapping):
        return dict(parts)
    if "names" not in corpus:
        return {**parts, "corpus": _less_files(corpus), "encoder": _less_rows(encoder)}
    corpus = {
        key: value
        for key, value in corpus.items()
        if key != "names" and (not key.endswith("/") or key[:-1] not in changed)
    }
    encoders = {
        name: value
        for name, value in (encoder if isinstance(encoder, Mapping) else {}).items()
        if name not in changed
    }
    return {**parts, "corpus": corpus, "encoder": encoders}


def _less_files(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _less_files(value) if isinstance(value, Mapping) else value
        for key, value in identity.items()
        if key not in OF_FILES
    }


def _less_rows(encoder: Any) -> Any:
    return encoder.unknown_rows() if isinstance(encoder, Encoded) else encoder


def name_of(encode: Any) -> str:
    """Return an encoder's name, for messages.

    >>> name_of(functools.partial(name_of))
    'partial(streampack.streaming.run_identity.name_of)'
    """
    if isinstance(encode, functools.partial):
        return f"partial({name_of(encode.func)})"
    return qualified_name(encode)


def _mark(encode: Encode, row: Example) -> str:
    """Return a digest of the sample that an encoder makes of a copy of a row; encoders may change rows in place."""
    if row.data is None:
        return UNKNOWN
    try:
        made = encode(copy.deepcopy(row.data))
        if isinstance(made, Group):  # as a tuple, it is its tokens and labels only
            return mark((made, made.lengths, made.parents, made.fields, made.token_fields))
        return mark(made)
    except Exception:  # raised when the row is read for training
        return UNKNOWN
