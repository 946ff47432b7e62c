"""Identities of corpora and runs: what distinguishes them, and the first difference between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from streampack.sources.source import Source


class Compared(Protocol):
    """A part of an identity that is compared by content, and describes how it differs."""

    def state(self) -> Any:
        """Return the plain values that a checkpoint keeps, some kilobytes at most."""

    def listed(self) -> Any:
        """Return as much of `state` as is known before a run without reading files."""

    def difference(self, theirs: Any) -> str | None:
        """Describe what differs from another's `state`; return None if nothing does.

        ``theirs`` comes from a checkpoint, so it may be of any type.
        """


def identity_of(source: Source) -> dict[str, Any]:
    """Return what distinguishes a source from others, by name: plain values, mappings of them, and `Compared`.

    A user's class may inherit from one of our sources and override only ``fingerprint``. The inherited ``identity``
    then describes another corpus, so the identity is made of the fingerprint instead.
    """
    if _definer(source, "identity") is _definer(source, "fingerprint"):
        return source.identity()
    return Source.identity(source)


def state_of(value: Any, *, listed: bool = False) -> Any:
    """Return an identity as plain values.

    With ``listed``, values that must be read from files are left out.

    >>> state_of({"rows": 3, "of": {"source": "MapSource"}})
    {'rows': 3, 'of': {'source': 'MapSource'}}
    """
    if isinstance(value, Mapping):
        return {name: state_of(item, listed=listed) for name, item in value.items()}
    if hasattr(value, "difference"):
        compared: Compared = value
        return compared.listed() if listed else compared.state()
    return value


def difference(theirs: Any, ours: Any) -> str | None:
    """Describe the first difference of ``ours`` from the state of another identity; None if there is none.

    >>> difference({"seed": 0}, {"seed": 1})
    'with seed=0 and this dataset has seed=1'
    """
    found = first_difference(theirs, ours)
    if found is None:
        return None
    name, before, now = found
    if hasattr(now, "difference"):
        return f"with another {name.partition('.')[0]}: {now.difference(before)}"
    return f"with {name}={before!r} and this dataset has {name}={now!r}"


def first_difference(theirs: Any, ours: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted name of the first part that differs, and both its values; None if none does.

    >>> first_difference({"corpus": {"rows": 3}}, {"corpus": {"rows": 4}})
    ('corpus.rows', 3, 4)
    """
    if isinstance(ours, Mapping):
        known = theirs if isinstance(theirs, Mapping) else {}
        for key, value in ours.items():
            found = first_difference(known.get(key), value, f"{name}.{key}" if name else str(key))
            if found is not None:
                return found
        return None
    if hasattr(ours, "difference"):
        return None if ours.difference(theirs) is None else (name, theirs, ours)
    return None if type(theirs) is type(ours) and theirs == ours else (name, theirs, ours)


def _definer(source: Source, method: str) -> type | None:
    return next((kind for kind in type(source).__mro__ if method in vars(kind)), None)
