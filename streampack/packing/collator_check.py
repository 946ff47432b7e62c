"""A check that the collator of a DataLoader or Trainer can batch packs."""

from __future__ import annotations

from typing import Any

from streampack.packing.encoders.base import qualified_name

COLUMN_REMOVER = "transformers.trainer_utils.RemoveColumnsCollator"
"""A Trainer's wrapper around its collator. It removes all columns that the model's ``forward`` does not name."""


def refuse_foreign_collator(collate: Any, *, map_style: bool = False) -> None:
    """Raise if packs would go to a collator that drops their tokens or boundaries, or fails without a clear error.

    Collators of other libraries, and the user's own, pass: they may be made for packs.

    Args:
        collate: the collator.
        map_style: whether the packs are those of a `PackedDataset`.

    Raises:
        ValueError: for collators of transformers and TRL; with the way out.
    """
    name = qualified_name(collate)
    removes = name == COLUMN_REMOVER and "tokens" not in collate.signature_columns
    inner = qualified_name(collate.data_collator) if name == COLUMN_REMOVER else name
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
