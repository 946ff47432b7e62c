"""The callback of a prepared trainer: checks isolation before the first step, and updates epochs and token totals."""

from __future__ import annotations

from typing import Any

from streampack.attention.probe import find_leaks
from streampack.attention.probe_packs import probe_length
from streampack.integrations.hf_trainer.hooks import Hooks


def _verify_isolation(hooks: Hooks) -> None:
    """Collective: check that samples of a pack do not see one another in the model as it trains: wrapped, compiled.

    All ranks raise if one does. With a loader of the user's own, only the rank that fails.
    """
    trainer = hooks.trainer
    max_seq_len = hooks.packs.lane_config.packing.max_seq_len

    def check() -> None:
        model = trainer.model_wrapped
        # As in training. The limit of the probe allows for rounding to 16 bits.
        with trainer.accelerator.autocast():
            report = find_leaks(
                model, inputs=hooks.inputs, max_seq_len=probe_length(model, max_length=max_seq_len)
            )
            if report.ok and hooks.packs.lane_config.reads_images:
                report = find_leaks(model, inputs=hooks.inputs, images=True)
        if not report.ok:
            raise ValueError(
                f"{report}\nthe training was stopped before its first step; "
                "prepare_trainer_for_packing(..., verify_isolation=False) lets it train like this"
            )

    if hooks.steps is None:
        check()
    else:
        hooks.steps.loader.rank_sync.gather_results(
            check, doing="checking that samples do not see one another"
        )


def step_callback(hooks: Hooks) -> Any:
    """Return the callback. Trainer runs it after each step, before the step is logged."""
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if hooks.verify:
                _verify_isolation(hooks)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert hooks.steps is not None
            stopped = control.should_epoch_stop or control.should_training_stop
            # At max_steps Trainer calls on_epoch_end itself, because for Trainer the training is a single epoch.
            ends_training = stopped or state.global_step >= state.max_steps
            per_epoch = "epoch" in (args.logging_strategy, args.eval_strategy, args.save_strategy)
            ends_epoch = (per_epoch or hooks.plan) and not ends_training and hooks.steps.ends_epoch()
            if hooks.plan is None:
                # Trainer's own value would count the steps since the resume only.
                state.epoch = state.global_step / state.max_steps
            elif ends_epoch or not (hooks.plan.exact or stopped or hooks.steps.has_more()):
                state.epoch = hooks.steps.epoch + 1
            else:
                state.epoch = hooks.plan.position(hooks.steps.epoch, hooks.steps.steps_in_epoch())
            if ends_epoch:
                handler = hooks.trainer.callback_handler
                handler.on_epoch_end(args, state, control)
                handler.on_epoch_begin(args, state, control)
            if control.should_log or control.should_evaluate:
                hooks.update_totals(logged=control.should_log)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_log or control.should_evaluate:
                hooks.update_totals(logged=control.should_log)

    return StepEnd()
