"""Whether a trainer's model keeps the samples of a pack apart, asked before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streampack.attention import Inputs
from streampack.attention.probe import find_leaks
from streampack.attention.probe_pack import probe_length
from streampack.distributed.rank_sync import RankSync

if TYPE_CHECKING:
    from transformers import Trainer


def verify_isolation(
    trainer: Trainer, inputs: Inputs, *, max_seq_len: int, rank_sync: RankSync | None
) -> None:
    """Stop the training if samples of a pack see one another in the model as it trains: wrapped, sharded, compiled.

    A collective: every rank calls it, and without a ``rank_sync`` a rank that fails does not tell the others. See
    `find_leaks`.

    Raises:
        ValueError: with the report; on the other ranks a RuntimeError that says which rank's it is.
    """

    def look() -> None:
        model = trainer.model_wrapped
        with trainer.accelerator.autocast():  # the probe allows for the rounding of 16 bits
            report = find_leaks(model, inputs=inputs, max_seq_len=probe_length(model, most=max_seq_len))
        if not report.ok:
            raise ValueError(
                f"{report}\nthe training was stopped before its first step; "
                "prepare_trainer_for_packing(..., verify_isolation=False) lets it train like this"
            )

    if rank_sync is None:
        look()
    else:
        rank_sync.share(look, doing="looking whether samples see one another")
