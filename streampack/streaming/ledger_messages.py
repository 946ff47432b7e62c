"""Messages about what a ledger counts: rows that are all dropped, samples that train nothing."""

from __future__ import annotations

import logging

from streampack.accounting import Ledger

log = logging.getLogger(__name__)

WORDS = {
    "overlong": "longer than a pack",
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
    counts = [(ledger.dropped_samples[reason], words) for reason, words in WORDS.items()]
    reasons = "; ".join(f"{count:,} {words}" for count, words in counts if count)
    if not (rows := ledger.samples + ledger.dropped_samples["bad"]):
        return ValueError("the source has no rows at all; check what it reads")
    return ValueError(
        f"no row makes a pack: all {rows:,} that were read are dropped ({reasons}); check what the source reads, and "
        "the encoder, max_seq_len and the settings that drop rows"
    )


class UntrainedWarning:
    """Warn once when the ledger first counts an untrained sample, if that is ``wanted``.

    The process that consumes the packs uses it: each worker process would warn of its own first one.
    """

    def __init__(self, *, wanted: bool, max_seq_len: int) -> None:
        self.wanted, self.max_seq_len = wanted, max_seq_len

    def look_at(self, ledger: Ledger) -> None:
        """Say how many samples train nothing, the first time that a ledger counts any."""
        if self.wanted and ledger.untrained:
            self.wanted = False
            log.warning(
                "%d of the first %d samples train nothing: no label is trained but perhaps the first, which never "
                "counts. Of messages only the assistant's are trained, and truncation to max_seq_len=%d (%d samples so "
                "far) may cut answers off. Set untrained='drop' to leave them out, 'error' to see where one is, or "
                "'keep' if they are meant to be there",
                ledger.untrained, ledger.samples, self.max_seq_len, ledger.dropped_samples["truncated"],
            )  # fmt: skip
