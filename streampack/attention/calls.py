"""How to call a model of torchtune or Hugging Face: as prepared for packing, plainly, or as its authors call it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from streampack.attention.pretrained import find_pretrained, unprepared
from streampack.packing.batch import Batch

# Larger vocabularies are compared in a sample of 1x to 2x this many columns: all logits of a long pack take gigabytes.
COMPARED_COLUMNS = 4096

PREPARED: WeakKeyDictionary[nn.Module, Callable[[nn.Module], Callable[..., dict[str, Any]]]] = (
    WeakKeyDictionary()
)
"""A function for each prepared model that makes its inputs again. A reference to the model would keep it alive."""


def inputs_of(model: nn.Module) -> Callable[[Batch], dict[str, Any]] | None:
    """Return the function from a batch to the keyword arguments of a torchtune or Hugging Face model; else None.

    For a prepared model it is what `prepare_model_for_packing` returned last. For others it gives tokens and positions,
    as a loop without any support for packing would.
    """
    inner = model
    # DistributedDataParallel has its model in ``module``, torch.compile in ``_orig_mod``; either may be the outer one.
    for name in ("module", "_orig_mod", "module"):
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


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of ``torch.compile(module)``, or was compiled by ``module.compile()``."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


@contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run compiled modules as they are written within the block; functions that they compile stay compiled."""
    found = [module for module in modules if is_compiled(module)]
    kept = [{name: vars(module).get(name) for name in ("forward", "_compiled_call_impl")} for module in found]
    for module in found:
        vars(module)["_compiled_call_impl"] = None
        if "_orig_mod" in module._modules:
            vars(module)["forward"] = module._modules["_orig_mod"]
    try:
        yield
    finally:
        for module, attributes in zip(found, kept, strict=True):
            for name, value in attributes.items():
                if value is None:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = value


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

    Of a vocabulary of 8,192 entries or more, only every n-th column is kept.
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
    stride = max(1, shape[2] // COMPARED_COLUMNS)
    logits = torch.cat([chunk[0, :, ::stride] for chunk in chunks])
    return logits if logits.dtype == torch.float64 else logits.float()


@contextmanager
def native_call(
    module: nn.Module | None, inputs: object
) -> Iterator[Callable[[torch.Tensor], torch.Tensor] | None]:
    """Yield a function from one sequence ``[1, length]`` to its logits, with the model's own attention.

    Yields None for a model of neither library, which only the caller knows how to call.
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
