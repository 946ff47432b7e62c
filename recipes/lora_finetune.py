"""Train low-rank adapters of a torchtune model on a streamed, packed corpus.

    tune run streampack_recipes/lora_finetune --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/lora_finetune --config my.yaml

LoRA, DoRA or, on a quantized base, QLoRA: as the torchtune builder in the config says. The base is frozen, and running
checkpoints hold the adapters only. The final weights go to two folders, because transformers applies an adapter that
lies beside weights: ``adapter/`` holds the adapters, ``epoch_0/`` the base with the adapters merged in.

The loop is that of `full_finetune`; which weights train, how they begin and what is saved differ.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training

from streampack.attention.prepare import prepare_model_for_packing
from streampack.distributed.world import World, join_world
from streampack.instantiate import build
from streampack.losses import label_weights, token_losses
from streampack.training.checkpoint import restore_schedule
from streampack.training.config import RunConfig, read_config
from streampack.training.data import build_data, build_loader
from streampack.training.devices import pick_device
from streampack.training.estimate import opening, total_steps
from streampack.training.evaluation import evaluate
from streampack.training.isolation import verify_isolation
from streampack.training.lora import (
    adapter_config,
    save_adapters,
    split_and_merge,
    start_adapters,
    start_magnitudes,
)
from streampack.training.meters import SourceMeter, StepMeter, memory_metrics, stream_metrics, stream_totals
from streampack.training.model import (
    allow_long_rows,
    build_model,
    clip_gradients,
    full_weights,
    seed_step,
)
from streampack.training.overrides import parse
from streampack.training.progress import MetricLogger, bar, postfix, summary
from streampack.training.run_folder import finished, hold_output, open_checkpoints, record_end
from streampack.training.weights import save_weights


@parse
def recipe_main(raw: DictConfig) -> None:
    """Train low-rank adapters of a torchtune model on a streamed, packed corpus."""
    train(raw)


def train(raw: Any) -> dict[str, Any]:
    """Train as a config says and write the final weights. Every rank that torchrun started calls this.

    Returns:
        On all ranks: ``step``, ``tokens``, ``seconds``, ``held_out`` (pairs of step and loss), ``ledger``.
    """
    cfg = read_config(raw, recipe="lora_finetune")
    device = pick_device(cfg.device)
    with join_world(device, timeout=cfg.collective_timeout) as world, hold_output(cfg, world=world):
        return finished(cfg, world=world) or _train(raw, cfg, device, world)


def _train(raw: Any, cfg: RunConfig, device: torch.device, world: World) -> dict[str, Any]:
    checkpoints, newest = open_checkpoints(cfg, world=world)
    seed_step(cfg.seed, 0)

    # The model.
    with world.main_first():
        tokenizer = build(cfg.tokenizer)
        checkpointer = build(cfg.checkpointer)
    model = build_model(
        cfg.model,
        weights=checkpointer.load_checkpoint()[training.MODEL_KEY],
        device=device,
        dtype=cfg.dtype,
        world=world,
        add_weights=partial(start_adapters, seed=cfg.seed),
        activation_checkpointing=cfg.activation_checkpointing,
        compile_layers=cfg.compile,
        shard_also=cfg.custom_sharded_layers,
        reshard_after_forward=cfg.fsdp_reshard_after_forward,
    )
    start_magnitudes(model)
    allow_long_rows(model, max_seq_len=cfg.data["max_seq_len"], samples_in_row=cfg.samples_in_row)
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    if cfg.verify_isolation:
        verify_isolation(model, inputs, max_seq_len=cfg.data["max_seq_len"], world=world)
    optimizer = build(cfg.optimizer, [value for value in model.parameters() if value.requires_grad])

    # The data.
    vocab_size = model.tok_embeddings.num_embeddings
    dataset, validation = build_data(cfg, tokenizer=tokenizer, vocab_size=vocab_size, world=world)
    loader = build_loader(cfg, dataset, device=device, world=world)

    # A new run, or one that continues from its newest checkpoint.
    run: dict[str, Any] = {"step": 0, "steps": 0, "tokens": 0, "seconds": 0.0, "held_out": []}
    if newest is not None:
        run = checkpoints.load(newest, model=model, optimizer=optimizer)
        loader.load_state_dict(run["stream"])
    step, steps, held_out = run["step"], run["steps"], run["held_out"]
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

    def totals() -> dict[str, Any]:
        seconds = run["seconds"] + time.perf_counter() - started
        return {
            "step": step,
            "tokens": run["tokens"] + meter.tokens,
            "seconds": seconds,
            "held_out": held_out,
        }

    def save() -> None:
        schedule = None if scheduler is None else scheduler.state_dict()
        state = totals() | {"steps": steps, "stream": loader.state_dict(), "scheduler": schedule}
        checkpoints.save(step, model=model, optimizer=optimizer, run=state)

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
                weights = label_weights(batch, loss_norm=cfg.loss_norm)
                batch = batch.to(device)
                logits = model(**inputs(batch))
                losses = token_losses(logits, batch.labels, weights=weights.to(device, non_blocking=True))
                del logits  # or they would stay through the backward pass
                loss = losses.sum()
                loss.backward()
                meter.add(batch, loss, weights)
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
                metrics = meter.metrics() | {"lr": rate} | ({} if norm is None else {"grad_norm": norm})
                metrics |= stream_metrics(loader, world) | memory_metrics(world, device) | by_source.metrics()
                logger.log(metrics, step=step)
                progress.set_postfix_str(postfix(metrics))
            if every and step % every == 0 and validation:
                validate()
            if cfg.checkpoint_every and step % cfg.checkpoint_every == 0:
                save()
                newest = step
    profiler.stop()
    meter.check()

    if validation and (not held_out or held_out[-1][0] != step):
        validate()
    if cfg.checkpoint_every and newest != step:
        save()  # a longer run can continue from here
    checkpoints.wait()
    result = totals() | {"ledger": stream_totals(loader, world)[0]}
    final = full_weights(model, device=device, world=world)
    if world.is_main:
        merged, adapters = split_and_merge(final, config=adapter_config(model))
        saved = {"adapters": save_adapters(checkpointer, adapters, model=model, output_dir=cfg.output_dir)}
        if not cfg.save_adapter_weights_only:
            saved["weights"] = save_weights(checkpointer, merged, cfg=cfg)
        logger.close()
        print(summary(result, quarantine=dataset.lane_config.quarantine))
        for name, folder in saved.items():
            print(f"{name:12} {folder}")
        record_end(cfg, result, saved=saved.values())
    return result


if __name__ == "__main__":
    sys.exit(recipe_main())
