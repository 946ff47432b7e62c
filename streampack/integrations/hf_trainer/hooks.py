"""The methods that `prepare_trainer_for_packing` patches onto a `Trainer`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streampack.accounting import Ledger
from streampack.attention import Inputs, prepare_model_for_packing
from streampack.attention.pretrained import find_pretrained
from streampack.attention.vision import text_of
from streampack.integrations.hf_trainer.epochs import Plan, plan_epochs, require_same_steps
from streampack.integrations.hf_trainer.evaluation import Evaluation, TokenMean, require_end
from streampack.integrations.hf_trainer.images import require_announced
from streampack.integrations.hf_trainer.steps import (
    Steps,
    make_loader,
    newest_checkpoint,
    read_stream,
    read_trainer,
    write_stream,
)
from streampack.integrations.hf_trainer.weights import load_renamed
from streampack.losses import require_unshared
from streampack.packing.batch import Batch
from streampack.streaming.dataset import IterablePackedDataset

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)

BATCH = "batch"
"""Key of the `Batch` in what the loaders yield."""


def hooks_of(trainer: Trainer) -> Hooks | None:
    """Return the hooks of a trainer that is prepared; None for any other."""
    hooks = getattr(trainer.train, "__self__", None)
    return hooks if isinstance(hooks, Hooks) else None


class Arguments(dict[str, Any]):
    """Arguments of a model. TRL counts tokens by a mask in them only if it is a tensor."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and (name != "attention_mask" or torch.is_tensor(self[name]))


class Hooks:
    """Replacements for methods of one trainer, which call the original ones.

    `patch` sets them on the trainer, so that they work with any class derived from `Trainer`.
    """

    NAMES = (
        "train", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "evaluate", "evaluation_loop",
        "save_model", "log", "_prepare_inputs", "compute_loss", "_get_num_items_in_batch", "_load_from_checkpoint",
        "_load_best_model",
    )  # fmt: skip

    def __init__(
        self, trainer: Trainer, packs: IterablePackedDataset, *, attention: str, verify: bool = True
    ) -> None:
        self.trainer, self.packs = trainer, packs
        self.attention, self.verify = attention, verify
        self.originals = {name: getattr(trainer, name) for name in self.NAMES}
        self.callback: Any = None
        self.checkpoint: Path | None = None  # the folder from which the current training resumes
        self.steps: Steps | None = None  # the loader of the newest training
        self.plan: Plan | None = None  # the number of steps, if num_train_epochs sets it
        self.first_epoch = 0  # the packs' epoch in which the first training began
        self.evaluations: dict[IterablePackedDataset, Evaluation] = {}
        self.token_mean: TokenMean | None = None  # the loss of the evaluation that is running
        self.ledger: Ledger | None = None  # of all ranks, after the newest training that came to its end
        self.totals: dict[str, float] = {}  # what is logged of all ranks: token totals, waiting, imbalance
        self._num_trained: Any = None  # tokens of all ranks in the step, or in the batch of an evaluation
        # With their model and device.
        self._inputs: tuple[Inputs, Any, torch.device] | None = None

    def patch(self, callback: Any) -> None:
        """Patch the trainer and add its callback."""
        self.callback = callback
        for name in self.originals:
            setattr(self.trainer, name, getattr(self, name))
        self.trainer.add_callback(callback)
        self.ignored_data_skip = self.trainer.args.ignore_data_skip
        # Trainer must not skip batches: the stream resumes by its own state.
        self.trainer.args.ignore_data_skip = True

    def restore(self) -> None:
        """Undo `patch`: put back the original methods and argument, and remove the callback."""
        for name, method in self.originals.items():
            setattr(self.trainer, name, method)
        self.trainer.remove_callback(self.callback)
        self.trainer.args.ignore_data_skip = self.ignored_data_skip

    @property
    def inputs(self) -> Inputs:
        """Inputs for the current model. Trainer may make the model again (``model_init``) or move it when it trains."""
        model = find_pretrained(self.trainer.model)
        if model is None:
            raise ValueError(
                f"{type(self.trainer.model).__name__} is not a Hugging Face model; for other models, iterate a "
                "PackedDataLoader in a loop of your own"
            )
        if self._inputs is None or self._inputs[1:] != (model, model.device):
            with self.trainer.accelerator.autocast():  # kernels are chosen by the dtype in which they compute
                made = prepare_model_for_packing(self.trainer.model, attention=self.attention)
            self._inputs = made, model, model.device
        return self._inputs[0]

    def to_device(self, batch: Batch) -> dict[str, Any]:
        """Return a batch on the model's device, and what Trainer reads of it; refuse what cross-entropy cannot train.

        Trainer collects all batches of a step before it begins. So `_prepare_inputs` makes their masks, one at a time.
        """
        require_unshared(batch)
        if batch.media is not None:
            require_announced(self.packs)
        # Here, where reading ids does not wait for a GPU.
        self.inputs.require_tokens(text_of(batch, find_pretrained(self.trainer.model).config))
        batch = batch.to(self.trainer.args.device)
        return {"input_ids": batch.tokens, "labels": batch.labels, BATCH: batch}

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments for a batch of packs, with its masks."""
        if isinstance(batch := inputs.get(BATCH), Batch):
            inputs = Arguments(self.inputs(batch), labels=batch.labels)
        return self.originals["_prepare_inputs"](inputs)  # type: ignore[no-any-return]

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; resume the stream from the checkpoint, and end the stream's worker processes afterwards."""
        words = {"True": True, "False": None}  # as a command line gives them, which may give a path, too
        resume_from_checkpoint = words.get(str(resume_from_checkpoint), resume_from_checkpoint)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.trainer.args.output_dir)
        self.checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if self.checkpoint is not None:
            read_trainer(self.checkpoint)  # before Trainer loads any of it
        trainer = self.trainer
        by_ddp = trainer.accelerator.distributed_type.value.startswith("MULTI_")
        if by_ddp and trainer.model_wrapped is trainer.model:
            # An earlier evaluation has marked the model as prepared. accelerate would then skip DDP, and each rank
            # would train a model of its own.
            trainer.model._is_accelerate_prepared = False
        max_steps, epochs = trainer.args.max_steps, self.packs.epochs
        try:
            result = self.originals["train"](resume_from_checkpoint, trial, ignore_keys_for_eval)
            if self.steps is not None:
                self.steps.loader.require_trained()
                self.ledger = self.steps.ledger()
            self._warn_of_untrained_data()
            return result
        finally:
            self.checkpoint = self.plan = None
            trainer.args.max_steps, self.packs.epochs = max_steps, epochs
            if self.steps is not None:
                self.steps.close()

    def _warn_of_untrained_data(self) -> None:
        """Collective: warn if the training ended before the data, because its number of steps was estimated."""
        if self.plan is None or self.plan.exact or self.plan.epochs % 1 or self.steps is None:
            return
        made, planned = self.trainer.state.global_step, self.trainer.state.max_steps
        if made >= planned and self.steps.has_more():
            log.warning(
                "max_steps=%d was estimated and leaves data untrained; set a higher max_steps", planned
            )

    def get_train_dataloader(self) -> Steps:
        """Return the packed batches, without accelerate, which would shard them among the ranks again."""
        args = self.trainer.args
        # _train_batch_size is per_device_train_batch_size, or less with auto_find_batch_size.
        accumulation = args.gradient_accumulation_steps
        state = None if self.checkpoint is None else read_stream(self.checkpoint)
        loader = make_loader(args, self.packs, self.trainer._train_batch_size, accumulation, state=state)
        if self.steps is None:
            self.first_epoch = self.packs.epoch
        # A second training reads the same packs as the first, as with Trainer's own loaders.
        self.packs.set_epoch(self.first_epoch)
        steps_before = 0
        if self.checkpoint is not None and state is not None:
            loader.load_state_dict(state)
            steps_before = read_trainer(self.checkpoint)["global_step"]
        if loader.batches_per_step != accumulation:
            raise ValueError(
                f"num_lanes={self.packs.lanes_for(1)} cannot be divided evenly by {args.world_size} ranks: a step "
                f"would have {loader.batches_per_step} batches on each, and Trainer takes {accumulation} "
                "(gradient_accumulation_steps); use a number of ranks that divides the lanes, or in a new run set "
                "num_lanes to a multiple of the ranks"
            )
        # With auto_find_batch_size, Trainer calls this again for another batch size, which needs another plan.
        if self.plan is not None or args.max_steps <= 0:
            require_same_steps(loader, state)
            self.packs.epochs = math.ceil(args.num_train_epochs)
            self.plan = plan_epochs(loader, args.num_train_epochs)
            args.max_steps = self.plan.total
        self.steps = Steps(loader, self.to_device, trainer=self.trainer, steps_before=steps_before)
        return self.steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return packed batches for packs, and the trainer's own loader for other data."""
        data = self.trainer.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.trainer.eval_dataset[data]
        if not isinstance(data, IterablePackedDataset):
            return self.originals["get_eval_dataloader"](eval_dataset)
        if data not in self.evaluations:
            require_end(data, "eval_dataset")
            loader = make_loader(self.trainer.args, data, self.trainer.args.per_device_eval_batch_size)
            self.evaluations[data] = Evaluation(loader, self.to_device)
        return self.evaluations[data]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return packed batches for packs, and the trainer's own loader for other data."""
        if isinstance(test_dataset, IterablePackedDataset):
            return self.get_eval_dataloader(test_dataset)
        return self.originals["get_test_dataloader"](test_dataset)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Any:
        """Evaluate; hand on packs as ``trainer.eval_dataset``, because TRL would tokenize them as an argument."""
        given = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        if not any(isinstance(data, IterablePackedDataset) for data in given):
            return self.originals["evaluate"](eval_dataset, ignore_keys, metric_key_prefix)
        before, self.trainer.eval_dataset = self.trainer.eval_dataset, eval_dataset
        try:
            return self.originals["evaluate"](None, ignore_keys, metric_key_prefix)
        finally:
            self.trainer.eval_dataset = before

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate with the mean over trained tokens as the loss, and without null packs in the number of samples."""
        self.token_mean = token_mean = TokenMean(self.trainer)
        try:
            output = self.originals["evaluation_loop"](
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self.token_mean = None
        token_mean.apply(output.metrics, f"{metric_key_prefix}_loss")
        if isinstance(dataloader, Evaluation):
            output = output._replace(num_samples=dataloader.count_packs())
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the stream's state before the model, when this is part of a checkpoint.

        Trainer saves its own state last, and removes older checkpoints afterwards. So a checkpoint with both states is
        complete, and a run that is killed while it saves still has the one before.
        """
        if _internal_call and output_dir is not None and self.steps is not None:
            state = self.steps.state_dict()
            if self.trainer.args.should_save:
                write_stream(state, Path(output_dir))
        self.originals["save_model"](output_dir, _internal_call=_internal_call)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not load_renamed(self.trainer, resume_from_checkpoint):
            self.originals["_load_from_checkpoint"](resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not load_renamed(self.trainer, self.trainer.state.best_model_checkpoint):
            self.originals["_load_best_model"]()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the training's numbers together with those of all ranks."""
        self.originals["log"](logs | self.totals if "loss" in logs else logs, start_time)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute a loss that weights the tokens of all ranks equally, in an evaluation too.

        TRL weights ranks equally there: a null pack beside another rank's full pack would count as a loss of 0.
        """
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.trainer.args.device)
        result = self.originals["compute_loss"](
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if self.token_mean is not None and torch.is_tensor(self._num_trained):
            self.token_mean.add(result[0] if return_outputs else result, self._num_trained)
        if self.steps is not None and self.token_mean is None and self.trainer.model.training:
            self.steps.prefetch()  # the host has queued the forward pass, and has time
        return result

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count trained tokens; return at least 1, because the loss of a step of prompts only would be 0 / 0."""
        self._num_trained = count = self.originals["_get_num_items_in_batch"](batch_samples, device)
        return count.clamp(min=1) if torch.is_tensor(count) else count

    def update_totals(self, *, logged: bool) -> None:
        """Collective: update the numbers of all ranks that are logged next; ``logged``: before an evaluation too."""
        assert self.steps is not None
        self.totals = self.steps.totals(metered=logged)
        # TRL logs num_tokens too, as the sum of the attention mask, which may hold boundaries here. So its numbers are
        # replaced.
        if hasattr(self.trainer, "_total_train_tokens"):
            self.trainer._total_train_tokens = self.totals["num_tokens"]
            self.trainer._metrics["train"]["num_tokens"] = [self.totals["num_tokens"]]
