"""The fence against a forgotten prepare: a loader of Trainer's or accelerate's that cannot batch packs."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import default_collate

from streampack.packing.batch import collate_packed

PREPARE = "call prepare_trainer_for_packing(trainer) before it trains or evaluates"


def refuse_foreign_loader(dataset: object, *, way_out: str = PREPARE) -> None:
    """Raise if a loader that accelerate has prepared, as Trainer does, reads a dataset and would spoil its packs.

    It spoils them if it removes columns, if its collator drops boundaries, or if it dispatches: then it knows no
    `Batch`, and cuts each tensor of a dict to as many rows as the first one has, ``cu_seq_lens`` too. Collators of
    other libraries, and the user's own, pass: they may be made for packs.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    loader: Any = state().active_dataloader if state is not None else None
    if loader is None or loader.dataset is not dataset:
        return
    collate, removes = loader.collate_fn, False
    if type(collate).__name__ == "RemoveColumnsCollator":  # Trainer's, around the collator
        removes = "tokens" not in collate.signature_columns
        collate = collate.data_collator
    collate = getattr(collate, "func", collate)  # of a partial
    named = collate if hasattr(collate, "__qualname__") else type(collate)
    if named.__module__.partition(".")[0] in ("transformers", "trl"):
        raise ValueError(
            f"this Trainer would batch packs with {named.__qualname__}, which does not know them: the model would get "
            f"no input_ids, and no boundaries between samples; {way_out}"
        )
    if removes:
        raise ValueError(
            "Trainer removes the columns of packs that the model's forward does not name, tokens and seq_lens among "
            f"them, before {named.__qualname__} sees them; set remove_unused_columns=False in TrainingArguments"
        )
    # torch's default makes a `Batch` of packs, too.
    cuts = collate in (collate_packed, default_collate) or getattr(collate, "return_flash_attn_kwargs", False)
    if cuts and type(loader).__name__ == "DataLoaderDispatcher":
        raise ValueError(
            "a loader that accelerate prepares for an iterable dataset cuts its batches into rows, and boundaries of "
            "packs are no rows; iterate a PackedDataLoader, which accelerate leaves alone, or under Hugging Face's "
            "Trainer call prepare_trainer_for_packing(trainer)"
        )
