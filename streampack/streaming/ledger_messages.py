"""Messages about what a ledger counts: rows that are all dropped, samples that train nothing."""

from __future__ import annotations

import logging

from streampack.accounting import Ledger
from streampack.streaming.lane_config import LaneConfig

log = logging.getLogger(__name__)

FIRST_ROWS = 1000
"""If all of the first so many rows of a lane are dropped, a warning says so before the rest is read."""
GIANT = 64
"""Packs. Of the first sample of a lane that fills more, a warning says that it takes the lane over."""
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
        left_out = f"; {_reasons(ledger)}" if ledger.bad_shards else ""
        return ValueError(f"the source has no rows at all{left_out}; check what it reads")
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


def warn_of_giant(lane: int, place: str, *, tokens: int, packs: int, mixed: bool) -> None:
    """Log that a sample fills this many packs of a lane."""
    log.warning(
        "%s has %s tokens: lane %d gives nothing else for about %d packs%s; set max_document_tokens to leave such "
        "samples out, or shorten them before",
        place, f"{tokens:,}", lane, packs,
        ", and until it has caught up the mixture's fractions are not those that were asked for" if mixed else "",
    )  # fmt: skip


def _rows(ledger: Ledger) -> int:
    return ledger.samples + ledger.dropped_samples["bad"]


def _reasons(ledger: Ledger) -> str:
    counts = [(ledger.dropped_samples[reason], words) for reason, words in WORDS.items()]
    counts.append((ledger.bad_shards, "bad shards left out"))
    return "; ".join(f"{count:,} {words}" for count, words in counts if count)


class UntrainedWarning:
    """Warn once when the ledger first counts an untrained sample, unless a setting says what becomes of those.

    The process that consumes the packs uses it: each worker process would warn of its own first one.
    """

    def __init__(self, config: LaneConfig) -> None:
        self.max_seq_len = config.packing.max_seq_len
        self.wanted = config.untrained is None

    def look_at(self, ledger: Ledger) -> None:
        """Warn if a ledger counts untrained samples, the first time."""
        if self.wanted and ledger.untrained:
            self.wanted = False
            warn_of_untrained(ledger, max_seq_len=self.max_seq_len)


def warn_of_untrained(ledger: Ledger, *, max_seq_len: int) -> None:
    """Log how many samples a ledger counts that train nothing, if it counts any."""
    if not ledger.untrained:
        return
    truncated = ledger.dropped_samples["truncated"]
    log.warning(
        "%d of the first %d samples train nothing: no label is trained but perhaps the first, which never counts, and "
        "of messages only the assistant's are%s. "
        "The ledger goes on counting them as untrained. Set untrained='drop' to leave them out, 'error' to see where "
        "one is, or 'keep' if they are meant to be there",
        ledger.untrained,
        ledger.samples,
        f" ({truncated} were truncated to max_seq_len={max_seq_len}, which may have cut answers off)"
        if truncated
        else "",
    )
