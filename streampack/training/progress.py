"""What a run tells while it goes: metrics of a step, a progress bar, a closing summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from streampack.collate import Batch
from streampack.metrics import Ledger


@dataclass
class StepMeter:
    """Counts over the batches of one optimizer step."""

    loss: torch.Tensor | float = 0.0  # summed over the trained tokens; stays on the device until it is read
    trained: int = 0  # tokens that the loss counts
    tokens: int = 0  # real tokens
    slots: int = 0  # tokens and padding
    samples: int = 0  # sequences
    started: float = field(default_factory=time.perf_counter)

    def add(self, batch: Batch, loss: torch.Tensor, trained: int) -> None:
        """Count one batch and its summed loss."""
        self.loss = self.loss + loss.detach()
        self.trained += trained
        self.tokens += batch.num_tokens
        self.slots += batch.tokens.numel()
        self.samples += batch.num_seqs

    def metrics(self) -> dict[str, float]:
        """For the metric logger. ``loss`` is per trained token, ``padding`` a share of 1."""
        seconds = time.perf_counter() - self.started
        return {
            "loss": float(self.loss) / max(1, self.trained),
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / max(1, self.slots),
            "samples_per_step": self.samples,
            "trained_tokens": self.trained,
        }


def summary(ledger: Ledger, *, seconds: float, tokens: int, validation: list[tuple[int, float]]) -> str:
    """The closing lines of a run: what was packed, where every token went, how fast it was."""
    dropped = sum(ledger.dropped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in ledger.dropped.items() if count)
    lines = [
        f"packs        {ledger.packs:,} from {ledger.samples:,} samples, {ledger.padding:.2%} padding",
        f"tokens       {ledger.tokens_in:,} in = {ledger.packed:,} packed + {dropped:,} dropped"
        f"{f' ({reasons})' if reasons else ''} + {ledger.buffered:,} buffered",
        f"speed        {tokens / max(seconds, 1e-9):,.0f} tokens/s over {seconds:,.0f} s",
    ]
    if validation:
        (first_step, first), (last_step, last) = validation[0], validation[-1]
        lines.append(f"held-out     loss {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")
    return "\n".join(lines)


def bar(total: int, *, done: int, enabled: bool = True) -> Any:
    """A tqdm bar over optimizer steps."""
    from tqdm import tqdm

    return tqdm(total=total, initial=done, disable=not enabled, dynamic_ncols=True, unit="step")
