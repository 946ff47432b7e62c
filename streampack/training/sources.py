"""What the sources of a mixture give and cost, for the metric logger."""

from __future__ import annotations

import torch

from streampack.accounting import SourceStats
from streampack.distributed.world import World
from streampack.packing.batch import Batch
from streampack.sources.mixture import Mix
from streampack.training.methods import Loader


def source_ids(batch: Batch, mix: Mix) -> torch.Tensor:
    """The source of every token, its number in ``mix.names``: ``[batch, max_seq_len]`` int64. Padding is 0.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> a, b = ([{"tokens": [i] * 3, "labels": [i] * 3}] * 2 for i in (7, 8))
    >>> mix = Mix([{"name": name, "source": rows, "weight": 1} for name, rows in (("a", a), ("b", b))])
    >>> batch = collate_packed(list(IterablePackedDataset(mix, max_seq_len=7)))
    >>> batch.tokens[0].tolist(), source_ids(batch, mix)[0].tolist()
    ([8, 8, 8, 7, 7, 7, 0], [1, 1, 1, 0, 0, 0, 0])
    """
    ids = torch.zeros(batch.tokens.shape, dtype=torch.int64)
    for row, fragments in zip(ids, batch.fragments, strict=True):
        sources = torch.tensor(
            [mix.source_index(fragment.row_id) for fragment in fragments], dtype=torch.int64
        )
        lengths = torch.tensor([fragment.stop - fragment.start for fragment in fragments], dtype=torch.int64)
        row[: int(lengths.sum())] = sources.repeat_interleave(lengths)
    return ids


class SourceMeter:
    """Losses and tokens by source, over all ranks. Without a mixture, it counts nothing and says nothing.

    The losses stay on the device until `metrics` reads them.
    """

    def __init__(self, loader: Loader, world: World, device: torch.device) -> None:
        self.loader = loader
        self.mix = loader.dataset.mix
        self.world = world
        self.device = device
        self._start()

    def _start(self) -> None:
        names = self.mix.names if self.mix is not None else []
        self.loss = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        self.weight = torch.zeros(len(names), dtype=torch.float64)

    def add(self, batch: Batch, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Count one batch of this rank's: its `token_losses`, and its labels' weights (on the CPU)."""
        if self.mix is None:
            return
        ids = source_ids(batch, self.mix)
        self.weight.index_add_(0, ids.flatten(), weights.double().flatten())
        ids = ids.to(self.device, non_blocking=True)
        self.loss.index_add_(0, ids.flatten(), losses.detach().double().flatten())

    def metrics(self) -> dict[str, float]:
        """Of every source, the loss since the last report (if it trained any token), and so far, over all lanes:
        how often it was begun in a lane on average, its tokens, and its share of the trained ones. A collective.
        """
        if self.mix is None:
            return {}
        sums = torch.stack([self.loss, self.weight.to(self.device)])
        losses, weights = self.world.add_up(sums).tolist()
        self._start()
        ranks = self.world.gather(self.loader.source_stats())
        source_stats = {
            name: SourceStats.total(source_stats[name] for source_stats in ranks) for name in self.mix.names
        }
        trained = sum(stats.trained for stats in source_stats.values())
        metrics: dict[str, float] = {}
        for (name, stats), loss, weight in zip(source_stats.items(), losses, weights, strict=True):
            if weight:
                metrics[f"source_{name}_loss"] = loss / weight
            metrics[f"source_{name}_epochs"] = stats.epochs / (self.loader.dataset.num_lanes or 1)
            metrics[f"source_{name}_tokens_in"] = stats.tokens_in
            metrics[f"source_{name}_packed"] = stats.packed
            metrics[f"source_{name}_trained"] = stats.trained
            metrics[f"source_{name}_share"] = stats.trained / max(1, trained)
        return metrics
