"""How to call a model of torchtune or Hugging Face: as prepared for packing, plainly, or as its authors call it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from streampack.attention.pretrained import find_pretrained, unprepared
from streampack.packing.batch import Batch

COLUMNS = 4096  # of the vocabulary are compared, or up to twice as many: all logits of a long pack would be gigabytes

PREPARED: WeakKeyDictionary[nn.Module, Callable[[nn.Module], Callable[..., dict[str, Any]]]] = (
    WeakKeyDictionary()
)
"""For each prepared model, a function that makes its inputs again. It must not refer to the model itself."""


def inputs_of(model: nn.Module) -> Callable[[Batch], dict[str, Any]] | None:
    """Return the function from a batch to the keyword arguments of a torchtune or Hugging Face model; else None.

    For a prepared model it is what `prepare_model_for_packing` returned last. For others it gives tokens and positions,
    as a loop without any support for packing would.
    """
    inner = model
    for name in ("module", "_orig_mod", "module"):  # DistributedDataParallel, torch.compile, in either order
        wrapped = inner._modules.get(name)
        inner = inner if wrapped is None else wrapped
    roots = {cls.__module__.partition(".")[0] for cls in type(inner).__mro__}
    if roots & {"transformers", "peft"}:
        inner = find_pretrained(inner)
        if inner is None:
            return None
        plain = _plain_inputs(inner)
    elif "torchtune" in roots and _is_torchtune(inner):
        plain = _plain_torchtune_inputs
    else:
        return None
    remake = PREPARED.get(inner)
    return plain if remake is None else remake(inner)


def _plain_torchtune_inputs(batch: Batch) -> dict[str, Any]:
    return {"tokens": batch.tokens, "input_pos": batch.input_pos}


def _plain_inputs(pretrained: Any) -> Callable[[Batch], dict[str, Any]]:
    parameters = inspect.signature(pretrained.forward).parameters

    def arguments(batch: Batch) -> dict[str, Any]:
        positions = {"position_ids": batch.input_pos} if "position_ids" in parameters else {}
        return {"input_ids": batch.tokens, **positions}

    return arguments


def logits_of(output: Any, *, tokens: int) -> torch.Tensor:
    """Extract the logits of a single pack, ``[tokens, columns]``, from a model's output.

    From more than 4,096 entries of the vocabulary every n-th is kept.

    Raises:
        ValueError: if there are not logits of every token.
    """
    chunks = output if isinstance(output, list) else [output]  # torchtune's output chunks
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
    """Yield a function from one sequence ``[1, length]`` to its logits, by the model as its authors wrote it.

    Yields None where only the caller knows how to call the model.
    """
    if module is None or inputs is None:
        yield None
    elif "transformers" in sys.modules and (pretrained := find_pretrained(module)) is not None:
        with unprepared(pretrained):
            yield lambda tokens: logits_of(module(input_ids=tokens, use_cache=False), tokens=tokens.shape[1])
    elif any(_is_torchtune(part) for part in module.modules()):
        yield lambda tokens: logits_of(module(tokens), tokens=tokens.shape[1])
    else:
        yield None


def _is_torchtune(module: nn.Module) -> bool:
    return "torchtune" in sys.modules and isinstance(
        module, sys.modules["torchtune"].modules.TransformerDecoder
    )
