"""Random weights for a run that begins from none, as files that torchtune's checkpointers read."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


def random_weights(model: nn.Module, *, folder: str, beside: Sequence[str] = ()) -> str:
    """Write ``model``'s weights, as they were initialized, and say where: the ``checkpoint_dir`` to begin from.

    torchtune's checkpointers only begin from files. In a config::

        checkpointer:
          _component_: torchtune.training.FullModelTorchTuneCheckpointer
          checkpoint_dir:
            _component_: streampack.training.weights.random_weights
            model: ${model}
            folder: ${output_dir}
          checkpoint_files: [model.bin]
          model_type: LLAMA3
          output_dir: ${output_dir}

    The recipe's ``seed`` decides them. Equal weights are written once, into a folder named by their content, and one
    that is there is whole: a run that was killed while it wrote leaves nothing that another would take for it.

    Args:
        model: whose weights; in a config, the node that also says what is trained.
        folder: where to put them; made if need be. All nodes of a run must see it.
        beside: files to copy beside them, a tokenizer for one. torchtune copies them on to the trained weights.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".random-", dir=base))
    try:
        torch.save(model.state_dict(), part / "model.bin")
        content = hashlib.sha256()
        with (part / "model.bin").open("rb") as file:
            while block := file.read(1 << 24):
                content.update(block)
        for path in beside:
            shutil.copy(path, part)
        made = base / f"random-{content.hexdigest()[:12]}"
        try:
            part.rename(made)
        except OSError:  # it is there, from before or from a process beside this one
            if not made.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(made)
