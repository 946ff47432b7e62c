"""Write the weights of a model: of a run that has ended, or of a checkpoint of one that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import training

from streampack.instantiate import build
from streampack.training.checkpoint import STEP_NAME, load_weights
from streampack.training.config import RunConfig, read_config
from streampack.training.lora import adapter_config, save_adapters, split_and_merge
from streampack.training.model import build_model, full_weights, has_adapters, seed_step
from streampack.training.run_folder import weights_folders
from streampack.training.weights import save_weights
from streampack.training.world import World


def write_weights(
    weights: dict[str, torch.Tensor],
    *,
    model: nn.Module,
    checkpointer: Any,
    config: RunConfig,
    adapters_only: bool,
) -> dict[str, Path]:
    """Write a model's weights in its own format, and its adapters beside them; return the folders by what they hold.

    Args:
        weights: all weights, under torchtune's names; consumed.
        model: the model that they are of.
        checkpointer: torchtune's, which loaded the base.
        config: the run's.
        adapters_only: the model has adapters; they are written, and merged into the base.
    """
    saved = {}
    if adapters_only:
        weights, adapters = split_and_merge(weights, config=adapter_config(model))
        saved["adapters"] = save_adapters(checkpointer, adapters, model=model, output_dir=config.output_dir)
    if not config.save_adapter_weights_only:
        saved["weights"] = save_weights(checkpointer, weights, cfg=config)
    return saved


def export(checkpoint: Path, *, config: Any, out: Path) -> dict[str, Path]:
    """Write the weights of a running checkpoint as a recipe writes its final ones; return the folders.

    The run may go on meanwhile: nothing in its folder is changed. The model is built on the CPU.

    Args:
        checkpoint: a directory ``step_00000100`` in ``checkpoints`` of the run's ``output_dir``.
        config: the run's, OmegaConf's or a plain mapping.
        out: the folder to write to, which takes the place of ``output_dir``.

    Raises:
        ValueError: if there is no such checkpoint, or ``out`` holds weights.
        CheckpointError: if it cannot be read, or is of another model.
    """
    if not STEP_NAME.fullmatch(checkpoint.name) or not checkpoint.is_dir():
        found = sorted(path.name for path in checkpoint.glob("**/step_*") if STEP_NAME.fullmatch(path.name))
        raise ValueError(
            f"{checkpoint} is no checkpoint; name a directory such as OUTPUT_DIR/checkpoints/step_00000100"
            + (f" (below it: {', '.join(found)})" if found else "")
        )
    cfg = read_config(config)
    if out.resolve() in (
        Path(folder).resolve() for folder in (cfg.output_dir, cfg.checkpointer["output_dir"])
    ):
        raise ValueError(f"{out} is where the run itself writes its weights; choose another folder")
    cfg.output_dir = cfg.checkpointer["output_dir"] = str(out)
    if held := weights_folders(cfg):
        raise ValueError(f"{' and '.join(held)} holds weights; choose another folder, or remove them")
    seed_step(cfg.seed, 0)  # as a recipe does, for a base of random weights
    device = torch.device("cpu")
    checkpointer = build(cfg.checkpointer)
    base = checkpointer.load_checkpoint()[training.MODEL_KEY]
    adapters_only = has_adapters(cfg)
    model = build_model(cfg, weights=base, device=device, world=World(), adapters_only=adapters_only)
    load_weights(checkpoint, model)
    weights = full_weights(model, device=device, world=World())
    return write_weights(
        weights, model=model, checkpointer=checkpointer, config=cfg, adapters_only=adapters_only
    )
