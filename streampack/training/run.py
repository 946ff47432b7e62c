"""`Run`: what a recipe has besides model and loss: ranks, lock, data, resume, schedule, signals, logs, checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from random import SystemRandom
from typing import Any

import torch
from torch import nn
from torchtune import training

from streampack.attention import Inputs
from streampack.instantiate import build, errors_of
from streampack.packing.batch import Batch
from streampack.sources.bad_records import quarantine_for
from streampack.streaming.first_look import first_look
from streampack.streaming.mixing import mixing_lines
from streampack.training.checkpoint import Checkpoints, read_run
from streampack.training.checks import read_config
from streampack.training.collated_rows import own_collate, vocab_size_of
from streampack.training.config import RunConfig
from streampack.training.data import build_data, build_loader
from streampack.training.evaluation import HeldOut
from streampack.training.meters import CountMeter, SourceMeter, memory_metrics, run_ledger, stream_metrics
from streampack.training.model import Weights, full_weights, seed_step
from streampack.training.optimizer import clip_gradients, require_one_batch, scale_gradients
from streampack.training.preferences import shares_prefixes
from streampack.training.progress import MetricLogger, aligned, bar, opening, postfix, summary
from streampack.training.quantization import delay_fake_quant
from streampack.training.row_losses import RowLosses
from streampack.training.run_folder import (
    Interrupted,
    begin_phase,
    end_file,
    finished,
    hold_output,
    open_checkpoints,
    record_end,
    require_same_config,
    saved_seed,
    stop_on_signals,
    warn_of_unused,
)
from streampack.training.schedule import asked_of, build_schedule, step_schedule, total_steps
from streampack.training.secrets import shown
from streampack.training.validate import Checked, require_isolation, require_recipe
from streampack.training.weights import write_weights
from streampack.training.world import World, join_world, pick_device

log = logging.getLogger(__name__)

Result = dict[str, Any]
"""A recipe's return value, the same on every rank, about the whole run.

``step`` is the last one. Unless the run was over when it was opened, there are ``tokens`` and ``computed`` (with
padding), ``seconds``, ``held_out`` (pairs of step and loss) and ``ledger``, too."""
Evaluate = Callable[[Mapping[str, HeldOut]], dict[str, float]]
"""Returns the losses on the held-out batches, ``validation_loss`` among them."""


class Step:
    """The batches of one optimizer step on this rank, what their losses add to the meters, more ``metrics`` to log."""

    def __init__(self, run: Run, batches: Iterable[Batch]) -> None:
        self._run, self._batches = run, batches
        self.metrics: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._run.report.add(batch, step=self._run.step + 1)
            yield batch

    def add(
        self,
        batch: Batch,
        loss: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor,
        *,
        z_loss: torch.Tensor | None = None,
        trained: int | None = None,
    ) -> None:
        """Count a batch of this rank.

        Args:
            batch: on the device.
            loss: the sum over the batch.
            losses: the same by token, ``[batch, max_seq_len]``.
            weights: of ``losses``, by whose sum over the step the gradients are divided.
            z_loss: the sum over the batch.
            trained: trained tokens; None: as many as weights that are not 0.
        """
        run = self._run
        run.meter.add(batch, loss, weights, z_loss=z_loss, trained=trained)
        run.by_source.add(batch, losses, weights)
        run.by_row.add(batch, losses, weights, step=run.step + 1)

    def reduce(self) -> torch.Tensor:
        """Collective, once a step, after all `add`: return the factor that `scale_gradients` scales by."""
        return self._run.meter.reduce()

    def scale_gradients(self) -> None:
        """Collective: divide the gradients once, by the weights of all ranks, and clip them.

        They are of summed losses, and FSDP has averaged them over the data ranks: the factor is their number / weights.
        """
        model, max_norm = self._run.model, self._run.cfg.clip_grad_norm
        scale_gradients(model, self.reduce(), compiled=self._run.cfg.compile)
        if max_norm is not None:
            self.metrics["grad_norm"] = clip_gradients(model, max_norm)


class Run:
    """A training run from its config to its weights; a recipe adds the model, the optimizer and the loss.

    A recipe calls the methods below in their order, each on every rank. `streampack_recipes.full_finetune` shows it.

    Attributes:
        cfg: the config.
        device: this rank's.
        world: the ranks.
        over: the result of a run that was over when it was opened, else None.
        adapters_only: whether only the adapters of a model are trained.
        step: optimizer steps that were made.
    """

    world: World
    over: Result | None = None
    checkpoints: Checkpoints
    saved_step: int | None = None
    stopped: int = 0  # the signal that ends the run after this step
    seed: int
    _closing: ExitStack

    def __init__(self, raw: Any, cfg: RunConfig, *, adapters_only: bool, pairs: bool, check: bool) -> None:
        self.raw, self.cfg, self.adapters_only = raw, cfg, adapters_only
        self._pairs, self._check = pairs, check
        self.device = pick_device(cfg.device)

    def load_base(self) -> Weights:
        """Collective: build tokenizer and checkpointer, and return the weights of the base model."""
        with self.world.main_first():
            with errors_of("tokenizer", "check the files that it names"):
                self.tokenizer = build(self.cfg.tokenizer)
            with errors_of("checkpointer", "check checkpoint_dir and checkpoint_files"):
                self.checkpointer = build(self.cfg.checkpointer)
        weights: Weights = self.checkpointer.load_checkpoint()[training.MODEL_KEY]
        return weights

    def setup_data(self, model: nn.Module, inputs: Inputs) -> None:
        """Collective: build the loader and the held-out batches, and check that no sample of a pack sees another."""
        cfg, world = self.cfg, self.world
        self.dataset, self.held_out_packs = build_data(
            cfg, tokenizer=self.tokenizer, vocab_size=vocab_size_of(model), world=world,
            positions=getattr(model, "max_seq_len", None),
        )  # fmt: skip
        before = None if self.saved_step is None else read_run(self.checkpoints.path(self.saved_step))
        # The same step as before, on whatever number of ranks, unless the config asks for another one.
        same = before is not None and before["packs_of_rank"] == cfg.packs_of_rank
        self.loader = build_loader(
            cfg,
            self.dataset,
            device=self.device,
            world=world,
            packs_per_step=before["packs_per_step"] if before is not None and same else None,
        )
        if before is not None and self.loader.packs_per_step != before["packs_per_step"] and world.is_main:
            log.warning(
                "a step has %d packs from here on; up to step %d it had %d, as batch_size and "
                "gradient_accumulation_steps were others",
                self.loader.packs_per_step, self.saved_step, before["packs_per_step"],
            )  # fmt: skip
        lanes = self.dataset.lane_config
        if cfg.verify_isolation and cfg.document_masking and not own_collate(cfg.collate_fn):
            shared = self._pairs and shares_prefixes(lanes)
            with world.raise_on_all():
                require_isolation(model, inputs, max_seq_len=lanes.packing.max_seq_len, groups=shared)
        self._inputs = inputs

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Collective: load the newest checkpoint, or that of the run that this one continues, if there is one."""
        cfg, world = self.cfg, self.world
        self.model, self.optimizer = model, optimizer
        run: dict[str, Any] = {"begun": 0, "step": 0, "steps": 0, "seconds": 0.0, "held_out": []}
        run |= {"tokens": 0, "computed": 0}
        if self.saved_step is not None:
            run = self.checkpoints.load(self.saved_step, model=model, optimizer=optimizer)
            self.loader.load_state_dict(run["stream"])  # refuses the state of another release
            warn_of_unused(cfg, run["optimizer_settings"], world=world)
        elif cfg.resume_from is not None:
            run["begun"] = run["step"] = begin_phase(
                cfg, model=model, optimizer=optimizer, loader=self.loader, world=world
            )
        require_one_batch(cfg, self.loader.batches_per_step)
        self.before, self.step, self.held_out = run, run["step"], run["held_out"]
        delay_fake_quant(model, cfg, step=self.step)  # a validation may come before the first step

    def setup_schedule(self) -> None:
        """Collective: count the steps to make, and build the schedule of the learning rate for them."""
        cfg, run = self.cfg, self.before
        self.num_steps = total_steps(cfg, self.loader, world=self.world, run=run)
        self.scheduler = build_schedule(
            cfg, self.optimizer, steps=self.num_steps, step=self.step, state=run.get("scheduler")
        )

    def setup_logs(
        self, report: Callable[..., Any], *, metrics: Callable[[], dict[str, float]] = dict
    ) -> None:
        """Collective: print what is in effect, and open logger, page, profiler and meters.

        Args:
            report: makes what writes the page of the run.
            metrics: returns more numbers to log.
        """
        cfg, world, lanes = self.cfg, self.world, self.dataset.lane_config
        in_effect = opening(cfg, self.loader, inputs=self._inputs, world=world, done=self.step)
        if world.is_main:
            mixed = mixing_lines(lanes, self.dataset.lanes_for(self.loader.rank_sync.data_world_size))
            print(aligned(in_effect), *first_look(lanes), *mixed, sep="\n", flush=True)  # noqa: T201
        if self._check:
            first = next(iter(self.loader), None)
            if first is None or not int(first.num_trained):
                raise ValueError(
                    "data: the first batch trains nothing: every label is masked, or was cut off; check the roles "
                    "of the messages, overlong and max_seq_len"
                )
            raise Checked
        written = shown(self.raw)
        self.logger = MetricLogger(cfg, written=written, world=world, resumed=self.saved_step)
        self.report = report(cfg, written=written, lanes=lanes, in_effect=in_effect, world=world)
        self.profiler = build(cfg.profiler)[0] if cfg.profiler else training.DummyProfiler()
        self.meter = CountMeter(world, self.device)
        self.by_source = SourceMeter(self.loader, world, self.device)
        self.by_row = RowLosses(cfg, world=world, resumed=self.saved_step)
        self._more_metrics = metrics
        if world.is_main:
            end_file(cfg).unlink(missing_ok=True)  # of the run that continues
        self.started = time.perf_counter()

    def steps(self) -> Iterator[Step]:
        """Yield the steps to make, until the data, the config or a signal ends the run.

        Raises:
            Interrupted: after a signal, when the step that was running is saved.
        """
        cfg, world, loader = self.cfg, self.world, self.loader
        batches = iter(loader)
        self.profiler.start()
        loop = self._closing.enter_context(ExitStack())
        loop.enter_context(self.report.on_error())
        most = cfg.most_steps
        total = int(min(self.num_steps, most))
        self._bar = loop.enter_context(bar(total, done=self.step, enabled=world.is_main))
        self._agreed_signal = loop.enter_context(stop_on_signals(world))
        while self.step < most:
            self.meter.start()
            seed_step(self.seed, self.step, world.data_rank)  # so that dropout is the same after a resume
            delay_fake_quant(self.model, cfg, step=self.step)
            first = next(batches, None)
            if first is None:
                break  # the last epoch is over, on every rank
            yield Step(self, chain([first], islice(batches, loader.batches_per_step - 1)))
            if self.stopped:
                self.checkpoints.wait()
                raise Interrupted(number=self.stopped)
        loop.close()

    def end_step(self, step: Step) -> None:
        """Collective: step the learning rate, and log every ``log_every_n_steps``."""
        rate = self.optimizer.param_groups[0]["lr"]
        step_schedule(self.scheduler, step=self.step, steps=self.num_steps)
        self.meter.stop()
        self.step += 1
        self.profiler.step()
        self._bar.update()
        if self.step % (self.cfg.log_every_n_steps or 1) == 0:
            self._bar.set_postfix_str(postfix(self._log({"lr": rate} | step.metrics)))
        self.stopped = self._agreed_signal()

    def validate(self, evaluate: Evaluate, *, last: bool = False) -> None:
        """Collective: log the losses on the held-out batches, before the first step, every so many, and at last.

        After a resume, too, where a signal ended the run before it did.
        """
        every = self.cfg.run_val_every_n_steps
        due = (
            last
            or (every and self.step % every == 0)
            or (self.step == self.before["step"] and not self.saved_step)
        )
        done = bool(self.held_out) and self.held_out[-1][0] == self.step
        if self.held_out_packs and due and not done and not self.stopped:
            losses = evaluate(self.held_out_packs)
            self.held_out.append((self.step, losses["validation_loss"]))
            self.logger.log(losses, step=self.step)

    def save(self, *, last: bool = False) -> None:
        """Collective: write a checkpoint after a signal, and with ``save_every_n_steps`` after so many and at last."""
        cfg, every = self.cfg, self.cfg.save_every_n_steps
        due = self.stopped or (every and (last or self.step % every == 0))
        if not due or self.saved_step == self.step:
            return
        self.by_row.write()  # a run that continues from here has no other rows of the steps since the last log
        state = self._totals() | {
            "begun": self.before["begun"],
            "steps": self.num_steps,
            "asked": asked_of(cfg, self.loader),
            "seed": self.seed,
            "packs_of_rank": cfg.packs_of_rank,
            "packs_per_step": self.loader.packs_per_step,
            "stream": self.loader.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "optimizer_settings": cfg.optimizer,
        }
        self.checkpoints.save(self.step, model=self.model, optimizer=self.optimizer, run=state)
        self.saved_step = self.step

    def end(self, evaluate: Evaluate) -> Result:
        """Collective: evaluate, save and write the weights; return the result."""
        cfg = self.cfg
        self.profiler.stop()
        self.by_row.write()
        self.loader.require_trained()
        self.validate(evaluate, last=True)
        self.save(last=True)  # a longer run can continue from here
        self.checkpoints.wait()
        result = self._totals() | {"ledger": run_ledger(self.loader, self.world)}
        final = full_weights(self.model, device=self.device, world=self.world)
        if self.world.is_main:
            saved = write_weights(
                final,
                model=self.model,
                checkpointer=self.checkpointer,
                config=cfg,
                adapters_only=self.adapters_only,
            )
            self.logger.close()
            record_end(cfg, step=self.step)
            self.report.write(step=self.step, ledger=result["ledger"])
            written = aligned(
                {**{name: str(path) for name, path in saved.items()}, "report": str(self.report.path)}
            )
            print(f"{summary(result, quarantine=self.dataset.lane_config.quarantine)}\n{written}")  # noqa: T201
        return result

    def _totals(self) -> Result:
        return {
            "step": self.step,
            "tokens": self.before["tokens"] + self.meter.tokens,
            "computed": self.before["computed"] + self.meter.computed,
            "seconds": self.before["seconds"] + time.perf_counter() - self.started,
            "held_out": self.held_out,
        }

    def _log(self, metrics: dict[str, Any]) -> dict[str, Any]:
        self.loader.require_trained()
        metrics = self.meter.metrics() | metrics | self._more_metrics() | self.by_source.metrics()
        metrics |= stream_metrics(self.loader, self.world)
        if self.cfg.log_peak_memory_stats:
            metrics |= memory_metrics(self.world, self.device)
        self.by_row.write()
        self.logger.log(metrics, step=self.step)
        return metrics


@contextmanager
def open_run(
    raw: Any, *, adapters: bool | None = None, pairs: bool = False, check: bool = False
) -> Iterator[Run]:
    """Collective: check a config, join the ranks, and hold the folders that the run writes to.

    Args:
        raw: the config.
        adapters: whether the recipe trains adapters, or all weights; None: as the model has them.
        pairs: whether the recipe's loss compares pairs; else it is cross-entropy.
        check: whether to stop before the first step, by `Checked`. Nothing is written to ``output_dir``.

    Raises:
        ValueError: for a config with a mistake in it, or a folder that another run holds or has written to.
        Interrupted: for a signal or Ctrl-C, after the checkpoint that it made.
    """
    cfg = read_config(raw)
    adapters_only = require_recipe(cfg, adapters=adapters, pairs=pairs)
    run = Run(raw, cfg, adapters_only=adapters_only, pairs=pairs, check=check)
    with (
        join_world(
            run.device,
            timeout=cfg.collective_timeout,
            replicas=cfg.data_parallel_replicate_dim,
            tensor_parallel=cfg.tensor_parallel_dim,
        ) as run.world,
        nullcontext() if check else hold_output(cfg, world=run.world),
        ExitStack() as run._closing,
    ):
        require_same_config(cfg, world=run.world)
        if not check and (end := finished(cfg, world=run.world)) is not None:
            run.over = {"step": end}
            yield run
            return
        if not check:
            run.checkpoints, run.saved_step = open_checkpoints(cfg, world=run.world)
        elif cfg.data is not None:
            kept = quarantine_for(cfg.data.get("skip_bad"))
            cfg.data["skip_bad"] = kept and replace(kept, folder=None)
        seed = run.world.run_on_main(lambda: saved_seed(cfg), of="a seed")
        run.seed = run.world.broadcast(SystemRandom().randrange(2**31)) if seed is None else seed
        cfg.seed = run.seed
        if (mode := cfg.cudnn_deterministic_mode) is not None:
            training.set_seed(run.seed, debug_mode=mode)
        seed_step(run.seed, 0)
        yield run
