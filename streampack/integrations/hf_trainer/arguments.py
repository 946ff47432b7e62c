"""Checks of a trainer's arguments: refuse those that would train packs wrongly, log unused ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from streampack.distributed.ranks import model_parallel_warning
from streampack.integrations.hf_trainer.epochs import require_epochs
from streampack.streaming.dataset import IterablePackedDataset

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)

# Arguments of Trainer's own loader. `tests/integrations/test_hf_trainer_arguments.py` lists all others.
_UNUSED = (
    "dataloader_drop_last", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns", "length_column_name",
    "ignore_data_skip", "pad_to_multiple_of",
)  # fmt: skip
_UNUSED_BY_LOADER = ("dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
# Arguments of TRL's tokenization.
_OF_ROWS = (
    "chat_template_path", "eos_token", "pad_token", "dataset_text_field", "max_length", "truncation_mode",
    "shuffle_dataset", "completion_only_loss", "assistant_only_loss",
)  # fmt: skip


def require_settings(trainer: Trainer, packs: IterablePackedDataset) -> None:
    """Refuse settings of the trainer that would make the loss or the order of packs wrong, all at once."""
    if faults := list(_faults(trainer, packs)):
        raise ValueError("\n".join(faults))
    if trainer.args.max_steps <= 0:
        require_epochs(packs, trainer.args)


def _faults(trainer: Trainer, packs: IterablePackedDataset) -> Iterator[str]:
    args, config = trainer.args, packs.lane_config
    for name in ("packing", "padding_free", "eval_packing"):
        if getattr(args, name, False):
            yield (
                f"{type(args).__name__} has {name}=True, and in rows that TRL has packed or flattened, samples would "
                "see one another; leave it out, packing is done here"
            )
    if args.include_num_input_tokens_seen == "non_padding":
        yield (
            "include_num_input_tokens_seen='non_padding' sums the attention mask, which holds boundaries here; leave "
            "it out, the logs have num_tokens"
        )
    if trainer.neftune_noise_alpha is not None:
        yield (
            f"neftune_noise_alpha={trainer.neftune_noise_alpha} divides its noise by the root of a row's length, a "
            "pack's here: each sample would get less noise than alone; leave it out"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False weighs each rank's tokens by their number, and a rank may have none; "
            "leave it at True"
        )
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
        yield (
            f"{type(trainer.model).__name__} does not take num_items_in_batch, so each batch would weigh the same, "
            "however few tokens it trains; give Trainer a compute_loss_func"
        )
    if args.n_gpu > 1:
        yield (
            f"this process has {args.n_gpu} GPUs and DataParallel would cut packs' boundaries apart; start one process "
            "for each (torchrun, accelerate launch), or set CUDA_VISIBLE_DEVICES to one"
        )
    order = args.train_sampling_strategy
    if order in ("group_by_length", "batch_rebalance"):
        yield (
            f"train_sampling_strategy={order!r} orders rows of Trainer's own loader by length; leave it out: full "
            "packs need no padding, and balance_window evens out the work of ranks"
        )
    elif order == "sequential" and config.shuffle_window:
        yield (
            "train_sampling_strategy='sequential' keeps the order of rows, and the packs shuffle; leave it out, or "
            "give IterablePackedDataset shuffle=False"
        )
    if args.data_seed not in (None, config.seed):
        yield (
            f"data_seed={args.data_seed} seeds Trainer's own loader, and the packs have seed={config.seed}; give "
            f"IterablePackedDataset seed={args.data_seed}, or leave it out"
        )
    if args.world_size > 1 and args.accelerator_config.split_batches:
        yield (
            "split_batches=True divides per_device_train_batch_size among the ranks, and here each rank gets that many "
            "packs; leave it out, and divide per_device_train_batch_size by the number of ranks"
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        # Trainer's get_tp_size and the like know of models loaded with a tp_plan and of DeepSpeed's settings.
        size = max(getattr(parallelism, name, 1), getattr(trainer, f"get_{name}", lambda: 1)())
        if size > 1:
            yield (
                f"{name} is {size}: those ranks must see the same packs, and each rank gets its own; use data "
                "parallelism only (DDP, FSDP, ZeRO)"
            )
    if why := model_parallel_warning(trainer.model):
        yield why


def log_unused(trainer: Trainer, packs: IterablePackedDataset) -> None:
    """Log settings that a stock trainer uses for its data, and that mean nothing for these packs."""
    args, config = trainer.args, packs.lane_config
    if args.process_index:
        return
    loader = [f"accelerator_config.{each}" for each in _changed(args.accelerator_config, _UNUSED_BY_LOADER)]
    if found := [*_changed(args, _UNUSED), *loader, *_collator_of(trainer)]:
        log.warning(
            "packs do not use %s; Trainer's own loader does, for data of other kinds", ", ".join(found)
        )
    if not config.shuffle_window and config.source.map_style and args.train_sampling_strategy == "random":
        log.warning(
            "the packs read rows in their order, and Trainer would shuffle them; shuffle=True does so here"
        )
    if not hasattr(args, "dataset_kwargs"):
        return  # no trainer of TRL's
    if {*_datasets_in(packs)}.isdisjoint(_datasets_in(trainer.train_dataset)):
        if of_rows := _changed(args, _OF_ROWS):
            log.warning(
                "the packs are not the rows of trainer.train_dataset, and TRL prepares only those by %s",
                ", ".join(of_rows),
            )
    elif args.max_length is not None and args.max_length < config.packing.max_seq_len:
        log.warning(
            "max_length=%d has cut rows, and packs hold samples of up to %d tokens; with max_length=None the packs' "
            "overlong decides, and the ledger counts what is cut",
            args.max_length, config.packing.max_seq_len,
        )  # fmt: skip


def _changed(args: Any, names: tuple[str, ...]) -> list[str]:
    """Return the named fields of a dataclass that are not their defaults, as text; TRL turns ``"auto"`` into None."""
    return [
        f"{each.name}={value!r}"
        for each in fields(args)
        if each.name in names and (value := getattr(args, each.name)) not in (None, each.default)
    ]


def _collator_of(trainer: Trainer) -> list[str]:
    """Return the trainer's collator, if the user has given one."""
    from transformers import DataCollatorWithPadding, default_data_collator

    collator = trainer.data_collator
    stock = collator is default_data_collator or type(collator) is DataCollatorWithPadding
    if stock or type(collator).__module__.startswith("trl."):
        return []
    return [f"data_collator={getattr(collator, '__name__', type(collator).__name__)}"]


def _datasets_in(data: Any) -> Iterator[int]:
    """Yield the identities of a dataset, or of those that are packed, and of the datasets that they wrap."""
    leaves = data.lane_config.source.leaves().values() if isinstance(data, IterablePackedDataset) else [data]
    for part in leaves:
        while part is not None:
            yield id(part)
            part = getattr(part, "dataset", None)
