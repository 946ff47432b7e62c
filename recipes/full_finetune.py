"""Train all weights of a torchtune model on a streamed, packed corpus. One file, one run, top to bottom.

    tune run streampack_recipes/full_finetune --config my.yaml max_steps=100

Everything the YAML may say is a field of `streampack.training.config.RunConfig`. The loop is in plain
sight in `train`; it calls `streampack.training`, which never calls back.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import config, training

from streampack.attention import make_mask
from streampack.collate import Batch
from streampack.components import build
from streampack.loader import PackedDataLoader
from streampack.training.checkpoint import Checkpoints
from streampack.training.config import read_config
from streampack.training.data import build_data, total_steps
from streampack.training.loss import summed_cross_entropy
from streampack.training.model import build_model, pick_device, seed_step, vocabulary
from streampack.training.progress import StepMeter, bar, summary
from streampack.training.schedule import restore_schedule


@config.parse
def recipe_main(raw: DictConfig) -> None:
    """Entry point for ``tune run``: a config file, then ``key=value`` overrides."""
    train(raw)


def train(raw: Any) -> dict[str, Any]:
    """Run from a config to final weights. Returns what the run was: steps, losses, the ledger, where things are."""
    cfg = read_config(raw)
    trusted = cfg.trusted_packages
    device = pick_device(cfg.device)
    checkpoints = Checkpoints(Path(cfg.output_dir) / "checkpoints", keep=cfg.keep_checkpoints)
    if checkpoints.steps() and not cfg.resume:
        raise ValueError(
            f"{checkpoints.folder} holds checkpoints up to step {checkpoints.steps()[-1]} of an earlier run; "
            "set resume=True to go on from there, or choose another output_dir"
        )
    seed_step(cfg.seed, 0)

    # What is trained.
    tokenizer = build(cfg.tokenizer, trusted=trusted)
    checkpointer = build(cfg.checkpointer, trusted=trusted)
    model = build_model(
        cfg.model,
        weights=checkpointer.load_checkpoint()[training.MODEL_KEY],
        device=device,
        dtype=cfg.dtype,
        activation_checkpointing=cfg.activation_checkpointing,
        compile_layers=cfg.compile,
        trusted=trusted,
    )
    optimizer = build(cfg.optimizer, model.parameters(), trusted=trusted)

    # What it is trained on.
    dataset, validation = build_data(cfg, tokenizer=tokenizer, vocab_size=vocabulary(model))
    loader = PackedDataLoader(
        dataset,
        batch_size=cfg.batch_size,
        num_workers=cfg.num_workers,
        batches_per_step=cfg.accumulation,
    )

    # Where it stands: a new run, or one to go on with.
    step, steps, tokens, seconds, held_out = 0, 0, 0, 0.0, []
    newest = checkpoints.steps()[-1] if checkpoints.steps() else None
    if newest is not None:
        run = checkpoints.load(newest, model=model, optimizer=optimizer)
        step, steps, tokens, seconds, held_out = (
            run[key] for key in ("step", "steps", "tokens", "seconds", "held_out")
        )
        loader.load_state_dict(run["stream"])
    if not steps or cfg.epochs is None:
        steps = total_steps(cfg, dataset)
    scheduler = build(
        cfg.lr_scheduler, trusted=trusted, inject={"optimizer": optimizer, "num_training_steps": steps}
    )
    if newest is not None and scheduler is not None:
        restore_schedule(scheduler, run["scheduler"])

    logger = build(cfg.metric_logger, trusted=trusted)
    logger.log_config(raw)
    profiler = build(cfg.profiler, trusted=trusted)[0] if cfg.profiler else training.DummyProfiler()
    every = (cfg.validation or {}).get("every")

    def save() -> None:
        run = {
            "step": step,
            "steps": steps,
            "tokens": tokens,
            "seconds": seconds + time.perf_counter() - started,
            "held_out": held_out,
            "stream": loader.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
        }
        checkpoints.save(step, model=model, optimizer=optimizer, run=run)

    started = time.perf_counter()
    if validation and step == 0:
        held_out.append((0, evaluate(model, validation, device=device, attention=cfg.attention)))
        logger.log_dict({"validation_loss": held_out[-1][1]}, step=0)

    batches = iter(loader)
    profiler.start()
    with bar(steps, done=step) as progress:
        while cfg.max_steps is None or step < cfg.max_steps:
            meter = StepMeter()
            seed_step(cfg.seed, step)
            optimizer.zero_grad(set_to_none=True)
            for batch in islice(batches, cfg.accumulation):
                trained = int(batch.num_trained)  # counted before the transfer, so that the GPU need not wait
                batch = batch.to(device)
                mask = make_mask(batch, attention=cfg.attention)
                logits = model(batch.tokens, mask=mask, input_pos=batch.input_pos)
                loss = summed_cross_entropy(logits, batch.labels)
                del logits  # or they would stay through the backward pass
                loss.backward()
                meter.add(batch, loss, trained)
            if not meter.slots:
                break  # the last epoch is over
            training.scale_grads(model, torch.tensor(1 / max(1, meter.trained), device=device))
            grad_norm = None
            if cfg.clip_grad_norm is not None:
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=cfg.clip_grad_norm)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
            tokens += meter.tokens
            profiler.step()
            progress.update()
            if step % cfg.log_every == 0:
                metrics = meter.metrics() | {"lr": rate, "epoch": loader.epoch}
                metrics |= {"grad_norm": grad_norm} if grad_norm is not None else {}
                metrics |= {f"ledger_{name}": value for name, value in loader.ledger().as_dict().items()}
                if device.type == "cuda":
                    metrics |= training.get_memory_stats(device=device)
                logger.log_dict(metrics, step=step)
                progress.set_postfix_str(
                    f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s, "
                    f"padding {metrics['padding']:.1%}"
                )
            if every and step % every == 0 and validation:
                held_out.append((step, evaluate(model, validation, device=device, attention=cfg.attention)))
                logger.log_dict({"validation_loss": held_out[-1][1]}, step=step)
            if cfg.checkpoint_every and step % cfg.checkpoint_every == 0:
                save()
    profiler.stop()

    if validation and held_out[-1][0] != step:
        held_out.append((step, evaluate(model, validation, device=device, attention=cfg.attention)))
        logger.log_dict({"validation_loss": held_out[-1][1]}, step=step)
    if cfg.checkpoint_every and step not in checkpoints.steps():
        save()  # so that a longer run can go on from here
    seconds += time.perf_counter() - started
    checkpointer.save_checkpoint({training.MODEL_KEY: model.state_dict()}, epoch=0)
    logger.close()
    ledger = loader.ledger()
    print(summary(ledger, seconds=seconds, tokens=tokens, validation=held_out))
    print(f"weights      {Path(cfg.output_dir) / 'epoch_0'}")
    return {"step": step, "tokens": tokens, "seconds": seconds, "held_out": held_out, "ledger": ledger}


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch], *, device: torch.device, attention: str) -> float:
    """The loss per trained token over the held-out packs."""
    model.eval()
    total, trained = 0.0, 0
    for batch in batches:
        trained += int(batch.num_trained)
        batch = batch.to(device)
        logits = model(batch.tokens, mask=make_mask(batch, attention=attention), input_pos=batch.input_pos)
        total += float(summed_cross_entropy(logits, batch.labels))
    model.train()
    return total / max(1, trained)


if __name__ == "__main__":
    sys.exit(recipe_main())
