"""Files of weights: random weights from which a run begins, and a run's final weights."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import training

from streampack.training.config import RunConfig

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model"
)  # fmt: skip
"""Files of a tokenizer, in a folder that may hold weights too."""


def random_weights(model: nn.Module, *, folder: str, beside: Sequence[str] = ()) -> str:
    """Write a model's initial weights to a folder and return it: the ``checkpoint_dir`` of a run from scratch.

    torchtune's checkpointers read files only. In a config::

        checkpointer:
          _component_: torchtune.training.FullModelTorchTuneCheckpointer
          checkpoint_dir:
            _component_: streampack.training.weights.random_weights
            model: ${model}
            folder: ${output_dir}
          checkpoint_files: [model.bin]
          model_type: LLAMA3
          output_dir: ${output_dir}

    The recipe's ``seed`` decides the weights. The folder is named by a digest of its weights and gets that name only
    when it is complete. So equal weights are written once, even by several processes, and a killed run leaves no
    incomplete ones.

    Args:
        model: the model, in a config the node of the model to train.
        folder: where to write the weights; made if it does not exist. All machines of a run must see it.
        beside: files to copy to the same folder, such as a tokenizer. torchtune copies them to the trained weights.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".random-", dir=base))
    try:
        torch.save(model.state_dict(), part / "model.bin")
        with (part / "model.bin").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        for path in beside:
            shutil.copy(path, part)
        made = base / f"random-{digest[:12]}"
        try:
            part.rename(made)
        except OSError:  # another process or an earlier run has written the folder
            if not made.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(made)


def save_weights(checkpointer: Any, weights: dict[str, torch.Tensor], *, cfg: RunConfig) -> Path:
    """Write a model's final weights, and the files needed to load them.

    If the base was in Hugging Face's format, ``from_pretrained`` can load the result: torchtune's checkpointer copies
    config.json and the other files beside the base. The tokenizer's files are copied too, if they are in another
    folder. An adapter's files are removed, because transformers would apply the adapter to the merged weights again.

    Args:
        checkpointer: torchtune's, which loaded the base.
        weights: the weights, under torchtune's names.
        cfg: the config of the run.

    Returns:
        The folder, ``epoch_0`` in the checkpointer's ``output_dir``.
    """
    folder = Path(cfg.checkpointer["output_dir"]) / "epoch_0"
    checkpointer.save_checkpoint({training.MODEL_KEY: weights}, epoch=0)
    for stray in folder.glob("adapter_*"):
        stray.unlink()
    base = Path(checkpointer._checkpoint_dir).resolve()
    for file in _tokenizer_files(cfg.tokenizer):
        if not file.resolve().is_relative_to(base):
            shutil.copy2(file, folder / file.name)
    return folder


def _tokenizer_files(node: Mapping[str, Any]) -> Iterator[Path]:
    for path in (Path(value) for value in node.values() if isinstance(value, str)):
        if path.is_dir():
            for pattern in TOKENIZER_FILES:
                yield from (file for file in path.glob(pattern) if file.is_file())
        elif path.is_file():
            yield path
