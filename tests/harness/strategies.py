"""The ways to fill packs, one word each for test parameters, and the settings that a word stands for."""

from __future__ import annotations

from typing import Any

from tests.oracle import packing as oracle

WAYS = (*oracle.CHOOSE, "wrap")


def settings_of(way: str) -> dict[str, Any]:
    """Return the settings of a way: its strategy, or for ``wrap`` that samples continue in the next pack."""
    return {"split_across_pack": True} if way == "wrap" else {"strategy": way}
