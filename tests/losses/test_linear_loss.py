"""Losses from hidden states and the output layer, of which the logits of only some tokens are in memory at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_recipes import full_finetune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from streampack.losses import loss_terms
from streampack.losses.cross_entropy import branch_terms
from streampack.training.conditions import LINEAR_LOSS
from streampack.training.progress import read_metrics
from tests.harness.processes import run_ranks
from tests.harness.tiny import tiny_config


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
def test_losses_and_gradients_are_those_of_all_logits(chunk_size: int) -> None:
    """With weights, with the squares of the z-loss, and with targets that a token predicts besides."""
    generator = torch.Generator().manual_seed(0)
    double: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    hidden, weight = torch.randn(2, 9, 5, **double), torch.randn(13, 5, **double)
    labels = torch.randint(0, 13, (2, 9), generator=generator).masked_fill(
        torch.rand(2, 9, **double) < 0.3, -100
    )
    branches = torch.tensor([[3, 3], [0, 7]]), torch.tensor([[4, -100], [1, 2]])
    scale = [torch.randn(2, size, **double) for size in (9, 9, 2)]
    found = []
    for lazy in (True, False):
        given, output = (x.clone().requires_grad_() for x in (hidden, weight))
        logits = given if lazy else given @ output.T
        terms = branch_terms(
            logits, labels, weights=torch.rand(2, 9, generator=torch.Generator().manual_seed(1)),
            branches=branches, chunk_size=chunk_size, output=(lambda x, w=output: x @ w.T) if lazy else None,
        )  # fmt: skip
        sum((term * by).sum() for term, by in zip(terms, scale, strict=True)).backward()  # type: ignore[union-attr]
        found.append([*terms, given.grad, output.grad])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that exist at once, of those that are made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._kept: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if (key := storage._cdata) not in self._kept:
                    size = storage.nbytes()
                    self.now += size
                    self._kept[key] = weakref.ref(storage, lambda _, k=key, n=size: self._free(k, n))
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        del self._kept[key]


def peak(*, lazy: bool, trains: bool, tokens: int = 8192, vocab: int = 128_256, dim: int = 2048) -> int:
    """Return the peak bytes of a loss and its gradients in bf16; ``trains``: those of the output layer too."""
    options: Any = {"device": "meta", "dtype": torch.bfloat16}
    hidden = torch.empty(1, tokens, dim, requires_grad=True, **options)
    weight = torch.empty(vocab, dim, requires_grad=trains, **options)
    labels = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with Peak() as counter:
        if lazy:
            losses, _ = loss_terms(hidden, labels, output=lambda x: x @ weight.T)
        else:
            losses, _ = loss_terms(hidden @ weight.T, labels)
        losses.sum().backward()
    return counter.most


def test_the_peak_of_a_long_pack() -> None:
    """8,192 tokens of a vocabulary of 128,256: the logits alone are 2.1 GB, and so is their gradient."""
    with Peak() as counter:
        first = torch.empty(1000, device="meta")
        second = first + 1
        del first
        third = second.view(10, 100) * 2
    assert (counter.most, counter.now, third.shape) == (8000, 8000, (10, 100))
    for trains, ratio in ((True, 0.42), (False, 0.22)):
        ours, all_logits = (peak(lazy=lazy, trains=trains) for lazy in (True, False))
        assert all_logits > 2 * 8192 * 128_256 * 2
        assert ours < ratio * all_logits


def losses_of(folder: Path, changes: dict[str, Any]) -> dict[int, float]:
    settings = {"dtype": "fp32", "seed": 5, "max_steps": 4, "log_every_n_steps": 1, "z_loss": 1e-3}
    full_finetune.train(tiny_config(folder, **settings | changes))
    logged = read_metrics(folder / "out" / "metrics.jsonl").items()
    return {step: found["loss"] for step, found in logged if "loss" in found}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_config_names_the_loss(ranks: int, tmp_path: Path) -> None:
    """By torchtune's name for it; the model may be sharded, and evaluations keep the logits."""
    found = []
    for number, loss in enumerate((None, {"_component_": LINEAR_LOSS})):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(run_ranks(losses_of, ranks, folder, {"loss": loss})[0])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)
