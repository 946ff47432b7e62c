"""Train a torchtune model on preference pairs: DPO and its kin, of all weights or of adapters, streamed and packed.

    tune run streampack_recipes/dpo --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/dpo --config my.yaml

A row is a prompt, a chosen and a rejected answer (`streampack.AnswersEncoder`) in one pack; the prompt is computed
once for both. The loss is a component that compares pairs: torchtune's ``DPOLoss`` or ``RSOLoss``,
or `streampack.losses.PreferenceLoss`. The reference is the frozen base of a model with adapters; otherwise a second
model, from ``ref_checkpointer`` or the same weights; with ``reference: data``, numbers in the data. The other keys are
those of `full_finetune`: streamed data, resume, several devices (FSDP2) work as there.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from streampack.attention.prepare import prepare_model_for_packing
from streampack.inspection.report_writer import ReportWriter
from streampack.instantiate import build
from streampack.losses import pair_of
from streampack.training.entry import parse
from streampack.training.model import activation_context, build_model
from streampack.training.optimizer import build_optimizer
from streampack.training.preferences import Comparison, PairMeter, Reference, at_first_token, evaluate_pairs
from streampack.training.run import Result, Run, open_run


@parse
def recipe_main(raw: DictConfig) -> None:
    """Train a torchtune model on preference pairs: DPO and its kin."""
    train(raw)


def train(raw: Any, *, check: bool = False) -> Result:
    """Train as a config says and write the final weights. Every rank that torchrun started calls this.

    Args:
        raw: the config.
        check: stop before the first step, see `open_run`.
    """
    with open_run(raw, pairs=True, check=check) as run:
        return run.over or _train(run)


def _train(run: Run) -> Result:
    cfg, device, world = run.cfg, run.device, run.world

    # Policy, reference and optimizer. The order is torchtune's.
    weights = run.load_base()
    model = build_model(cfg, weights=weights, device=device, world=world)
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    loss = build(cfg.loss)
    reference = Reference(cfg, loss, model=model, inputs=inputs, weights=weights, device=device, world=world)
    del weights
    compare = Comparison(loss, model=model, inputs=inputs, reference=reference)
    optimizer = build_optimizer(cfg, model)
    activations = activation_context(cfg, model)

    # Data, the newest checkpoint, the schedule of the learning rate, logs.
    run.setup_data(model, inputs)
    run.restore(model, optimizer)
    run.setup_schedule()
    rewards = PairMeter(world, device)
    run.setup_logs(ReportWriter, metrics=rewards.metrics)
    losses_on = partial(evaluate_pairs, compare, device=device, world=world)

    run.validate(losses_on)
    for step in run.steps():
        optimizer.zero_grad(set_to_none=True)
        for batch in step:
            pairs = pair_of(batch)
            with activations:
                compared = compare(batch, pairs)
            loss_sum = compared.losses.sum()
            rewards.add(compared)
            # Meters count tokens; a pair is counted at the first token of its chosen answer.
            of_pairs = torch.stack([compared.losses.detach(), torch.ones_like(compared.losses)])
            losses, counts = at_first_token(of_pairs, batch, pairs[0])
            step.add(batch, loss_sum, losses, counts, trained=int(batch.num_trained))
            # An optimizer in the backward pass needs the gradients scaled before.
            scale = step.reduce() if cfg.optimizer_in_bwd else 1.0
            (loss_sum * scale).backward()
        if not cfg.optimizer_in_bwd:
            step.scale_gradients()  # once, by the pairs of all ranks
            optimizer.step()
        run.end_step(step)
        run.validate(losses_on)
        run.save()
    return run.end(losses_on)


if __name__ == "__main__":
    sys.exit(recipe_main())
