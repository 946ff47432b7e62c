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

    A matrix takes 6 operations for each of its weights and each token, and attention 12 for each pair of tokens, layer
    and dimension of the heads. Embeddings, norms and what a frozen model spares are left out.

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
    """Build a config's ``model`` without memory for its weights, and count its operations.

    Raises:
        ValueError: for a model without the attention of torchtune's.
    """
    import torch
    from torch import nn
    from torchtune.modules import MultiHeadAttention, TiedLinear

    from streampack.instantiate import COMPONENT, build

    with torch.device("meta"):
        model: nn.Module = build(node)
    matrices = sum(
        weight.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
        if weight.ndim >= 2
    )
    if any(isinstance(value, TiedLinear) for module in model.modules() for value in vars(module).values()):
        matrices += sum(
            module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)
        )
    heads = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    if not heads:
        raise ValueError("the model has no attention of torchtune's, so its operations are not known")
    pairs = 12 * sum(each.num_heads * each.head_dim for each in heads)
    parameters = sum(weight.numel() for weight in model.parameters())
    return ModelWork(6.0 * matrices, float(pairs), parameters, str(node[COMPONENT]).rpartition(".")[2])


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
    begins = rng.integers(0, len(costs), lanes)
    handed = np.empty((lanes, size))
    for lane, begin in enumerate(begins.tolist()):
        stretch = [(begin + i) % len(costs) for i in range(size)]
        if window:
            stretch = _handed_out(stretch, order_by, window)
        handed[lane] = costs[stretch]
    # A rank's packs: the first of each of its lanes, then the second of each, and so on. [ranks, packs]
    own = np.stack([handed[rank::ranks].T.ravel() for rank in range(ranks)])
    steps = max(1, own.shape[1] // packs_per_rank)
    work = own[:, : steps * packs_per_rank].reshape(ranks, steps, -1).sum(2)  # [ranks, steps]
    return float((work.max(0) / work.mean(0)).mean())


def _handed_out(stretch: list[int], order_by: Sequence[int], window: int) -> list[int]:
    """Return the packs of a lane in the order in which windows hand them out."""
    found = []
    for number, start in enumerate(range(0, len(stretch), window)):
        packs = stretch[start : start + window]
        order = hand_out_order([order_by[i] for i in packs], slot=0, window=window, key=(0, 0, number))
        found += [packs[i] for i in order]
    return found
