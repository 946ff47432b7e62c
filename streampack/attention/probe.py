"""The leak probe: change one sample of a pack and check whether the logits of other samples change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from streampack.attention.calls import inputs_of, logits_of, native_call
from streampack.attention.families import media_tokens
from streampack.attention.probe_pack import (
    PROBE_LENGTH,
    first_pack,
    make_pack,
    pack_alone,
    probe_length,
    sample_paths,
    sample_slices,
)
from streampack.attention.report import Kind, Leak, LeakReport
from streampack.attention.trace_leak import leaking_module
from streampack.attention.undisturbed import seed_all, train_without_dropout, undisturbed
from streampack.packing.batch import Batch

NUM_CHANGED = 4
"""How many times a sample of the pack is changed, and compared with itself alone."""

# Relative changes of logits that rounding may cause. In tiny models of the 25 proven families they were up to 8e-7 in
# fp32, 1.2e-3 in fp16 and 1.6e-2 in bf16; deeper models round more often. The leaks that the tests plant change fp32
# logits by more than 1e-2. In TF32, fp16 and bf16 a weaker leak can stay below the limit, so probe in fp32 to be sure.
LIMIT = 1e-4
LIMIT_TF32 = 1e-2
LIMIT_16_BIT = {torch.float16: 0.02, torch.bfloat16: 0.1}


def find_leaks(
    model: Callable[..., Any],
    batch: Batch | None = None,
    *,
    inputs: Callable[[Batch], dict[str, Any]] | None = None,
    max_seq_len: int | None = None,
    vocab_size: int | None = None,
    limit: float | None = None,
    seed: int = 0,
    groups: bool = False,
) -> LeakReport:
    """Look for samples of a pack that attend to one another or to padding, and for wrong positions.

    The tokens of the padding and of four samples are changed in turn, and the logits of all other samples must stay the
    same. Each of the four samples is also given to the model alone, and must get the logits that it has in the pack.
    The changes are repeated in training mode, with dropout layers off, because some models compute attention in another
    way then. A module makes 19 forward passes of one pack without gradients (4,864 tokens for a model without a
    window), any other callable 12. Afterwards the model's mode, its buffers and the random generators of Python, numpy
    and torch are as before.

    >>> def leaky(batch):  # the logits of a token depend on all tokens before it, of other samples too
    ...     return batch.tokens.cumsum(1)[..., None].double()
    >>> report = find_leaks(leaky, vocab_size=50)
    >>> report.ok, report.leaks[0].source, report.leaks[0].sample
    (False, 0, 1)

    Args:
        model: a module that is called as ``model(**inputs(batch))``. Without ``inputs``, a torchtune or Hugging Face
            model, or any callable from a batch to logits ``[batch, max_seq_len, vocab]``. If the model is sharded,
            this is a collective.
        batch: a batch on the model's device, whose first pack is used; None: a pack of random tokens is made.
        inputs: the result of `prepare_model_for_packing`; None: the last result for this model. A model that was never
            prepared is called with tokens and positions only.
        max_seq_len: length of the pack that is made. Its longest sample has 0.4 of the first 256 tokens and all tokens
            beyond them, because only a sample longer than a sliding window can show that the window was lost. None:
            256 plus the model's longest window or chunk, but at most 16,384 and the model's number of positions.
        vocab_size: token ids are below it; None: the size of the model's first embedding, or else the batch's largest
            id plus 1.
        limit: the largest change of a token's logits that is not a leak: the norm of the change, divided by the mean
            norm of the pack's logits. For a sample alone, the mean over its tokens counts. None: 1e-4 in fp32, 0.01
            with TF32, 0.02 in fp16, 0.1 in bf16.
        seed: seed of the random tokens.
        groups: whether samples of the pack share prefixes, as the answers to one prompt do in a `Group`: a sample may
            then be moved by its prefix, and not by another that continues the same one. A ``batch`` with groups is
            probed in this way in any case.

    Raises:
        ValueError: if the vocabulary has fewer than two tokens, the batch has no sample, all logits are 0, or the model
            does not return logits of every token.
    """
    module = model if isinstance(model, nn.Module) else None
    device = batch.tokens.device if batch is not None else _device(module)
    vocab_size = vocab_size or vocabulary_of(module) or (0 if batch is None else int(batch.tokens.max()) + 1)
    if vocab_size < 2:
        raise ValueError(
            f"vocab_size is {vocab_size}; give the number of tokens that the model knows, at least 2"
        )
    generator = torch.Generator().manual_seed(seed)
    if inputs is None and module is not None:
        inputs = inputs_of(module)
    if max_seq_len is None:
        max_seq_len = PROBE_LENGTH if module is None else probe_length(module)
    pack = (
        first_pack(batch)
        if batch is not None
        else make_pack(max_seq_len, vocab_size, generator, groups=groups).to(device)
    )
    places, paths = sample_slices(pack), sample_paths(pack)
    shifts = torch.randint(1, vocab_size, pack.tokens.shape, generator=generator).to(device)
    other_tokens = (pack.tokens + shifts) % vocab_size  # no token is the same as in the pack

    def run_model(single: Batch) -> torch.Tensor:
        """Return the logits of a batch of one pack, ``[max_seq_len, columns]``."""
        seed_all(seed, device)
        output = model(single) if inputs is None else model(**inputs(single))
        return logits_of(output, tokens=single.tokens.shape[1])

    def run_with_change(place: slice) -> torch.Tensor:
        """Return the logits of the pack when the tokens at ``place`` are others."""
        tokens = pack.tokens.clone()
        tokens[:, place] = other_tokens[:, place]
        return run_model(replace(pack, tokens=tokens))

    moves: list[Leak] = []

    def compare(
        kind: Kind, logits: torch.Tensor, sample: int, source: int | None = None, *, training: bool = False
    ) -> None:
        """Record how far a sample's logits are from those of the unchanged pack."""
        distances = ((logits - base[places[sample]]).norm(dim=-1) / mean_norm).nan_to_num(nan=torch.inf)
        # A sample alone is judged by the mean of its tokens. Rounding may route a single token to another expert than
        # in the pack, which moves that token far, whereas lost positions or windows move many tokens.
        moved = float(distances.mean() if kind == "alone" else distances.max())
        moves.append(Leak(kind, sample, moved, source, training))

    # If a pack has fewer samples, some are changed twice. The forward passes of a sharded model are collectives, so all
    # ranks must make the same number, whatever their packs hold.
    changed_samples = [number % len(places) for number in range(NUM_CHANGED)]

    def change_each(*, training: bool) -> None:
        """Compare all samples after changing nothing, the padding, and each sample in turn.

        The logits of only one pass are in memory at a time, because they may be large.
        """
        # slice(0) changes no token, so any difference is noise of the model.
        for kind, changed_place in (("noise", slice(0)), ("padding", slice(places[-1].stop, None))):
            changed = run_with_change(changed_place)
            for sample, place in enumerate(places):
                compare(kind, changed[place], sample, training=training)  # type: ignore[arg-type]
        for source in changed_samples:
            changed = run_with_change(places[source])
            for sample, place in enumerate(places):
                if source not in paths[sample]:
                    compare("sample", changed[place], sample, source, training=training)

    with undisturbed(module, device, eager=batch is None):
        base = run_model(pack)
        mean_norm = base[: places[-1].stop].norm(dim=-1).mean()
        if mean_norm == 0:
            raise ValueError(
                "all logits of the model are 0, so nothing shows; give it weights, random ones will do"
            )
        # If the first half of a sample does not change the logits of its second half, the probe could not show a leak.
        longest = max(places, key=lambda place: place.stop - place.start)
        middle = (longest.start + longest.stop) // 2
        second_half = run_with_change(slice(longest.start, middle))[middle : longest.stop]
        moved_within = (second_half - base[middle : longest.stop]).norm(dim=-1).max() / mean_norm
        change_each(training=False)
        with native_call(module, inputs) as as_written:
            for sample in changed_samples:
                tokens = torch.cat([pack.tokens[:, places[number]] for number in paths[sample]], 1)
                alone = run_model(pack_alone(pack, tokens)) if as_written is None else as_written(tokens)
                length = places[sample].stop - places[sample].start
                compare("alone", alone[tokens.shape[1] - length : tokens.shape[1]], sample)
        if module is not None:
            train_without_dropout(module)
            base = run_model(pack)
            change_each(training=True)
    allowed = _limit(module, base.dtype, device) if limit is None else limit
    leaks = [move for move in dict.fromkeys(moves) if move.moved > allowed]
    # Leaks in training mode are listed only if there are none in eval mode, which they would repeat.
    leaks = [leak for leak in leaks if not leak.training] or leaks
    mixing = next((leak for leak in leaks if leak.kind == "sample" and not leak.training), None)
    first_module = None
    # The forward passes of several ranks may be collectives, and a rank alone must not make more of them.
    if mixing is not None and mixing.source is not None and module is not None and not _is_one_of_several():
        source, place = places[mixing.source], places[mixing.sample]
        # Uncompiled, because a graph made before ignores hooks.
        with undisturbed(module, device, eager=True):
            first_module = leaking_module(
                module,
                lambda: run_model(pack),
                lambda: run_with_change(source),
                max_seq_len=pack.tokens.shape[1],
                place=place,
            )
    return LeakReport(
        lengths=tuple(place.stop - place.start for place in places),
        leaks=tuple([leak for leak in leaks if leak.kind == "noise"] or leaks),
        limit=allowed,
        worst=max(move.moved for move in moves),
        blind=bool(moved_within <= allowed),
        module=first_module,
    )


def _is_one_of_several() -> bool:
    """Return whether this process is one of several ranks."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def _device(module: nn.Module | None) -> torch.device:
    parameter = next(module.parameters(), None) if module is not None else None
    return torch.device("cpu") if parameter is None else parameter.device


def vocabulary_of(module: nn.Module | None) -> int:
    """Return the size of the first embedding, or 0 if there is none; but only the ids below those of images."""
    if module is None:
        return 0
    size = next((part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)), 0)
    return min(size, *media_tokens(module), size)


def _limit(module: nn.Module | None, dtype: torch.dtype, device: torch.device) -> float:
    """Return the limit for the coarsest dtype in use."""
    dtypes = {dtype} | (
        {parameter.dtype for parameter in module.parameters()} if module is not None else set()
    )
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    full = LIMIT if torch.get_float32_matmul_precision() == "highest" else LIMIT_TF32
    return max(LIMIT_16_BIT.get(dtype, full) for dtype in dtypes)
