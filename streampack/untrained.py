"""Samples of which no token is trained: what to say of them."""

from __future__ import annotations

import logging

from streampack.lane_config import LaneConfig
from streampack.metrics import Ledger
from streampack.receipt import Receipt, untrained_samples
from streampack.types import ReceiptNumbers

log = logging.getLogger(__name__)


class UntrainedWarning:
    """Warn once when the ledger first counts such a sample, unless a setting says what becomes of it.

    For the process that consumes the packs: each of those that make them would have a first one.
    """

    def __init__(self, config: LaneConfig) -> None:
        self.max_seq_len = config.packing.max_seq_len
        self.wanted = config.untrained is None

    def look_at(self, receipt: ReceiptNumbers) -> None:
        """Look at what a pack's lane has read."""
        if self.wanted and untrained_samples(receipt):
            self.look_in(Receipt.from_numbers(receipt).ledger)

    def look_in(self, ledger: Ledger) -> None:
        """Look at the counts of one lane, or of several."""
        if self.wanted and ledger.untrained:
            self.wanted = False
            warn_of_untrained(ledger, max_seq_len=self.max_seq_len)


def warn_of_untrained(ledger: Ledger, *, max_seq_len: int) -> None:
    """Log how many samples a ledger counts that train nothing, if it counts any."""
    if not ledger.untrained:
        return
    truncated = ledger.dropped_samples["truncated"]
    log.warning(
        "%d of the first %d samples train nothing: no label is trained but perhaps the first, which never counts%s. "
        "The ledger goes on counting them as untrained. Set untrained='drop' to leave them out, 'error' to see where "
        "one is, or 'keep' if they are meant to be there",
        ledger.untrained,
        ledger.samples,
        f" ({truncated} were truncated to max_seq_len={max_seq_len}, which may have cut answers off)"
        if truncated
        else "",
    )
