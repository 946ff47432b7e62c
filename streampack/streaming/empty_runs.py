"""Messages about runs whose rows make no pack."""

from __future__ import annotations

import logging

from streampack.accounting import Ledger

log = logging.getLogger(__name__)

FIRST_ROWS = 1000  # of a lane: where all of them are dropped, that is said before the rest is read
WORDS = {
    "overlong": "longer than a pack",
    "empty": "without a token",
    "untrained": "without a trained token",
    "bad": "broken, and skipped",
}


def nothing_to_pack(ledger: Ledger) -> ValueError:
    """Make the error for a run without a pack.

    >>> nothing = Ledger()
    >>> nothing.drop("bad", 0)
    >>> print(nothing_to_pack(nothing))  # doctest: +ELLIPSIS
    no row makes a pack: all 1 that were read are dropped (1 broken, and skipped); check what the source reads, and ...
    """
    if not (rows := _rows(ledger)):
        return ValueError("the source has no rows at all; check what it reads")
    return ValueError(
        f"no row makes a pack: all {rows:,} that were read are dropped ({_reasons(ledger)}); check what the source "
        "reads, and the encoder, max_seq_len and the settings that drop rows"
    )


def warn_of_first_rows(lane: int, ledger: Ledger) -> None:
    """Log why all rows that a lane has read so far were dropped."""
    log.warning(
        "the first %s rows of lane %d are all dropped (%s), and the next are read; check what the source reads, and "
        "the encoder, max_seq_len and the settings that drop rows",
        f"{_rows(ledger):,}", lane, _reasons(ledger),
    )  # fmt: skip


def _rows(ledger: Ledger) -> int:
    return ledger.samples + ledger.dropped_samples["bad"]


def _reasons(ledger: Ledger) -> str:
    counts = ((ledger.dropped_samples[reason], words) for reason, words in WORDS.items())
    return "; ".join(f"{count:,} {words}" for count, words in counts if count)
