"""The stream's state in Trainer's checkpoint folders."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

STREAM_FILE = "stream.pt"
"""The stream's state as plain values, so that it can be read with ``weights_only=True``."""
TRAINER_FILE = "trainer_state.json"
PREFIX = "checkpoint-"


def write_stream(state: dict[str, Any], folder: Path) -> None:
    """Write the stream's state as the first file of a checkpoint.

    An older checkpoint in the folder becomes incomplete first, so that no mixture of the two passes for a complete one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINER_FILE).unlink(missing_ok=True)
    torch.save(state, folder / STREAM_FILE)


def read_stream(folder: Path) -> dict[str, Any]:
    """Read the state that `write_stream` wrote.

    Raises:
        ValueError: if the checkpoint has none.
    """
    try:
        state: dict[str, Any] = torch.load(folder / STREAM_FILE, weights_only=True)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {STREAM_FILE}: it was saved without prepare_trainer_for_packing, so nobody knows which "
            "packs were trained; load its weights into the model and call train() without resume_from_checkpoint"
        ) from None
    return state


def read_trainer(folder: Path) -> dict[str, Any]:
    """Read Trainer's own state, which Trainer writes last, so that a checkpoint with it is complete."""
    state: dict[str, Any] = json.loads((folder / TRAINER_FILE).read_text(encoding="utf-8"))
    return state


def newest_checkpoint(output_dir: str) -> str:
    """Return the newest complete checkpoint; a run may have been killed while it wrote a newer one.

    Raises:
        ValueError: if there is no complete checkpoint.
    """
    steps = {
        int(number): path
        for path in Path(output_dir).glob(f"{PREFIX}*")
        if (number := path.name.removeprefix(PREFIX)).isdigit()
    }
    for _, folder in sorted(steps.items(), reverse=True):
        try:
            read_trainer(folder)
        except (OSError, ValueError):
            log.warning("%s was not written to its end; resuming from an earlier checkpoint", folder)
            continue
        return str(folder)
    raise ValueError(
        f"there is no whole checkpoint in {output_dir} to resume from; call train() to begin, or name a folder"
    )
