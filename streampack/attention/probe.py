"""The leak probe: change one sample of a pack and check whether the logits of other samples change."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from streampack.attention.calls import inputs_of, logits_of, native_call, uncompiled
from streampack.attention.layout import untrained_batch
from streampack.attention.pretrained import find_pretrained
from streampack.attention.probe_packs import (
    GROUP_PARENTS,
    PROBE_LENGTH,
    image_pack,
    own_arguments,
    probe_length,
    text_pack,
    vocabulary_of,
    with_other_images,
)
from streampack.attention.report import Kind, Leak, LeakReport
from streampack.attention.varlen import compute_dtype
from streampack.packing.batch import Batch
from streampack.packing.groups import paths_of

# Relative changes of logits that rounding may cause. In tiny models of 25 families they were up to 8e-7 in fp32, 1.2e-3
# in fp16 and 1.6e-2 in bf16; deeper models round more often. The leaks that the tests plant change fp32 logits by more
# than 1e-2. In TF32, fp16 and bf16 a weaker leak can stay below the limit, so probe in fp32 to be sure.
LIMIT = 1e-4
LIMIT_TF32 = 1e-2
LIMIT_16_BIT = {torch.float16: 0.02, torch.bfloat16: 0.1}

ROUTED = 0.25
"""The fraction of a sample's tokens that may move in a model with experts. Other tokens change how many an expert has,
so rounding, and so maybe a token's expert; a leak moves most tokens."""

TRIED: WeakSet[nn.Module] = WeakSet()
"""Modules of the models in which the probe found no leak, or is looking for one."""


def find_leaks(
    model: Callable[..., Any],
    *,
    inputs: Callable[[Batch], dict[str, Any]] | None = None,
    max_seq_len: int | None = None,
    vocab_size: int | None = None,
    limit: float | None = None,
    groups: bool = False,
    images: bool = False,
) -> LeakReport:
    """Look for samples of a pack that attend to one another or to padding, and for wrong positions.

    The tokens of the padding and of each of four samples are changed in turn, and the logits of all other samples must
    stay the same. Each of the four samples is also given to the model alone, and must get the logits that it has in the
    pack. Then, in training mode with dropout layers off, the gradients of one sample's logits must be 0 at all other
    tokens, because some models and kernels compute in another way then. That makes 11 forward passes of a pack or less
    (2,816 tokens at most for a model without a window) without gradients, and one with a backward pass. Afterwards the
    model's mode, its buffers and the random generators of Python, numpy and torch are as before.

    >>> def leaky(batch):  # the logits of a token depend on all tokens before it, of other samples too
    ...     return batch.tokens.cumsum(1)[..., None].double()
    >>> report = find_leaks(leaky, vocab_size=50)
    >>> report.ok, report.leaks[0].source, report.leaks[0].sample
    (False, 0, 1)

    Args:
        model: a module that is called as ``model(**inputs(batch))``. Without ``inputs``, a torchtune or Hugging Face
            model, or any callable from a batch to logits ``[batch, max_seq_len, vocab]``, which has no training mode.
            If the model is sharded, this is a collective.
        inputs: the result of `prepare_model_for_packing`; None: the last result for this model. A model that was never
            prepared is called with tokens and positions only.
        max_seq_len: length of the pack. Its longest sample has 0.4 of the first 256 tokens and all tokens beyond them,
            because only a sample longer than a sliding window can show that the window was lost. None: 256 plus the
            model's longest window or chunk, but at most 16,384 and the model's number of positions.
        vocab_size: token ids are below it; None: the size of the model's first embedding.
        limit: the largest change of a token's logits that is not a leak: the norm of the change, divided by the mean
            norm of the pack's logits; in models with experts, a quarter of a sample's tokens may move farther. For a
            sample alone, the mean over its tokens counts, and for gradients, their norm at other tokens beside that at
            its own. None: 1e-4 in fp32, 0.01 with TF32, 0.02 in fp16, 0.1 in bf16.
        groups: whether samples of the pack share prefixes, as the answers to one prompt do in a `Group`: a sample may
            then be moved by its prefix, and not by another that continues the same one.
        images: whether samples of the pack have images, of noise: the pixels of each are changed, too, and must move
            its own logits, and no others'. For a model of a family whose images can be packed.

    Raises:
        ValueError: if the model has no weights, the vocabulary fewer than two tokens, all logits are 0, or the model
            does not return logits of every token.
    """
    module = model if isinstance(model, nn.Module) else None
    parameter = None if module is None else next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "meta":
        raise ValueError("the model has no weights yet, so nothing shows; load them first")
    vocab_size = vocab_size or vocabulary_of(module)
    if vocab_size < 2:
        raise ValueError(
            f"vocab_size is {vocab_size}; give the number of tokens that the model knows, at least 2"
        )
    generator = torch.Generator().manual_seed(0)
    if module is not None:
        inputs = inputs or inputs_of(module)
        max_seq_len = max_seq_len or probe_length(module)
    pretrained = None if module is None or not images else find_pretrained(module)
    if images:
        if pretrained is None or groups:
            raise ValueError("images=True is for a Hugging Face model, and for samples without groups")
        pack, lengths = image_pack(pretrained, vocab_size=vocab_size, generator=generator)
    else:
        pack, lengths = text_pack(max_seq_len or PROBE_LENGTH, vocab_size, generator, groups=groups)
    places = [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
    paths = paths_of(GROUP_PARENTS if groups else [-1] * len(lengths))
    shifts = torch.randint(1, vocab_size, pack.tokens.shape, generator=generator)
    other_tokens = (pack.tokens + shifts) % vocab_size  # no token is the same as in the pack
    other_tokens = other_tokens.where(pack.tokens < vocab_size, pack.tokens).to(device)  # but those of images
    pack = pack.to(device)
    routed = module is not None and any("experts" in name for name, _ in module.named_modules())

    def run_model(single: Batch) -> torch.Tensor:  # [max_seq_len, columns]
        output = model(single) if inputs is None else model(**inputs(single))
        return logits_of(output, tokens=single.tokens.shape[1])

    def run_with_change(place: slice) -> torch.Tensor:  # other tokens at a place
        tokens = pack.tokens.clone()
        tokens[:, place] = other_tokens[:, place]
        return run_model(replace(pack, tokens=tokens))

    def distances(logits: torch.Tensor, place: slice) -> torch.Tensor:
        """Return how far logits are from those of the unchanged pack at ``place``, for each token."""
        relative: torch.Tensor = (logits - base[place]).norm(dim=-1) / mean_norm
        return relative.nan_to_num(nan=torch.inf)

    def farthest(logits: torch.Tensor, place: slice) -> float:
        found = distances(logits, place)
        if routed:
            found = found.sort().values[: int((1 - ROUTED) * len(found))]
        return float(found.max()) if len(found) else 0.0

    moves: list[Leak] = []
    # While it is tried, too: the first inputs of an unknown model try it.
    tried = [*module.modules()] if module is not None else []
    TRIED.update(tried)
    with _undisturbed(module, device):
        base = run_model(pack)
        mean_norm = base[: places[-1].stop].norm(dim=-1).mean()
        if mean_norm == 0:
            raise ValueError(
                "all logits of the model are 0, so nothing shows; give it weights, random ones will do"
            )
        # If the first half of a sample does not change the logits of its second half, the probe could not show a leak.
        longest = max(places, key=lambda place: place.stop - place.start)
        second_half = slice((longest.start + longest.stop) // 2, longest.stop)
        moved_within = distances(
            run_with_change(slice(longest.start, second_half.start))[second_half], second_half
        ).max()
        # The logits of only one pass are in memory at a time, because they may be large.
        kinds: list[tuple[Kind, int | None, slice]] = [("padding", None, slice(places[-1].stop, None))]
        kinds += [("sample", source, place) for source, place in enumerate(places)]
        for kind, source, changed_place in kinds:
            changed = run_with_change(changed_place)
            moves += [
                Leak(kind, sample, farthest(changed[place], place), source)
                for sample, place in enumerate(places)
                if source not in paths[sample]
            ]
        seeing = [] if pack.media is None else [i for i, count in enumerate(pack.media.images[0]) if count]
        for source in seeing:
            changed = run_model(with_other_images(pack, source))
            moved_within = min(moved_within, distances(changed[places[source]], places[source]).max())
            moves += [
                Leak("image", sample, farthest(changed[place], place), source)
                for sample, place in enumerate(places)
                if sample != source
            ]
        with native_call(module, inputs) as as_written:
            for sample, place in enumerate(places):
                tokens = torch.cat([pack.tokens[:, places[number]] for number in paths[sample]], 1)
                length = tokens.shape[1]
                if as_written is None:
                    rest = pack.tokens.shape[1] - length
                    padded = untrained_batch(nn.functional.pad(tokens[0], (0, rest)), [length])
                    alone = run_model(padded)[:length]
                elif sample in seeing:
                    assert module is not None
                    given = own_arguments(pretrained, pack, sample, tokens)
                    alone = logits_of(module(input_ids=tokens, use_cache=False, **given), tokens=length)
                else:
                    alone = as_written(tokens)
                own = alone[length - (place.stop - place.start) :]
                # Rounding may route a token to another expert, which moves that token far, whereas lost positions or
                # windows move many tokens, so the mean counts.
                moves.append(Leak("alone", sample, float(distances(own, place).mean())))
        if module is not None:
            sample = min(3, len(places) - 1)  # after the others, and no prompt
            own = torch.zeros(pack.tokens.shape[1], dtype=torch.bool, device=device)
            for number in paths[sample]:
                own[places[number]] = True
            stray = _stray_gradients(module, lambda: run_model(pack)[places[sample]], own)
            moves += [] if stray is None else [Leak("sample", sample, stray, training=True)]
    allowed = _limit(module, base.dtype, device) if limit is None else limit
    leaks = [move for move in moves if not move.moved <= allowed]
    if leaks:
        TRIED.difference_update(tried)
    return LeakReport(
        lengths=tuple(lengths),
        # Those in training mode are listed only if there are none in eval mode, which they would repeat.
        leaks=tuple([leak for leak in leaks if not leak.training] or leaks),
        limit=allowed,
        worst=max(move.moved for move in moves),
        blind=bool(moved_within <= allowed),
    )


def _stray_gradients(module: nn.Module, run: Callable[[], torch.Tensor], own: torch.Tensor) -> float | None:
    """Return the norm of the gradients of the logits of ``run``, in training mode, at other tokens than ``own``.

    The unit is their norm at those, ``[max_seq_len]`` bool. None for a model without embeddings.
    """
    embedded: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[:2] != (1, len(own)):
            return output
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # a model may write into it

    module.train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
    hooks = [part.register_forward_hook(keep) for part in module.modules() if isinstance(part, nn.Embedding)]
    # Gradients of parameters would be in the way of training. FSDP must not see that they need none; reentrant
    # checkpointing does not work with `torch.autograd.grad`, which leaves them out.
    sharded = any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules())
    frozen = [] if sharded else [each for each in module.parameters() if each.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        unsynced = module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()
        with torch.enable_grad(), unsynced:
            total = run().norm()
            if not embedded:
                return None
            if sharded:
                gradients = torch.autograd.grad(total, embedded)
            else:
                total.backward()
                gradients = tuple(each.grad for each in embedded if each.grad is not None)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in frozen:
            parameter.requires_grad_()
    sizes = torch.stack([each[0].float().norm(dim=-1) for each in gradients]).norm(dim=0)
    return float(sizes[~own].norm() / sizes[own].norm())


@contextmanager
def _undisturbed(module: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Run the block in eval mode without gradients, then restore the mode, buffers and random generators.

    A model that is compiled runs uncompiled: a pack of another length than in training would make torch.compile compile
    again for dynamic lengths, and training would be slower from then on. Kernels that it compiles, such as flex
    attention, stay compiled, or they would compute all scores of a pack.
    """
    was_training = {part: part.training for part in module.modules()} if module is not None else {}
    # A forward pass in training mode may change buffers in place, as batch norm does, or replace them by others.
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in was_training
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    devices = [device.index or 0] if device.type != "cpu" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        uncompiled(was_training),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile")
        # activation checkpointing warns of it:
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        try:
            if module is not None:
                module.eval()
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            for part, name, buffer, saved in buffers:
                part._buffers[name] = buffer
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
            for part, mode in was_training.items():
                part.training = mode
                if isinstance(part, FSDPModule):
                    part.reshard()  # no backward pass does it here


def _limit(module: nn.Module | None, dtype: torch.dtype, device: torch.device) -> float:
    """Return the limit for the coarsest dtype in use."""
    dtypes = {dtype, compute_dtype(device, dtype)}
    dtypes |= {parameter.dtype for parameter in module.parameters()} if module is not None else set()
    full = LIMIT if torch.get_float32_matmul_precision() == "highest" else LIMIT_TF32
    return max(LIMIT_16_BIT.get(dtype, full) for dtype in dtypes)
