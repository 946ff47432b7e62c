"""Train low-rank adapters of a torchtune model on a streamed, packed corpus.

    tune run streampack_recipes/lora_finetune --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/lora_finetune --config my.yaml

LoRA, DoRA or, on a quantized base, QLoRA: as the torchtune builder in the config says. The base is frozen, and running
checkpoints hold the adapters only. The final weights go to two folders, because transformers applies an adapter that
is beside weights: ``adapter/`` holds the adapters, ``epoch_0/`` the base with the adapters merged in.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from omegaconf import DictConfig

from streampack.inspection.report_writer import ReportWriter
from streampack.losses import label_weights
from streampack.training.collated_rows import prepare_inputs
from streampack.training.entry import parse
from streampack.training.evaluation import evaluate
from streampack.training.model import activation_context, build_model
from streampack.training.model_loss import model_loss
from streampack.training.optimizer import build_optimizer
from streampack.training.run import Result, Run, open_run


@parse
def recipe_main(raw: DictConfig) -> None:
    """Train low-rank adapters of a torchtune model on a streamed, packed corpus."""
    train(raw)


def train(raw: Any, *, check: bool = False) -> Result:
    """Train as a config says and write the final weights. Every rank that torchrun started calls this.

    Args:
        raw: the config.
        check: stop before the first step, see `open_run`.
    """
    with open_run(raw, adapters=True, check=check) as run:
        return run.over or _train(run)


def _train(run: Run) -> Result:
    cfg, device, world = run.cfg, run.device, run.world

    # Model and optimizer. The order is torchtune's.
    weights = run.load_base()
    model = build_model(cfg, weights=weights, device=device, world=world)
    del weights
    inputs = prepare_inputs(model, cfg)
    optimizer = build_optimizer(cfg, model)
    activations = activation_context(cfg, model)

    # Data, the newest checkpoint, the schedule of the learning rate, logs.
    run.setup_data(model, inputs)
    run.restore(model, optimizer)
    run.setup_schedule()
    run.setup_logs(ReportWriter)
    losses_on = partial(evaluate, model, inputs=inputs, loss_norm=cfg.loss_norm, device=device, world=world)

    run.validate(losses_on)
    for step in run.steps():
        optimizer.zero_grad(set_to_none=True)
        for batch in step:
            batch = batch.to(device)
            label_weight = label_weights(batch, loss_norm=cfg.loss_norm)
            losses, _ = model_loss(
                model, inputs(batch), batch.labels, weights=label_weight, config=cfg, activations=activations
            )
            loss = losses.sum()
            step.add(batch, loss, losses, label_weight)
            loss.backward()
        step.scale_gradients()  # once, by the trained tokens of all ranks
        optimizer.step()
        run.end_step(step)
        run.validate(losses_on)
        run.save()
    return run.end(losses_on)


if __name__ == "__main__":
    sys.exit(recipe_main())
