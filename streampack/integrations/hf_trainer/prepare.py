"""Packed streams under transformers' `Trainer` and trainers derived from it, such as TRL's `SFTTrainer`."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from streampack.attention import Inputs
from streampack.integrations.hf_trainer.arguments import log_unused, require_settings
from streampack.integrations.hf_trainer.callback import step_callback
from streampack.integrations.hf_trainer.evaluation import require_end
from streampack.integrations.hf_trainer.hooks import Hooks, hooks_of
from streampack.integrations.hf_trainer.images import set_up_for_images
from streampack.integrations.hf_trainer.opening import print_opening
from streampack.streaming.dataset import IterablePackedDataset

if TYPE_CHECKING:
    from transformers import Trainer


def prepare_trainer_for_packing(
    trainer: Trainer,
    *,
    train_dataset: IterablePackedDataset | None = None,
    eval_dataset: IterablePackedDataset | dict[str, IterablePackedDataset] | None = None,
    attention: str = "auto",
    verify_isolation: bool = True,
) -> Inputs:
    """Patch a `Trainer` to train on a stream of packs, on any number of ranks, with exact resumes.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    >>> from streampack import IterablePackedDataset
    >>> packs = IterablePackedDataset([{"tokens": [1, 2, 3], "labels": [1, 2, 3]}] * 9, max_seq_len=8)
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    >>> args = TrainingArguments(tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
    ...     report_to="none", disable_tqdm=True, log_level="error", logging_strategy="no", save_strategy="no")
    >>> trainer = Trainer(model, args, train_dataset=packs)
    >>> inputs = prepare_trainer_for_packing(trainer)  # doctest: +ELLIPSIS
    attention=varlen, float32 on cpu; a step is 2 packs of about 1.8 samples: 4 samples in up to 16 tokens; ...
    >>> trainer.train().global_step  # doctest: +ELLIPSIS
    {'train_runtime': ...}
    2

    ``per_device_train_batch_size`` counts packs; a step trains the next ``per_device_train_batch_size *
    gradient_accumulation_steps * ranks`` packs of the stream, with the mean over their trained tokens as its loss. So
    is the loss of an evaluation. Every checkpoint holds the stream's state, and ``train(resume_from_checkpoint=...)``
    continues with the next packs, on another number of ranks too. The training ends with its data, if that is before
    ``max_steps``. Without ``max_steps``, ``num_train_epochs`` says how often packs with ``epochs=1`` are read. A step
    that trains nothing is an error, unless the packs have ``untrained="keep"``. The guide says what the logs have, and
    what differs.

    Prints one line: the backend and why each better one was refused, the dtype, samples and tokens of a step, and the
    padding expected. The backend's part is the ``summary`` of what this returns.

    A trainer may be prepared again; the last call counts. `Trainer` over map-style data needs none of this:
    ``data_collator=FlatteningCollator()`` suffices.

    Args:
        trainer: not trained yet; its model is prepared as by `prepare_model_for_packing`.
        train_dataset: packs to train on. Default: the trainer's own. `SFTTrainer` accepts only classes of `datasets`:
            pack what it has tokenized, with ``encoder=TokensEncoder(tokens="input_ids")``, or give it a `Dataset` of
            one row, and the packs here.
        eval_dataset: packs of one epoch to evaluate on, or a dict of them. Default: the trainer's own. Data of other
            kinds are read by Trainer's own loader.
        attention: see `prepare_model_for_packing`.
        verify_isolation: check the model before the first step, in the form in which it trains (12 passes of a
            pack of 256 tokens, more for longer windows), and stop if samples see one another. See `find_leaks`.

    Raises:
        ValueError: for a model whose samples would see one another, data that is no stream of packs, and settings
            under which the loss or the order of packs would be wrong. The message says what to do.
    """
    _require_next_token_loss(trainer)
    packs = trainer.train_dataset if train_dataset is None else train_dataset
    if not isinstance(packs, IterablePackedDataset):
        raise ValueError(
            f"train_dataset is a {type(packs).__name__}; give an IterablePackedDataset, or leave this trainer's "
            "loader as it is, with data_collator=FlatteningCollator()"
        )
    held_out = trainer.eval_dataset if eval_dataset is None else eval_dataset
    for name, data in (held_out if isinstance(held_out, dict) else {"eval_dataset": held_out}).items():
        if isinstance(data, IterablePackedDataset):
            require_end(data, name)
    if trainer.label_smoother is not None:
        # Trainer shifts labels for classes that it lists as causal only; others would learn the token that they read.
        trainer.label_smoother = partial(trainer.label_smoother, shift_labels=True)
    if packs.lane_config.reads_images:
        set_up_for_images(trainer)
    require_settings(trainer, packs)
    if (earlier := hooks_of(trainer)) is not None:
        earlier.restore()
    hooks = Hooks(trainer, packs, attention=attention, verify=verify_isolation)
    inputs = hooks.inputs
    for data in (packs, *(held_out.values() if isinstance(held_out, dict) else [held_out])):
        if isinstance(data, IterablePackedDataset):
            inputs.require_length(data.lane_config.packing.max_seq_len)
    log_unused(trainer, packs)
    trainer.train_dataset, trainer.eval_dataset = packs, held_out
    hooks.patch(step_callback(hooks))
    print_opening(trainer.args, packs, summary=inputs.summary)
    return inputs


def _require_next_token_loss(trainer: Trainer) -> None:
    """Refuse a trainer or a model that computes another loss than the cross-entropy of the next token."""
    for kind in type(trainer).__mro__:
        other = kind.__name__ not in ("SFTTrainer", "BaseTrainer", "_BaseTrainer")
        if other and kind.__name__.endswith("Trainer") and kind.__module__.startswith("trl."):
            raise ValueError(
                f"{kind.__name__} compares, scores or samples whole answers of padded rows, in a loss of its own; "
                "leave this trainer's loader as it is, or train packed pairs and rollouts with the dpo recipe or the "
                "loops of docs/guides/preferences.md"
            )
    model = trainer.model
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    if head := re.search(
        "For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)", name
    ):
        raise ValueError(
            f"{name} has a head for {head[1]} and predicts no next tokens, for which alone packs have labels; leave "
            "this trainer's loader as it is, with transformers' own collators"
        )
