"""Check that the collator of a DataLoader, or of a Trainer, can make a batch of packs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate

REMOVED = "transformers.trainer_utils.RemoveColumnsCollator"
"""Wraps a Trainer's collator, and hides all columns from it that the model's ``forward`` does not name."""


def refuse_foreign_collator(caller: object, *, map_style: bool = False) -> None:
    """Refuse to give packs to a collator that would drop their tokens or boundaries, or fail without saying why.

    Collators of unknown row_id are left alone: they may well be right.

    Args:
        caller: what asks a dataset for packs; only torch's fetchers, which hold a ``collate_fn``, are looked at.
        map_style: whether the packs are those of a `PackedDataset`.

    Raises:
        ValueError: for the default collator of torch, and for those of transformers and TRL; with the way out.
    """
    if not type(caller).__name__.endswith("DatasetFetcher"):
        return
    collate: Any = getattr(caller, "collate_fn", None)
    if collate is default_collate:
        raise ValueError(
            "torch's default_collate cannot stack packs, which hold different numbers of samples; give the DataLoader "
            "collate_fn=streampack.collate_packed, or iterate a PackedDataLoader"
        )
    name = _name_of(collate)
    removes = name == REMOVED and "tokens" not in collate.signature_columns
    inner = _name_of(collate.data_collator) if name == REMOVED else name
    foreign = inner.startswith(("transformers.", "trl."))
    if removes and not foreign:
        prepare = "" if map_style else ", or call prepare_trainer_for_packing(trainer)"
        raise ValueError(
            "Trainer removes the columns of packs that the model's forward does not name, tokens and seq_lens among "
            f"them, before {inner.rpartition('.')[2]} sees them; set remove_unused_columns=False in TrainingArguments"
            + prepare
        )
    if foreign:
        way_out = (
            "give the Trainer data_collator=FlatteningCollator() and set remove_unused_columns=False in "
            "TrainingArguments"
            if map_style
            else "call prepare_trainer_for_packing(trainer) before it trains or evaluates"
        )
        raise ValueError(
            f"this Trainer would batch packs with {inner.rpartition('.')[2]}, which does not know them: the model "
            f"would get no input_ids, and no boundaries between samples; {way_out}"
        )


def _name_of(collate: Any) -> str:
    """Dotted name of a function, or of an object's class."""
    named = collate if hasattr(collate, "__qualname__") else type(collate)
    return f"{named.__module__}.{named.__qualname__}"
