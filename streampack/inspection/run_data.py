"""The training data of a config, built to be looked at: nothing is written."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

from streampack.instantiate import build
from streampack.sources.bad_records import quarantine_for
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.world import World

if TYPE_CHECKING:
    from streampack.training.config import RunConfig


def training_data(config: RunConfig) -> IterablePackedDataset:
    """Build the training dataset of a config. Bad records that it skips are not listed.

    Raises:
        ValueError: for a data or validation section that does not fit.
    """
    from streampack.training.data import build_datasets  # it needs torchtune

    vocab_size = config.model.get("vocab_size")
    data = dict(config.data)
    # Lists of bad records are named by output_dir, where nothing is to be written.
    kept = quarantine_for(config.data.get("skip_bad"))
    data["skip_bad"] = kept and replace(kept, folder=None)
    with tempfile.TemporaryDirectory() as scratch:
        return build_datasets(
            replace(config, output_dir=scratch, data=data),
            tokenizer=build(config.tokenizer),
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            world=World(),
        ).train
