"""Mutants of training."""

from __future__ import annotations

from typing import Any

from tests.mutants.registry import mutant, patch, patch_function


@mutant
def a_step_divided_by_its_first_batch() -> None:
    """A step's loss is divided by the trained tokens of its first micro-batch, not by those of all."""
    from streampack.training.meters import StepMeter

    def make(good: Any) -> Any:
        def add(self: Any, batch: Any, loss: Any, weights: Any, **settings: Any) -> None:
            good(self, batch, loss, weights * (self.batches == 0), **settings)

        return add

    patch(StepMeter, "add", make)


@mutant
def speed_with_padding() -> None:
    """``tokens_per_second`` counts padding, so that the emptiest packs look like the fastest training."""
    from streampack.training.meters import StepMeter

    def make(good: Any) -> Any:
        def metrics(self: Any) -> Any:
            found = good(self)
            if found["padding"] < 1:
                found["tokens_per_second"] /= 1 - found["padding"]
            return found

        return metrics

    patch(StepMeter, "metrics", make)


@mutant
def moments_forgotten_by_a_resume() -> None:
    """A checkpoint restores the weights, and the optimizer begins anew."""
    from streampack.training.checkpoint import Checkpoints

    def make(good: Any) -> Any:
        def load(self: Any, step: int, *, model: Any, optimizer: Any) -> Any:
            run = good(self, step, model=model, optimizer=optimizer)
            optimizer.state.clear()
            return run

        return load

    patch(Checkpoints, "load", make)


@mutant
def rate_of_the_first_step_after_a_resume() -> None:
    """After a resume the first step has the learning rate of step 0: the schedule knows its step, the optimizer not."""
    from streampack.training.checkpoint import restore_schedule

    def make(good: Any) -> Any:
        return lambda scheduler, state: scheduler.load_state_dict(dict(state))

    patch_function(restore_schedule, make)


@mutant
def seeds_counted_from_the_resume() -> None:
    """Dropout is seeded by the steps of this process, so that a resumed run repeats that of its first steps."""
    from streampack.training.model import seed_step

    def make(good: Any) -> Any:
        steps = iter(())

        def seed(seed: int, step: int, *rank: int) -> None:
            nonlocal steps
            if not rank:  # before the model is built
                steps = iter(range(1 << 62))
            good(seed, next(steps, step) if rank else step, *rank)

        return seed

    patch_function(seed_step, make)


@mutant
def keys_of_adapters_in_the_wrong_order() -> None:
    """PEFT's adapters of keys have torchtune's order of rows, those of queries Hugging Face's."""
    from streampack.training.lora import peft_weights

    def make(good: Any) -> Any:
        def converted(weights: Any, model: Any) -> Any:
            found = good(weights, model)
            return {
                name: given if "k_proj.lora_b" in old else value
                for (old, given), (name, value) in zip(weights.items(), found.items(), strict=True)
            }

        return converted

    patch_function(peft_weights, make)


@mutant
def no_dropout_after_a_validation() -> None:
    """A validation leaves the model in eval mode, and training goes on without dropout."""
    from streampack.training.evaluation import evaluate

    def make(good: Any) -> Any:
        def found(model: Any, *args: Any, **settings: Any) -> Any:
            losses = good(model, *args, **settings)
            model.eval()
            return losses

        return found

    patch_function(evaluate, make)


@mutant
def sources_of_equal_weight_in_a_validation() -> None:
    """The validation loss of a mixture is the plain mean of its sources' losses, whatever their fractions."""
    from streampack.training.evaluation import evaluate

    def make(good: Any) -> Any:
        def found(model: Any, held_out: Any, **settings: Any) -> Any:
            return good(
                model, {name: each._replace(weight=1.0) for name, each in held_out.items()}, **settings
            )

        return found

    patch_function(evaluate, make)


@mutant
def losses_of_rows_one_token_late() -> None:
    """The log of rows books the loss of a sequence's last token to the sequence behind it."""
    from streampack.training.row_losses import RowLosses

    def make(good: Any) -> Any:
        return lambda self, batch, losses, weights: good(self, batch, losses.roll(1, 1), weights)

    patch(RowLosses, "add", make)
