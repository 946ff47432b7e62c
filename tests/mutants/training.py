"""Mutants of training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

from tests.mutants.registry import replaces


@replaces("streampack.training.meters:CountMeter", "add")
def a_step_divided_by_its_first_batch(good, self, batch, loss, weights, **settings):
    """A step's loss is divided by the trained tokens of its first micro-batch, not by those of all."""
    good(self, batch, loss, weights * (not any(self.counts)), **settings)


@replaces("streampack.training.preferences:at_first_token")
def places_of_pairs_sent_with_a_wait(good, values, batch, index):
    """The host waits for the device to copy the places of pairs, in each micro-batch. No number changes."""
    index.to(values.device)
    return good(values, batch, index)


@replaces("streampack.training.meters:sums_by_sequence")
def owners_of_tokens_sent_to_the_device(good, batch, *values):
    """Which sequence each token is of is made on the host, and copied unpinned as int64. No number changes."""
    torch.zeros(batch.tokens.shape, dtype=torch.int64).to(values[0].device, non_blocking=True)
    return good(batch, *values)


@replaces("streampack.training.meters:CountMeter", "metrics")
def speed_with_padding(good, self):
    """``tokens_per_second`` counts padding, so that the emptiest packs look like the fastest training."""
    found = good(self)
    if found["padding"] < 1:
        found["tokens_per_second"] /= 1 - found["padding"]
    return found


@replaces("streampack.training.checkpoint:Checkpoints", "load")
def moments_forgotten_by_a_resume(good, self, step, *, model, optimizer):
    """A checkpoint restores the weights, and the optimizer begins anew."""
    run = good(self, step, model=model, optimizer=optimizer)
    optimizer.state.clear()
    return run


@replaces("streampack.training.schedule:restore_schedule")
def rate_of_the_first_step_after_a_resume(good, scheduler, state):
    """After a resume the first step has the learning rate of step 0: the schedule knows its step, the optimizer not."""
    return scheduler.load_state_dict(dict(state))


_steps: Iterator[int] = iter(())  # since a model was built


@replaces("streampack.training.model:seed_step")
def seeds_counted_from_the_resume(good, seed, step, *rank):
    """Dropout is seeded by the steps of this process, so that a resumed run repeats that of its first steps."""
    global _steps
    if not rank:  # before the model is built
        _steps = count()
    good(seed, next(_steps, step) if rank else step, *rank)


@replaces("streampack.training.weights:peft_weights")
def keys_of_adapters_in_the_wrong_order(good, weights, model):
    """PEFT's adapters of keys have torchtune's order of rows, those of queries Hugging Face's."""
    found = good(weights, model)
    return {
        name: given if "k_proj.lora_b" in old else value
        for (old, given), (name, value) in zip(weights.items(), found.items(), strict=True)
    }


@replaces("streampack.training.evaluation:evaluate")
def no_dropout_after_a_validation(good, model, *args, **settings):
    """A validation leaves the model in eval mode, and training goes on without dropout."""
    losses = good(model, *args, **settings)
    model.eval()
    return losses


@replaces("streampack.training.evaluation:evaluate")
def sources_of_equal_weight_in_a_validation(good, model, held_out, **settings):
    """The validation loss of a mixture is the plain mean of its sources' losses, whatever their fractions."""
    return good(model, {name: each._replace(weight=1.0) for name, each in held_out.items()}, **settings)


@replaces("streampack.training.row_losses:RowLosses", "add")
def losses_of_rows_one_token_late(good, self, batch, losses, weights, *, step):
    """The log of rows books the loss of a sequence's last token to the sequence behind it."""
    return good(self, batch, losses.roll(1, 1), weights, step=step)
