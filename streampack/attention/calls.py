"""How models of the libraries are called: as they were prepared, plainly, or as their authors call them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from streampack.packing.batch import Batch

COLUMNS = 4096  # of the vocabulary are compared, or less than twice as many: all of them would be gigabytes

PREPARED: WeakKeyDictionary[nn.Module, Callable[[nn.Module], Callable[..., dict[str, Any]]]] = (
    WeakKeyDictionary()
)
"""Makes again what `prepare_model_for_packing` gave last for a model. It may not hold the model itself."""


def inputs_of(model: nn.Module) -> Callable[[Batch], dict[str, Any]] | None:
    """Find how a batch becomes the arguments of a model of torchtune's or Hugging Face's; None for any other.

    Arguments are those of `prepare_model_for_packing`, if it has prepared the model. Otherwise they are tokens and
    positions, as a loop that knows nothing of packs would give them.
    """
    inner = model
    for name in ("module", "_orig_mod", "module"):  # DistributedDataParallel, torch.compile, in either order
        wrapped = inner._modules.get(name)
        inner = inner if wrapped is None else wrapped
    roots = {cls.__module__.partition(".")[0] for cls in type(inner).__mro__}
    if roots & {"transformers", "peft"}:
        found = _hugging_face().find_pretrained(inner)
        return None if found is None else _remade(found) or _plain(found)
    if "torchtune" in roots and _is_torchtune(inner):
        return _remade(inner) or (lambda batch: {"tokens": batch.tokens, "input_pos": batch.input_pos})
    return None


def _remade(inner: nn.Module) -> Callable[[Batch], dict[str, Any]] | None:
    remake = PREPARED.get(inner)
    return None if remake is None else remake(inner)


def _plain(model: nn.Module) -> Callable[[Batch], dict[str, Any]]:
    parameters = inspect.signature(model.forward).parameters

    def arguments(batch: Batch) -> dict[str, Any]:
        positions = {"position_ids": batch.input_pos} if "position_ids" in parameters else {}
        return {"input_ids": batch.tokens, **positions}

    return arguments


def logits_of(output: Any, *, tokens: int) -> torch.Tensor:
    """``[tokens, vocab]`` of the only pack, from what torchtune's and Hugging Face's models return.

    Of more than 4,096 entries of the vocabulary every n-th is kept.

    Raises:
        ValueError: if there are not logits of every token.
    """
    chunks = output if isinstance(output, list) else [output]  # torchtune's, in chunks
    if not torch.is_tensor(chunks[0]):
        chunks = [output.logits if hasattr(output, "logits") else output[0]]
    shape = [*chunks[0].shape]
    if len(shape) != 3 or sum(chunk.shape[1] for chunk in chunks) != tokens:
        raise ValueError(
            f"the model gives {shape} for a pack of {tokens} tokens; the probe needs logits of every token, "
            f"[1, {tokens}, vocab]"
        )
    step = max(1, shape[2] // COLUMNS)
    logits = torch.cat([chunk[0, :, ::step].detach() for chunk in chunks])
    return logits if logits.dtype == torch.float64 else logits.float()


@contextmanager
def native(
    module: nn.Module | None, inputs: object
) -> Iterator[Callable[[torch.Tensor], torch.Tensor] | None]:
    """From one sequence ``[1, length]`` to its logits, by the model as its authors wrote it, with its own windows.

    None where nobody but the caller knows how to call it.
    """
    if module is None or inputs is None:
        yield None
    elif "transformers" in sys.modules and _hugging_face().find_pretrained(module) is not None:
        with _hugging_face().unprepared(module):
            yield lambda tokens: logits_of(module(input_ids=tokens, use_cache=False), tokens=tokens.shape[1])
    elif any(_is_torchtune(part) for part in module.modules()):
        yield lambda tokens: logits_of(module(tokens), tokens=tokens.shape[1])
    else:
        yield None


def _is_torchtune(module: nn.Module) -> bool:
    return "torchtune" in sys.modules and isinstance(
        module, sys.modules["torchtune"].modules.TransformerDecoder
    )


def _hugging_face() -> Any:
    """Not at the top: it imports the probe, and transformers is an extra."""
    return import_module("streampack.attention.transformers")
