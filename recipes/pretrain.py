"""Pretrain a torchtune model, or go on pretraining one, on a stream of documents. One file, one run, top to bottom.

    tune run streampack_recipes/pretrain --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/pretrain --config my.yaml

As `full_finetune`, and ``z_loss`` and ``document_masking`` besides. The rest is in the config: ``split_across_pack``
for packs that are always full, a `Mix` of sources, ``max_steps`` for an end, random weights or a checkpoint to
begin from.

On one device or on many; with several processes the model is sharded over them (FSDP2). Everything the
YAML may say is a field of `streampack.training.config.RunConfig`. The loop is in plain sight in `train`; it
calls `streampack.training`, which never calls back.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training

from streampack.attention.prepare import prepare_model_for_packing
from streampack.distributed.world import World, join_world
from streampack.instantiate import build
from streampack.losses import label_weights, loss_terms
from streampack.map_style.flatten import join_documents
from streampack.training.config import RunConfig, read_config
from streampack.training.data import build_data, build_loader, opening, total_steps
from streampack.training.evaluation import HeldOut, evaluate
from streampack.training.isolation import verify_isolation
from streampack.training.model import (
    allow_long_rows,
    build_model,
    clip_gradients,
    full_weights,
    pick_device,
    seed_step,
    vocabulary,
)
from streampack.training.output import save_weights
from streampack.training.overrides import parse
from streampack.training.progress import MetricLogger, StepMeter, bar, memory_metrics, stream_totals, summary
from streampack.training.run_folder import finished, hold_output, open_checkpoints, record_end
from streampack.training.schedule import restore_schedule
from streampack.training.sources import SourceMeter


@parse
def recipe_main(raw: DictConfig) -> None:
    """Entry point for ``tune run``: a config file, then ``key=value`` overrides."""
    train(raw)


def train(raw: Any) -> dict[str, Any]:
    """Run from a config to final weights, with the other ranks if torchrun started several.

    Returns what the run was: steps, losses, the ledger, where things are. The same on all ranks.
    """
    cfg = read_config(raw, recipe="pretrain")
    device = pick_device(cfg.device)
    with join_world(device, timeout=cfg.collective_timeout) as world, hold_output(cfg, world=world):
        return finished(cfg, world=world) or _train(raw, cfg, device, world)


def _train(raw: Any, cfg: RunConfig, device: torch.device, world: World) -> dict[str, Any]:
    checkpoints, newest = open_checkpoints(cfg, world=world)
    seed_step(cfg.seed, 0)

    # What is trained.
    with world.main_first():
        tokenizer = build(cfg.tokenizer)
        checkpointer = build(cfg.checkpointer)
    model = build_model(
        cfg.model,
        weights=checkpointer.load_checkpoint()[training.MODEL_KEY],
        device=device,
        dtype=cfg.dtype,
        world=world,
        activation_checkpointing=cfg.activation_checkpointing,
        compile_layers=cfg.compile,
        shard_also=cfg.custom_sharded_layers,
        reshard_after_forward=cfg.fsdp_reshard_after_forward,
    )
    allow_long_rows(model, max_seq_len=cfg.data["max_seq_len"], samples_in_row=cfg.samples_in_row)
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    if cfg.verify_isolation and cfg.document_masking:
        verify_isolation(model, inputs, max_seq_len=cfg.data["max_seq_len"], world=world)
    optimizer = build(cfg.optimizer, model.parameters())

    # What it is trained on.
    dataset, validation = build_data(cfg, tokenizer=tokenizer, vocab_size=vocabulary(model), world=world)
    loader = build_loader(cfg, dataset, device=device, world=world)
    if not cfg.document_masking:
        validation = {
            name: HeldOut([join_documents(batch) for batch in batches], weight)
            for name, (batches, weight) in validation.items()
        }

    # Where it stands: a new run, or one to go on with.
    step, steps, tokens, seconds, held_out = 0, 0, 0, 0.0, []
    if newest is not None:
        run = checkpoints.load(newest, model=model, optimizer=optimizer)
        step, steps, tokens, seconds, held_out = (
            run[key] for key in ("step", "steps", "tokens", "seconds", "held_out")
        )
        loader.load_state_dict(run["stream"])
    if not steps or cfg.epochs is None:
        steps = total_steps(cfg, loader, world=world)
    scheduler = build(cfg.lr_scheduler, inject={"optimizer": optimizer, "num_training_steps": steps})
    if newest is not None and scheduler is not None:
        restore_schedule(scheduler, run["scheduler"])

    if text := opening(cfg, loader, world=world):
        print(text)
    logger = MetricLogger(cfg.metric_logger, world=world)
    logger.log_config(raw)
    profiler = build(cfg.profiler)[0] if cfg.profiler else training.DummyProfiler()
    every = (cfg.validation or {}).get("every")
    meter = StepMeter(world, device, untrained=dataset.lane_config.untrained)
    by_source = SourceMeter(loader, world, device)
    started = time.perf_counter()

    def save() -> None:
        run = {
            "step": step,
            "steps": steps,
            "tokens": tokens + meter.tokens,
            "seconds": seconds + time.perf_counter() - started,
            "held_out": held_out,
            "stream": loader.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
        }
        checkpoints.save(step, model=model, optimizer=optimizer, run=run)

    def validate() -> None:
        losses = evaluate(
            model, validation, inputs=inputs, loss_norm=cfg.loss_norm, device=device, world=world
        )
        held_out.append((step, losses["validation_loss"]))
        logger.log(losses, step=step)

    if validation and step == 0:
        validate()
    batches = iter(loader)
    profiler.start()
    with bar(steps, done=step, enabled=world.is_main) as progress:
        while cfg.max_steps is None or step < cfg.max_steps:
            meter.start()
            seed_step(cfg.seed, step, world.rank)
            optimizer.zero_grad(set_to_none=True)
            for batch in islice(batches, loader.batches_per_step):
                batch = batch if cfg.document_masking else join_documents(batch)
                weights = label_weights(batch, loss_norm=cfg.loss_norm)
                batch = batch.to(device)
                logits = model(**inputs(batch))
                losses, squares = loss_terms(
                    logits, batch.labels, weights=weights.to(device, non_blocking=True)
                )
                loss = losses.sum()
                z_loss = cfg.z_loss * squares.sum() if cfg.z_loss else torch.zeros_like(loss)
                del logits  # or they would stay through the backward pass
                (loss + z_loss).backward()
                meter.add(batch, loss, weights, z_loss=z_loss)
                by_source.add(batch, losses, weights)
            if not meter.batches:
                break  # the last epoch is over, on every rank
            training.scale_grads(model, meter.reduce())
            norm = None if cfg.clip_grad_norm is None else clip_gradients(model, cfg.clip_grad_norm)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            meter.stop()
            step += 1
            profiler.step()
            progress.update()
            if step % cfg.log_every == 0:
                ledger, epoch = stream_totals(loader, world)
                metrics = meter.metrics() | {"lr": rate, "epoch": epoch} | memory_metrics(world, device)
                metrics |= {"grad_norm": norm} if norm is not None else {}
                metrics |= {f"ledger_{name}": value for name, value in ledger.as_dict().items()}
                metrics |= by_source.metrics()
                logger.log(metrics, step=step)
                progress.set_postfix_str(
                    f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s, "
                    f"padding {metrics['padding']:.1%}"
                )
            if every and step % every == 0 and validation:
                validate()
            if cfg.checkpoint_every and step % cfg.checkpoint_every == 0:
                save()
                newest = step
    profiler.stop()
    meter.check()

    if validation and held_out[-1][0] != step:
        validate()
    if cfg.checkpoint_every and newest != step:
        save()  # so that a longer run can go on from here
    checkpoints.wait()
    seconds, tokens = seconds + time.perf_counter() - started, tokens + meter.tokens
    ledger, _ = stream_totals(loader, world)
    final = full_weights(model, device=device, world=world)
    result = {"step": step, "tokens": tokens, "seconds": seconds, "held_out": held_out, "ledger": ledger}
    if world.is_main:
        folder = save_weights(checkpointer, final, cfg=cfg)
        logger.close()
        listed = dataset.lane_config.quarantine
        print(summary(ledger, seconds=seconds, tokens=tokens, validation=held_out, quarantine=listed))
        print(f"weights      {folder}")
        record_end(cfg, result, saved=[folder])
    return result


if __name__ == "__main__":
    sys.exit(recipe_main())
