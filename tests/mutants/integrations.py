"""Mutants of integrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.mutants.registry import mutant, patch, patch_function


@mutant
def accumulated_batches_weigh_the_same() -> None:
    """Trainer's loss is the mean over the batches that it accumulates, however few tokens one of them trains."""

    def change(trainer: Any) -> None:
        compute_loss = trainer.compute_loss

        def mean(model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            found = compute_loss(model, inputs, return_outputs=return_outputs)
            parts = trainer.args.gradient_accumulation_steps if model.training else 1
            return (found[0] / parts, *found[1:]) if return_outputs else found / parts

        trainer.compute_loss = mean

    change_prepared(change)


@mutant
def evaluated_batches_weigh_the_same() -> None:
    """The loss of an evaluation is Trainer's mean over batches, of which the last is part-empty."""

    def change(trainer: Any) -> None:
        trainer.evaluation_loop = type(trainer).evaluation_loop.__get__(trainer)

    change_prepared(change)


@mutant
def data_from_the_beginning_where_trainer_resumes() -> None:
    """Trainer resumes weights and optimizer, and reads the packs of its first steps again."""
    from streampack import PackedDataLoader

    resuming = False

    def change(trainer: Any) -> None:
        train = trainer.train

        def resume(resume_from_checkpoint: Any = None, *args: Any, **settings: Any) -> Any:
            nonlocal resuming
            resuming = bool(resume_from_checkpoint)
            try:
                return train(resume_from_checkpoint, *args, **settings)
            finally:
                resuming = False

        resume.__self__ = train.__self__  # type: ignore[attr-defined]  # by which a prepared trainer is known
        trainer.train = resume

    def make(good: Any) -> Any:
        return lambda self, state: None if resuming else good(self, state)

    patch(PackedDataLoader, "load_state_dict", make)
    change_prepared(change)


@mutant
def last_step_of_the_epochs_left_out() -> None:
    """Trainer's number of steps, counted from ``num_train_epochs``, is rounded down: the last samples never train."""

    def change(trainer: Any) -> None:
        get = trainer.get_train_dataloader

        def fewer() -> Any:
            given = trainer.args.max_steps
            loader = get()
            if given <= 0 and trainer.args.max_steps > 1:
                trainer.args.max_steps -= 1
            return loader

        trainer.get_train_dataloader = fewer

    change_prepared(change)


@mutant
def packing_of_the_evaluation_by_trl_too() -> None:
    """``eval_packing=True`` passes, and TRL packs the rows of an evaluation before they are packed here."""
    from streampack import prepare_trainer_for_packing

    def make(good: Any) -> Any:
        def prepare(trainer: Any, *args: Any, **settings: Any) -> Any:
            options = getattr(trainer, "args", None)
            if not getattr(options, "eval_packing", False):
                return good(trainer, *args, **settings)
            options.eval_packing = False
            inputs = good(trainer, *args, **settings)
            options.eval_packing = True
            return inputs

        return prepare

    patch_function(prepare_trainer_for_packing, make)


def change_prepared(change: Callable[[Any], None]) -> None:
    """Change trainers that `prepare_trainer_for_packing` has prepared."""
    from streampack import prepare_trainer_for_packing

    def make(good: Any) -> Any:
        def prepare(trainer: Any, *args: Any, **settings: Any) -> Any:
            inputs = good(trainer, *args, **settings)
            change(trainer)
            return inputs

        return prepare

    patch_function(prepare_trainer_for_packing, make)
