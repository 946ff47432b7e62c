"""Work of packs: operations of the model, and how long ranks wait for the one whose packs cost most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.streaming.balance import hand_out_order

SIMULATED_WINDOWS = 4
"""So many windows of packs are handed out by each lane of the simulation, or an epoch if that is less."""


@dataclass(frozen=True)
class ModelWork:
    """Operations of a model, forward and backward: for each token, and for each pair of tokens of its attention.

    Embeddings, norms and what a frozen model spares are left out.

    >>> ModelWork(per_token=6e9, per_pair=1e5, parameters=10**9, name="a 1B").of(10, 2)
    60000200000.0
    """

    per_token: float
    per_pair: float
    parameters: int
    name: str

    def of(self, tokens: float, pairs: float) -> float:
        """Return the operations for so many tokens and pairs."""
        return self.per_token * tokens + self.per_pair * pairs


def model_work(node: Any) -> ModelWork:
    """Build a config's ``model`` without memory for its weights, and let torch count the operations of two lengths."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from streampack.instantiate import COMPONENT, build

    def forward(tokens: int) -> int:
        with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long))
        return int(counter.get_total_flops())

    with torch.device("meta"):
        model: torch.nn.Module = build(node)
    for module in model.modules():
        if callable(make := getattr(module, "rope_init", None)):  # torchtune's makes no tables without memory
            make()
            module.to("meta")
    short, long = forward(8), forward(16)
    # A forward takes a * tokens + b * tokens**2, in which all pairs are computed; the backward takes twice as much.
    per_pair = (long - 2 * short) / (16**2 - 2 * 8**2)
    parameters = sum(weight.numel() for weight in model.parameters())
    name = str(node[COMPONENT]).rpartition(".")[2]
    return ModelWork(3 * (short / 8 - 8 * per_pair), 3 * per_pair, parameters, name)


def slowest_over_mean(
    costs: npt.NDArray[np.float64],
    order_by: Sequence[int],
    *,
    ranks: int,
    lanes: int,
    packs_per_rank: int,
    epoch_packs: float,
    window: int,
    seed: int,
) -> float:
    """Return the cost of the slowest rank of a step over the mean of the ranks: a mean over steps.

    Each lane of the simulation has a stretch of the planned packs that begins at random, and hands it out as a run
    does: as planned, or by the attention cost within windows.

    >>> costs = np.array([1.0, 3.0] * 100)
    >>> sizes = {"ranks": 2, "lanes": 2, "packs_per_rank": 1, "epoch_packs": 200, "seed": 0}
    >>> slowest_over_mean(costs, [1, 3] * 100, window=4, **sizes)
    1.0

    Args:
        costs: of the planned packs, by which ranks are compared.
        order_by: their attention costs, by which windows are ordered.
        ranks: of the run.
        lanes: of the run.
        packs_per_rank: packs of a rank in a step.
        epoch_packs: of all lanes.
        window: the ``balance_window``; 0 hands packs out as they are planned.
        seed: of the stretches' beginnings.
    """
    lanes = max(ranks, lanes - lanes % ranks)
    size = max(1, min(round(epoch_packs / lanes), SIMULATED_WINDOWS * max(window, 64)))
    rng = np.random.default_rng(seed)
    handed = np.empty((lanes, size))
    for lane, begin in enumerate(rng.integers(0, len(costs), lanes).tolist()):
        stretch = [(begin + i) % len(costs) for i in range(size)]
        for start in range(0, size, window or size):
            packs = stretch[start : start + (window or size)]
            if window:
                ranked = hand_out_order(
                    [order_by[i] for i in packs], slot=0, window=window, key=(0, 0, start // window)
                )
                packs = [packs[i] for i in ranked]
            handed[lane, start : start + len(packs)] = costs[packs]
    # A rank's packs: the first of each of its lanes, then the second of each, and so on. [ranks, packs]
    own = np.stack([handed[rank::ranks].T.ravel() for rank in range(ranks)])
    steps = max(1, own.shape[1] // packs_per_rank)
    work = own[:, : steps * packs_per_rank].reshape(ranks, steps, -1).sum(2)  # [ranks, steps]
    return float((work.max(0) / work.mean(0)).mean())
