"""Mutants of integrations."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from tests.mutants.registry import replaces


def changing_trainers(change: Callable[[Any], None]) -> Any:
    """Change trainers that `prepare_trainer_for_packing` has prepared."""

    @wraps(change)
    def prepare(good: Any, trainer: Any, *args: Any, **settings: Any) -> Any:
        inputs = good(trainer, *args, **settings)
        change(trainer)
        return inputs

    return replaces("streampack:prepare_trainer_for_packing")(prepare)


@changing_trainers
def accumulated_batches_weigh_the_same(trainer):
    """Trainer's loss is the mean over the batches that it accumulates, however few tokens one of them trains."""
    compute_loss = trainer.compute_loss

    def mean(model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        found = compute_loss(model, inputs, return_outputs=return_outputs)
        parts = trainer.args.gradient_accumulation_steps if model.training else 1
        return (found[0] / parts, *found[1:]) if return_outputs else found / parts

    trainer.compute_loss = mean


@changing_trainers
def evaluated_batches_weigh_the_same(trainer):
    """The loss of an evaluation is Trainer's mean over batches, of which the last is part-empty."""
    trainer.evaluation_loop = type(trainer).evaluation_loop.__get__(trainer)


@changing_trainers
def data_from_the_beginning_where_trainer_resumes(trainer):
    """Trainer resumes weights and optimizer, and reads the packs of its first steps again."""
    from streampack import PackedDataLoader

    train, load = trainer.train, PackedDataLoader.load_state_dict

    def resume(resume_from_checkpoint: Any = None, *args: Any, **settings: Any) -> Any:
        if resume_from_checkpoint:
            PackedDataLoader.load_state_dict = lambda self, state: None
        try:
            return train(resume_from_checkpoint, *args, **settings)
        finally:
            PackedDataLoader.load_state_dict = load

    resume.__self__ = train.__self__  # by which a prepared trainer is known
    trainer.train = resume


@changing_trainers
def last_step_of_the_epochs_left_out(trainer):
    """Trainer's number of steps, counted from ``num_train_epochs``, is rounded down: the last samples never train."""
    get = trainer.get_train_dataloader

    def fewer() -> Any:
        given = trainer.args.max_steps
        loader = get()
        if given <= 0 and trainer.args.max_steps > 1:
            trainer.args.max_steps -= 1
        return loader

    trainer.get_train_dataloader = fewer


@replaces("streampack:prepare_trainer_for_packing")
def packing_of_the_evaluation_by_trl_too(good, trainer, *args, **settings):
    """``eval_packing=True`` passes, and TRL packs the rows of an evaluation before they are packed here."""
    options = getattr(trainer, "args", None)
    if not getattr(options, "eval_packing", False):
        return good(trainer, *args, **settings)
    options.eval_packing = False
    inputs = good(trainer, *args, **settings)
    options.eval_packing = True
    return inputs


@changing_trainers
def masks_of_all_micro_batches_at_once(trainer):
    """All masks of a step are made when Trainer collects its batches: 16 times the bytes with accumulation 16."""
    get, prepare = trainer.get_batch_samples, trainer._prepare_inputs

    def collect(*given: Any) -> Any:
        batches, count = get(*given)
        return [prepare(batch) for batch in batches], count

    trainer.get_batch_samples = collect


@replaces("streampack.integrations.hf_trainer.steps:Steps", "prefetch")
def next_batch_after_the_backward_pass(good, steps):
    """The next batch is packed and copied when the GPU has nothing left to do."""


@replaces("streampack.integrations.hf_trainer.steps:Steps", "_after_last_step")
def saves_after_the_step_that_was_only_fetched(good, steps):
    """A save in the middle of a step has the stream's position after it: a resume loses the step's packs."""
    made = steps.trainer.state.global_step
    steps.trainer.state.global_step = max(made, steps._made)
    try:
        return good(steps)
    finally:
        steps.trainer.state.global_step = made
