"""Check before training that a model isolates the samples of a pack."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtune import training

from streampack.attention import Inputs
from streampack.attention.prepare import prepare_model_for_packing
from streampack.attention.probe import find_leaks, probe_length
from streampack.attention.report import LeakReport
from streampack.instantiate import build
from streampack.training.config import read_config
from streampack.training.devices import pick_device
from streampack.training.world import World


def verify_isolation(
    model: nn.Module, inputs: Inputs, *, max_seq_len: int, world: World, groups: bool = False
) -> LeakReport:
    """Collective: raise on all ranks if samples of a pack attend to one another in this model.

    Makes 12 passes of one pack of 256 tokens, or of a longer pack if the model has a window. Model and random
    generators are afterwards as before. See `find_leaks`, also for ``groups``.

    Raises:
        ValueError: if they do, with the report.
    """
    with world.raise_on_all():
        length = probe_length(model, max_length=max_seq_len)
        report = find_leaks(model, inputs=inputs, max_seq_len=length, groups=groups)
        if not report.ok:
            raise ValueError(
                f"{report}\nthe run was stopped before its first step; verify_isolation=False lets it train like this"
            )
    return report


def probe_config(raw: Any) -> LeakReport:
    """Run `find_leaks` on the model of a config, with random weights; reads no weights and no data.

    Raises:
        ValueError: for a config with a mistake in it, or a model that cannot be packed.
    """
    cfg = read_config(raw)
    device = pick_device(cfg.device)
    dtype = training.get_dtype(cfg.dtype, device=device)
    with training.set_default_dtype(dtype), device, torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model: nn.Module = build(cfg.model)
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    return find_leaks(
        model, inputs=inputs, max_seq_len=probe_length(model, max_length=cfg.data["max_seq_len"])
    )
