"""`Run`: what a recipe has besides model and loss: ranks, lock, data, resume, schedule, signals, logs, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
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
from streampack.sources.bad_records import quarantine_for
from streampack.streaming.first_look import first_look
from streampack.streaming.mixing import mixing_lines
from streampack.training.checkpoint import Checkpoints, read_run
from streampack.training.collated_rows import own_collate, vocab_size_of
from streampack.training.config import RunConfig
from streampack.training.data import build_data, build_loader
from streampack.training.evaluation import HeldOut
from streampack.training.meters import run_ledger
from streampack.training.model import Weights, full_weights, seed_step
from streampack.training.optimizer import require_one_batch
from streampack.training.preferences import require_pairs
from streampack.training.progress import aligned, opening
from streampack.training.quantization import delay_fake_quant
from streampack.training.run_folder import (
    Interrupted,
    begin_phase,
    end_file,
    finished,
    hold_output,
    open_checkpoints,
    record_end,
    require_same_config,
    saved_settings,
    stop_on_signals,
    warn_of_unused,
)
from streampack.training.run_log import RunLog, Step
from streampack.training.schedule import asked_of, build_schedule, step_schedule, total_steps
from streampack.training.validate import Checked, read_for_recipe, require_isolation
from streampack.training.weights import write_weights
from streampack.training.world import World, join_world, pick_device, pick_dtype

log = logging.getLogger(__name__)

Result = dict[str, Any]
"""A recipe's return value, the same on every rank, about the whole run.

``step`` is the last one. Unless the run was over when it was opened, there are ``tokens`` and ``computed`` (with
padding), ``seconds``, ``held_out`` (pairs of step and loss) and ``ledger``, too."""
Evaluate = Callable[[Mapping[str, HeldOut]], dict[str, float]]
"""Returns the losses on the held-out batches, ``validation_loss`` among them."""


class Run:
    """A training run from its config to its weights; a recipe adds the model, the optimizer and the loss.

    Every rank calls the methods below in their order, as `streampack_recipes.full_finetune` shows.

    Attributes:
        cfg: the config.
        device: this rank's.
        world: the ranks.
        over: the result of a run that was over when it was opened, else None.
        step: optimizer steps that were made.
        log: counts and logs the steps.
    """

    world: World
    over: Result | None = None
    checkpoints: Checkpoints
    saved_step: int | None = None
    stopped: int = 0  # the signal that ends the run after this step
    log: RunLog
    _closing: ExitStack

    def __init__(self, raw: Any, cfg: RunConfig, *, pairs: bool, check: bool) -> None:
        self.raw, self.cfg, self._pairs, self._check = raw, cfg, pairs, check
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
        packs = before["packs_per_step"] if before is not None and same else None
        self.loader = build_loader(cfg, self.dataset, device=self.device, world=world, packs_per_step=packs)
        if before is not None and self.loader.packs_per_step != before["packs_per_step"] and world.is_main:
            log.warning(
                "a step has %d packs from here on; up to step %d it had %d, as batch_size and "
                "gradient_accumulation_steps were others",
                self.loader.packs_per_step, self.saved_step, before["packs_per_step"],
            )  # fmt: skip
        lanes = self.dataset.lane_config
        if self._pairs:
            require_pairs(lanes)
        if cfg.verify_isolation and cfg.document_masking and not own_collate(cfg.collate_fn):
            # Of a user's own encoder it is not known whether it keeps prompts once.
            shared = self._pairs and any(getattr(encode, "share_prefix", True) for encode in lanes.encoders)
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
        self.log = RunLog(
            cfg, raw=self.raw, loader=self.loader, world=world, device=self.device, resumed=self.saved_step,
            before=self.before, report=report, metrics=metrics, in_effect=in_effect,
        )  # fmt: skip
        if world.is_main:
            end_file(cfg).unlink(missing_ok=True)  # of the run that continues

    def steps(self) -> Iterator[Step]:
        """Yield the steps to make, until the data, the config or a signal ends the run.

        Raises:
            Interrupted: after a signal, when the step that was running is saved.
        """
        cfg, world, loader, most = self.cfg, self.world, self.loader, self.cfg.most_steps
        batches = iter(loader)
        loop = self._closing.enter_context(ExitStack())
        self.log.begin(loop, step=self.step, steps=int(min(self.num_steps, most)))
        self._agreed_signal = loop.enter_context(stop_on_signals(world))
        while self.step < most:
            self.log.meter.start()
            # By the step, so that dropout is the same after a resume.
            seed_step(cfg.seed or 0, self.step, world.data_rank)
            delay_fake_quant(self.model, cfg, step=self.step)
            first = next(batches, None)
            if first is None:
                break  # the last epoch is over, on every rank
            more = islice(batches, loader.batches_per_step - 1)
            yield Step(self.log, chain([first], more), number=self.step + 1, model=self.model)
            if self.stopped:
                self.checkpoints.wait()
                raise Interrupted(number=self.stopped)
        loop.close()

    def end_step(self, step: Step) -> None:
        """Collective: step the learning rate, and log every ``log_every_n_steps``."""
        rate = self.optimizer.param_groups[0]["lr"]
        step_schedule(self.scheduler, step=self.step, steps=self.num_steps)
        self.step += 1
        self.log.end_step(self.step, {"lr": rate} | step.metrics)
        self.stopped = self._agreed_signal()

    def validate(self, evaluate: Evaluate, *, last: bool = False) -> None:
        """Collective: log the losses on the held-out batches: first, by ``run_val_every_n_steps``, and at last.

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
            self.log.logger.log(losses, step=self.step)

    def save(self, *, last: bool = False) -> None:
        """Collective: write a checkpoint after a signal, and by ``save_every_n_steps``, then at last, too."""
        cfg, every = self.cfg, self.cfg.save_every_n_steps
        due = self.stopped or (every and (last or self.step % every == 0))
        if not due or self.saved_step == self.step:
            return
        self.log.by_row.write()  # a run that continues from here has no other rows of the steps since the last log
        state = self.log.totals(self.step) | {
            "begun": self.before["begun"],
            "steps": self.num_steps,
            "asked": asked_of(cfg, self.loader),
            "seed": cfg.seed,
            "dtype": cfg.dtype,
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
        self.log.profiler.stop()
        self.log.by_row.write()
        self.loader.require_trained()
        self.validate(evaluate, last=True)
        self.save(last=True)  # a longer run can continue from here
        self.checkpoints.wait()
        result = self.log.totals(self.step) | {"ledger": run_ledger(self.loader, self.world)}
        final = full_weights(self.model, device=self.device, world=self.world)
        if self.world.is_main:
            saved = write_weights(final, model=self.model, checkpointer=self.checkpointer, config=self.cfg)
            record_end(self.cfg, step=self.step)
            self.log.end(result, saved=saved)
        return result


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
    cfg = read_for_recipe(raw, adapters=adapters, pairs=pairs)
    run = Run(raw, cfg, pairs=pairs, check=check)
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
        saved = run.world.run_on_main(lambda: saved_settings(cfg), of="settings of a run")
        seed = saved.get("seed", SystemRandom().randrange(2**31)) if cfg.seed is None else cfg.seed
        cfg.seed = run.world.broadcast(seed)
        if cfg.dtype == "auto":
            cfg.dtype = saved.get("dtype", pick_dtype(run.device))
        if (mode := cfg.cudnn_deterministic_mode) is not None:
            training.set_seed(cfg.seed, debug_mode=mode)
        seed_step(cfg.seed, 0)
        yield run
