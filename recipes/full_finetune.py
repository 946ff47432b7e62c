"""Train a torchtune model on a streamed, packed corpus: fine-tuning and pretraining, of all weights or of adapters.

    tune run streampack_recipes/full_finetune --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/full_finetune --config my.yaml

Runs on one device or on several, over which the model is sharded (FSDP2). The keys of the config are the fields of
`streampack.training.config.RunConfig`. For pretraining, the config sets ``data.split_across_pack`` (packs are always
full), a `Mix` of sources, ``z_loss``, ``document_masking``, and random weights to begin from. `lora_finetune` runs this
loop with ``adapters``.
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
from streampack.losses import label_weights, loss_terms
from streampack.training.data import join_documents
from streampack.training.entry import parse
from streampack.training.evaluation import evaluate
from streampack.training.run import Result, Run


@parse
def recipe_main(raw: DictConfig) -> None:
    """Train all weights of a torchtune model on a streamed, packed corpus."""
    train(raw)


def train(raw: Any, *, adapters: bool = False) -> Result:
    """Train as a config says and write the final weights. Every rank that torchrun started calls this.

    Args:
        raw: the config.
        adapters: train the adapters of a LoRA model; its base is frozen.
    """
    with Run.open(raw, report=ReportWriter, adapters=adapters) as run:
        return run.over or _train(run)


def _train(run: Run) -> Result:
    cfg, device = run.cfg, run.device
    model = run.build_model(run.read_weights())
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    optimizer = build(cfg.optimizer, [value for value in model.parameters() if value.requires_grad])
    losses_on = partial(
        evaluate, model, inputs=inputs, loss_norm=cfg.loss_norm, device=device, world=run.world
    )
    run.begin(model, inputs, optimizer, evaluate=losses_on)
    for step in run.steps():
        optimizer.zero_grad(set_to_none=True)
        for batch in step:
            batch = batch if cfg.document_masking else join_documents(batch)
            weights = label_weights(batch, loss_norm=cfg.loss_norm)
            batch = batch.to(device)
            logits = model(**inputs(batch))
            losses, z_terms = loss_terms(logits, batch.labels, weights=weights.to(device, non_blocking=True))
            del logits  # or they would stay through the backward pass
            loss = losses.sum()
            z_loss = cfg.z_loss * z_terms.sum() if cfg.z_loss else torch.zeros_like(loss)
            (loss + z_loss).backward()
            step.add(batch, loss, losses, weights, z_loss=z_loss)
        step.scale_gradients()  # once, by the trained tokens of all ranks
        optimizer.step()
    return run.end()


if __name__ == "__main__":
    sys.exit(recipe_main())
