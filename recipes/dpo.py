"""Train a torchtune model on preference pairs: DPO and its kin, of all weights or of adapters, streamed and packed.

    tune run streampack_recipes/dpo --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/dpo --config my.yaml

A row is a prompt, a chosen and a rejected answer (`streampack.AnswersEncoder`), which lie in the same pack; the
prompt is computed once for both. The loss is a component that compares pairs: torchtune's ``DPOLoss`` or ``RSOLoss``,
or `streampack.losses.PreferenceLoss`. The reference is the frozen base of a model with adapters; otherwise a second
model, from ``ref_checkpointer`` or the same weights; with ``reference: data``, numbers in the data. The other keys are
those of `full_finetune`: streamed data, resume, several devices (FSDP2) work as there.
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
from streampack.inspection.report_writer import ReportWriter
from streampack.instantiate import build
from streampack.losses import pair_of
from streampack.training.checkpoint import restore_schedule, step_schedule
from streampack.training.config import RunConfig, read_config, shown
from streampack.training.data import build_data, build_loader
from streampack.training.devices import pick_device
from streampack.training.estimate import opening, total_steps
from streampack.training.export import write_weights
from streampack.training.isolation import verify_isolation
from streampack.training.meters import SourceMeter, StepMeter, memory_metrics, stream_metrics, stream_totals
from streampack.training.model import (
    build_model,
    clip_gradients,
    full_weights,
    has_adapters,
    require_model,
    seed_step,
)
from streampack.training.overrides import parse
from streampack.training.phase import advance, begin_phase
from streampack.training.preferences import (
    Comparison,
    PairMeter,
    Reference,
    at_first_token,
    evaluate_pairs,
    require_preferences,
    shares_prefixes,
)
from streampack.training.progress import MetricLogger, aligned, bar, postfix, summary
from streampack.training.row_losses import RowLosses
from streampack.training.run_folder import (
    Interrupted,
    finished,
    fixed_settings,
    hold_output,
    open_checkpoints,
    record_end,
    warn_of_unheeded,
)
from streampack.training.signals import stop_on_signals
from streampack.training.world import World, join_world


@parse
def recipe_main(raw: DictConfig) -> None:
    """Train a torchtune model on preference pairs: DPO and its kin."""
    train(raw)


def train(raw: Any) -> dict[str, Any]:
    """Train as a config says and write the final weights. Every rank that torchrun started calls this.

    Args:
        raw: the config.

    Returns:
        On all ranks: ``step``, ``tokens``, ``seconds``, ``held_out`` (pairs of step and loss), ``ledger``.
    """
    cfg = read_config(raw)
    require_preferences(cfg)
    require_model(cfg)
    device = pick_device(cfg.device)
    with join_world(device, timeout=cfg.collective_timeout) as world, hold_output(cfg, world=world):
        if (result := finished(cfg, world=world)) is not None:
            return result
        return _train(raw, cfg, device, world)


def _train(raw: Any, cfg: RunConfig, device: torch.device, world: World) -> dict[str, Any]:
    checkpoints, saved_step = open_checkpoints(cfg, world=world)
    seed_step(cfg.seed, 0)

    # The policy, and the reference that it is compared with.
    with world.main_first():
        tokenizer = build(cfg.tokenizer)
        checkpointer = build(cfg.checkpointer)
    adapters_only = has_adapters(cfg)
    weights = checkpointer.load_checkpoint()[training.MODEL_KEY]
    model = build_model(cfg, weights=weights, device=device, world=world, adapters_only=adapters_only)
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    loss = build(cfg.loss)
    reference = Reference(cfg, loss, model=model, inputs=inputs, weights=weights, device=device, world=world)
    del weights
    compare = Comparison(loss, model=model, inputs=inputs, reference=reference)
    optimizer = build(cfg.optimizer, [value for value in model.parameters() if value.requires_grad])

    # The data.
    vocab_size = model.tok_embeddings.num_embeddings
    dataset, validation = build_data(cfg, tokenizer=tokenizer, vocab_size=vocab_size, world=world)
    loader = build_loader(cfg, dataset, device=device)
    if cfg.verify_isolation:
        size, shared = cfg.data["max_seq_len"], shares_prefixes(dataset.lane_config)
        verify_isolation(model, inputs, max_seq_len=size, world=world, groups=shared)

    # A new run, one that continues from its newest checkpoint, or a second phase of another run.
    run: dict[str, Any] = {"begun": 0, "step": 0, "steps": 0, "tokens": 0, "seconds": 0.0, "held_out": []}
    if saved_step is not None:
        run = checkpoints.load(saved_step, model=model, optimizer=optimizer)
        warn_of_unheeded(cfg, run["settings"], optimizer=optimizer, world=world)
        loader.load_state_dict(run["stream"])
    elif cfg.resume_from is not None:
        run["begun"] = run["step"] = begin_phase(
            cfg, model=model, optimizer=optimizer, loader=loader, world=world
        )
    step, held_out = run["step"], run["held_out"]
    steps, by_epochs = total_steps(cfg, loader, world=world, run=run)
    scheduler = build(cfg.lr_scheduler, inject={"optimizer": optimizer, "num_training_steps": steps})
    if saved_step is not None and scheduler is not None:
        restore_schedule(scheduler, run["scheduler"])
    elif scheduler is not None:
        advance(scheduler, step)

    in_effect = opening(cfg, loader, inputs=inputs, world=world, done=step)
    if world.is_main:
        print(aligned(in_effect), flush=True)
    logger = MetricLogger(cfg, world=world, resumed=saved_step)
    logger.log_config(shown(raw))
    report = ReportWriter(
        cfg, written=shown(raw), lanes=dataset.lane_config, in_effect=in_effect, world=world
    )
    profiler = build(cfg.profiler)[0] if cfg.profiler else training.DummyProfiler()
    every = (cfg.validation or {}).get("every")
    meter = StepMeter(world, device)
    by_source = SourceMeter(loader, world, device)
    by_row = RowLosses(cfg, world=world)
    by_pair = PairMeter(world, device)
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
        state |= {
            "begun": run["begun"],
            "by_epochs": by_epochs,
            "packs_per_step": loader.packs_per_step,
            "settings": fixed_settings(cfg),
        }
        checkpoints.save(step, model=model, optimizer=optimizer, run=state)

    def validate() -> None:
        if not validation or (held_out and held_out[-1][0] == step):
            return
        losses = evaluate_pairs(compare, validation, device=device, world=world)
        held_out.append((step, losses["validation_loss"]))
        logger.log(losses, step=step)

    if saved_step is None or (every and step % every == 0):  # a signal ended the run before it did
        validate()
    batches = iter(loader)
    profiler.start()
    show = bar(min(steps, cfg.max_steps or steps), done=step, enabled=world.is_main)
    with report.on_error(), show as progress, stop_on_signals(world) as stop:
        while cfg.max_steps is None or step < cfg.max_steps:
            meter.start()
            seed_step(cfg.seed, step, world.rank)  # so that dropout is the same after a resume
            optimizer.zero_grad(set_to_none=True)
            for batch in islice(batches, loader.batches_per_step):
                report.add(batch, step=step + 1)
                pairs = pair_of(batch)
                compared = compare(batch, pairs)
                loss_sum = compared.losses.sum()
                loss_sum.backward()
                ones = torch.ones(len(pairs[0]))
                meter.add(batch, loss_sum, ones, trained=int(batch.num_trained))
                by_pair.add(compared)
                losses, weights = (at_first_token(each, batch, pairs[0]) for each in (compared.losses, ones))
                by_source.add(batch, losses, weights)
                by_row.add(batch, losses, weights)
            if not meter.batches:
                break  # the last epoch is over, on every rank
            # World size / number of pairs on all ranks: undoes the mean over ranks of data parallelism.
            training.scale_grads(model, meter.reduce())
            norm = None if cfg.clip_grad_norm is None else clip_gradients(model, cfg.clip_grad_norm)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            step_schedule(scheduler, step=step, steps=steps)
            meter.stop()
            step += 1
            by_row.end_step(step)
            profiler.step()
            progress.update()
            if step % cfg.log_every == 0:
                loader.require_trained()
                metrics = meter.metrics() | {"lr": rate} | ({} if norm is None else {"grad_norm": norm})
                metrics |= by_pair.metrics() | by_source.metrics()
                metrics |= stream_metrics(loader, world) | memory_metrics(world, device)
                by_row.write()
                logger.log(metrics, step=step)
                progress.set_postfix_str(postfix(metrics))
            stopped = stop.agree()
            if every and step % every == 0 and not stopped:
                validate()
            if cfg.checkpoint_every and (stopped or step % cfg.checkpoint_every == 0):
                save()
                saved_step = step
            if stopped:
                checkpoints.wait()
                raise Interrupted(number=stopped)
    profiler.stop()
    by_row.write()
    loader.require_trained()

    validate()
    if cfg.checkpoint_every and saved_step != step:
        save()  # a longer run can continue from here
    checkpoints.wait()
    result = totals() | {"ledger": stream_totals(loader, world)[0]}
    final = full_weights(model, device=device, world=world)
    if world.is_main:
        saved = write_weights(
            final, model=model, checkpointer=checkpointer, config=cfg, adapters_only=adapters_only
        )
        logger.close()
        print(summary(result, quarantine=dataset.lane_config.quarantine))
        for name, folder in saved.items():
            print(f"{name:12} {folder}")
        record_end(cfg, result, saved=saved.values())
        report.write(step=step, ledger=result["ledger"])
        print(f"{'report':12} {report.path}")
    return result


if __name__ == "__main__":
    sys.exit(recipe_main())
