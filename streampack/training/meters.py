"""Metrics of a run: losses and counts of its steps and of a mixture's sources, the stream's ledger, peak memory."""

from __future__ import annotations

import time

import torch

from streampack.accounting import Ledger, SourceStats
from streampack.loader.data_loader import PackedDataLoader
from streampack.losses.sequences import by_sequence, fragment_lens
from streampack.packing.batch import Batch
from streampack.training.world import World

COUNTS = ("loss", "z_loss", "weight", "trained", "tokens", "capacity", "samples")
"""The counts that a `CountMeter` adds up, in this order; ``capacity`` is the tokens that fit, padding included."""


class CountMeter:
    """Adds up counts over the batches of a step and over all ranks, and measures throughput.

    A step is measured by `start`, `add` for each batch, `reduce` and `stop`. Sums stay on the device until `metrics`.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device
        self.window = self._zeros()  # sums over all ranks since the last call of `metrics`
        self.total = self._zeros()  # sums over all ranks since the beginning
        self.steps, self.seconds = 0, 0.0  # steps, and their time, since the last call of `metrics`
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.started_at = time.perf_counter()
        self.sums = self._zeros()  # of this rank
        self.counts = [0] * 3

    def add(
        self,
        batch: Batch,
        loss: torch.Tensor,
        weights: torch.Tensor,
        *,
        z_loss: torch.Tensor | None = None,
        trained: int | None = None,
    ) -> None:
        """Count one batch of this rank. The arguments are those of `streampack.training.run.Step.add`."""
        found = (
            loss,
            torch.zeros_like(loss) if z_loss is None else z_loss,
            weights.sum(dtype=torch.float64),
            weights.count_nonzero()
            if trained is None
            else torch.full_like(loss, trained, dtype=torch.float64),
        )
        self.sums[: len(found)] += torch.stack([each.detach().double() for each in found])
        counts = (batch.num_tokens, batch.tokens.numel(), batch.num_samples)
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def reduce(self) -> torch.Tensor:
        """Collective: add up the counts of the step over all ranks, and return the factor of its gradients.

        They are of summed losses, and FSDP has averaged them over the data ranks: the factor is their number / weight
        of all labels, or 0 for a step that trains nothing.
        """
        counts = torch.tensor(self.counts, dtype=torch.float64)
        sums = self.sums
        sums[-len(counts) :] = counts.to(self.device, non_blocking=True)
        self.world.all_reduce(sums)
        weight = sums[COUNTS.index("weight")]
        self.step = sums
        self.window += sums
        self.total += sums
        return torch.where(weight > 0, self.world.data_size / weight, 0.0)

    def stop(self) -> None:
        """End the step."""
        self.steps += 1
        self.seconds += time.perf_counter() - self.started_at

    def count(self, name: str) -> int:
        """Return one of the `COUNTS` of all ranks since the beginning."""
        return int(self.total[COUNTS.index(name)])

    def metrics(self) -> dict[str, float]:
        """Return the loss of the last step, and means over the steps since the last call.

        ``loss`` is a mean over trained tokens (over samples, with sample weights). It does not include ``z_loss``,
        which is in the result only where it is used. ``padding`` is a fraction between 0 and 1.
        """
        before = time.perf_counter()
        loss, z_loss, weight = self.step[:3].tolist()  # waits for the GPU
        sums = dict(zip(COUNTS, self.window.tolist(), strict=True))
        seconds = self.seconds + time.perf_counter() - before
        metrics = {
            "loss": loss / weight if weight else 0.0,
            "tokens_per_second": sums["tokens"] / max(seconds, 1e-9),
            "padding": 1 - sums["tokens"] / max(1, sums["capacity"]),
            "samples_per_step": sums["samples"] / max(1, self.steps),
            "trained_tokens": sums["trained"] / max(1, self.steps),
        }
        if z_loss:
            metrics["z_loss"] = z_loss / weight
        self.window, self.steps, self.seconds = self._zeros(), 0, 0.0
        return metrics

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(len(COUNTS), dtype=torch.float64, device=self.device)


class SourceMeter:
    """Adds up losses and tokens by source of a mixture, over all ranks. Without a mixture it does nothing."""

    def __init__(self, loader: PackedDataLoader, world: World, device: torch.device) -> None:
        self.loader = loader
        self.mix = loader.dataset.mix
        self.world = world
        self.device = device
        self._reset()

    def _reset(self) -> None:
        names = self.mix.names if self.mix is not None else []
        # Losses and weights; the last column is that of places without a sequence.
        self.sums = torch.zeros(2, len(names) + 1, dtype=torch.float64, device=self.device)

    def add(self, batch: Batch, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Count one batch of this rank: its `token_losses`, and the weights of its labels."""
        if self.mix is None:
            return
        found = torch.stack(sums_by_sequence(batch, losses, weights))  # [2, batch, sequences]
        sources = torch.full(found.shape[1:], len(self.mix.names))
        for row, fragments in zip(sources, batch.fragments, strict=True):
            row[: len(fragments)] = torch.tensor([self.mix.source_index(each.row_id) for each in fragments])
        sources = sources.flatten().to(self.device, non_blocking=True)
        self.sums.index_add_(1, sources, found.flatten(1))

    def metrics(self) -> dict[str, float]:
        """Collective: return the metrics of every source, named ``source_<name>_<metric>``.

        ``loss`` covers the time since the last call, and is missing if no token was trained in it. The others cover all
        lanes since the beginning: ``epochs`` (passes begun, mean of the lanes), ``tokens_in``, ``packed``, ``trained``,
        and ``fraction``, the source's fraction of the trained tokens.
        """
        if self.mix is None:
            return {}
        losses, weights = self.world.all_reduce(self.sums)[:, :-1].tolist()
        self._reset()
        ranks = self.world.gather_data(self.loader.source_stats())
        totals = {name: SourceStats.total(stats[name] for stats in ranks) for name in self.mix.names}
        whole = max(1, sum(stats.trained for stats in totals.values()))
        metrics: dict[str, float] = {}
        for (name, stats), loss, weight in zip(totals.items(), losses, weights, strict=True):
            if weight:
                metrics[f"source_{name}_loss"] = loss / weight
            metrics[f"source_{name}_epochs"] = stats.epochs
            metrics[f"source_{name}_tokens_in"] = stats.tokens_in
            metrics[f"source_{name}_packed"] = stats.packed
            metrics[f"source_{name}_trained"] = stats.trained
            metrics[f"source_{name}_fraction"] = stats.trained / whole
        return metrics


def sums_by_sequence(batch: Batch, *values: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of values, each ``[batch, max_seq_len]``, over the tokens of each of a batch's sequences.

    They are ``[batch, most sequences]`` float64 on the device of the values; a pack with fewer ends with zeros.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [i] * 3, "labels": [i] * 3} for i in (7, 8)]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=7)))
    >>> sums_by_sequence(batch, batch.tokens)[0].tolist()
    [[21.0, 24.0]]
    """
    lengths, most = fragment_lens(batch), max(map(len, batch.fragments))
    found = (by_sequence(each.detach(), lengths.to(each.device, non_blocking=True)) for each in values)
    return [each[:, ::2][:, :most] for each in found]


def run_ledger(loader: PackedDataLoader, world: World) -> Ledger:
    """Collective: return the ledger of all ranks."""
    return Ledger.total(world.gather_data(loader.ledger()))


def stream_metrics(loader: PackedDataLoader, world: World) -> dict[str, float]:
    """Collective: return the ledger of all ranks, the lowest epoch, and the largest of `PackedDataLoader.metrics`."""
    ledgers, epochs, ranks = zip(
        *world.gather_data((loader.ledger(), loader.epoch, loader.metrics())), strict=True
    )
    found: dict[str, float] = {"epoch": min(epochs)}
    found |= {f"ledger_{name}": value for name, value in Ledger.total(ledgers).as_dict().items()}
    for name in sorted({name for metrics in ranks for name in metrics}):
        found[name] = max(metrics[name] for metrics in ranks if name in metrics)
    return found


def memory_metrics(world: World, device: torch.device) -> dict[str, float]:
    """Collective: return the peak GPU memory of each rank, in GiB; nothing on other devices."""
    if device.type != "cuda":
        return {}
    peaks = world.gather(torch.cuda.max_memory_allocated(device) / 2**30)
    return {f"peak_memory_gib_rank_{rank}": peak for rank, peak in enumerate(peaks)}
