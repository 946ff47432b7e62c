"""Final weights: what a run leaves for those who generate, evaluate or train on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from streampack.training.config import RunConfig

# In a tokenizer's folder, what belongs to the tokenizer; weights may lie beside it.
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)


def save_weights(checkpointer: Any, weights: dict[str, torch.Tensor], *, cfg: RunConfig) -> Path:
    """Write a model's final weights, and beside them all that is needed to load them.

    From a base in Hugging Face's format come weights that ``from_pretrained`` takes: torchtune's checkpointer copies
    config.json and whatever else lies beside the base. The tokenizer's files are added where the run took them from
    elsewhere, and replace the base's; an adapter's are removed, for transformers would apply it on top.

    Args:
        checkpointer: torchtune's, which began the run.
        weights: under torchtune's names.
        cfg: the run's.

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
    for value in node.values():
        path = Path(value) if isinstance(value, str) else None
        if path is not None and path.is_dir():
            for pattern in TOKENIZER_FILES:
                yield from (file for file in path.glob(pattern) if file.is_file())
        elif path is not None and path.is_file():
            yield path
