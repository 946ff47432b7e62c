"""The leak probe: change one sample of a pack and see whether the logits of others move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from streampack.attention.calls import inputs_of, logits_of, native
from streampack.attention.probe_pack import (
    PROBED,
    first_pack,
    make_pack,
    pack_alone,
    probe_length,
    rows_of,
)
from streampack.attention.report import Kind, Leak, LeakReport
from streampack.attention.undisturbed import seed_all, train_without_dropout, undisturbed
from streampack.packing.batch import Batch

SAMPLES = 4  # of a pack that are changed

# Relative moves of logits that rounding may cause. Tiny models of the 25 proven families moved by up to 8e-7 in fp32,
# 1.2e-3 in fp16 and 1.6e-2 in bf16; deeper models round more often. The tests' mistakes move fp32 logits by over 1e-2:
# in TF32, fp16 and bf16 a weaker leak can stay below the limit, so probe in fp32 to be sure.
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
) -> LeakReport:
    """Look for samples of a pack that see one another, for padding that is seen, and for wrong positions.

    Four samples are changed in turn, then the padding; no other sample's logits may move. Each of the four also goes
    through the model alone, and must have the logits that it has in the pack. All but the last is repeated in training
    mode, with dropout layers off, because some models then take another path. A module makes 19 forward passes of one
    pack, without gradients (4,864 tokens for a model without a window), any other callable 12. Afterwards the model's
    mode, its buffers and the random generators of Python, numpy and torch are as before.

    >>> def leaky(batch):  # every token sees all before it, of other samples too
    ...     return batch.tokens.cumsum(1)[..., None].double()
    >>> report = find_leaks(leaky, vocab_size=50)
    >>> report.ok, report.leaks[0].source, report.leaks[0].sample
    (False, 0, 1)

    Args:
        model: a module that is called as ``model(**inputs(batch))``. Without ``inputs``, a torchtune or Hugging Face
            model, or any callable from a batch to logits ``[batch, max_seq_len, vocab]``. If the model is sharded,
            this is a collective.
        batch: a batch on the model's device, whose first pack is used; by default a pack is made.
        inputs: the result of `prepare_model_for_packing`; by default the last one for this model. A model that was
            never prepared is called with tokens and positions only.
        max_seq_len: length of the pack that is made. Its longest sample has 0.4 of the first 256 tokens and all tokens
            beyond them, because only a sample longer than a sliding window can show that the window was lost. By
            default 256 plus the model's longest window or chunk, up to 16,384 and the model's number of positions.
        vocab_size: token ids are below it; by default the size of the model's first embedding, or what the batch has.
        limit: the largest change of a token's logits that is not a leak, as norm of the change / mean norm (for samples
            alone, the mean change); by default 1e-4 in fp32, 0.01 with TF32,
            0.02 in fp16, 0.1 in bf16.
        seed: seed of the random tokens.

    Raises:
        ValueError: if the vocabulary has fewer than two tokens, the batch has no sample, all logits are 0, or there are
            not logits of every token.
    """
    module = model if isinstance(model, nn.Module) else None
    device = batch.tokens.device if batch is not None else _device(module)
    vocab_size = vocab_size or _vocabulary(module) or (0 if batch is None else int(batch.tokens.max()) + 1)
    if vocab_size < 2:
        raise ValueError(
            f"vocab_size is {vocab_size}; give the number of tokens that the model knows, at least 2"
        )
    generator = torch.Generator().manual_seed(seed)
    if inputs is None and module is not None:
        inputs = inputs_of(module)
    if max_seq_len is None:
        max_seq_len = PROBED if module is None else probe_length(module)
    pack = (
        first_pack(batch) if batch is not None else make_pack(max_seq_len, vocab_size, generator).to(device)
    )
    rows = rows_of(pack)
    shifts = torch.randint(1, vocab_size, pack.tokens.shape, generator=generator).to(device)
    other = (pack.tokens + shifts) % vocab_size  # differs from the pack at every token

    def logits(of: Batch) -> torch.Tensor:
        seed_all(seed, device)
        output = model(of) if inputs is None else model(**inputs(of))
        return logits_of(output, tokens=of.tokens.shape[1])

    def logits_with_other(where: slice) -> torch.Tensor:
        tokens = pack.tokens.clone()
        tokens[:, where] = other[:, where]
        return logits(replace(pack, tokens=tokens))

    moves: list[Leak] = []

    def compare(
        kind: Kind, ours: torch.Tensor, sample: int, source: int | None = None, *, training: bool = False
    ) -> None:
        """Record how far ``ours``, the sample's logits, are from those of the unchanged pack."""
        distances = ((ours - base[rows[sample]]).norm(dim=-1) / scale).nan_to_num(nan=torch.inf)
        # "alone" uses the mean: by rounding, a token may be routed to another expert than in the pack, while lost
        # positions or windows move many tokens.
        moved = float(distances.mean() if kind == "alone" else distances.max())
        moves.append(Leak(kind, sample, moved, source, training))

    # With fewer samples some are changed twice: passes of a sharded model are collectives, so all ranks must make the
    # same number.
    looked_at = [number % len(rows) for number in range(SAMPLES)]

    def change_each(*, training: bool) -> None:
        """Change nothing, the padding and each sample in turn; one pass at a time, because logits may be large."""
        # slice(0) changes nothing: whatever moves then is the noise of the model.
        for kind, where in (("noise", slice(0)), ("padding", slice(rows[-1].stop, None))):
            changed = logits_with_other(where)
            for sample, place in enumerate(rows):
                compare(kind, changed[place], sample, training=training)  # type: ignore[arg-type]
        for source in looked_at:
            changed = logits_with_other(rows[source])
            for sample, place in enumerate(rows):
                if sample != source:
                    compare("sample", changed[place], sample, source, training=training)

    with undisturbed(module, device, eager=batch is None):
        base = logits(pack)
        scale = base[: rows[-1].stop].norm(dim=-1).mean()
        if scale == 0:
            raise ValueError(
                "all logits of the model are 0, so nothing shows; give it weights, random ones will do"
            )
        # If half of a sample does not move its other half, the probe is blind.
        longest = max(rows, key=lambda where: where.stop - where.start)
        middle = (longest.start + longest.stop) // 2
        halved = logits_with_other(slice(longest.start, middle))[middle : longest.stop]
        seen = (halved - base[middle : longest.stop]).norm(dim=-1).max() / scale
        change_each(training=False)
        with native(module, inputs) as as_written:
            for sample in looked_at:
                tokens = pack.tokens[:, rows[sample]]
                alone = logits(pack_alone(pack, tokens)) if as_written is None else as_written(tokens)
                compare("alone", alone[: tokens.shape[1]], sample)
        if module is not None:
            train_without_dropout(module)
            base = logits(pack)
            change_each(training=True)
    allowed = _limit(module, base.dtype, device) if limit is None else limit
    leaks = [move for move in dict.fromkeys(moves) if move.moved > allowed]
    # Those of training mode would repeat the others.
    leaks = [leak for leak in leaks if not leak.training] or leaks
    return LeakReport(
        lengths=tuple(where.stop - where.start for where in rows),
        leaks=tuple([leak for leak in leaks if leak.kind == "noise"] or leaks),
        limit=allowed,
        worst=max(move.moved for move in moves),
        blind=bool(seen <= allowed),
    )


def _device(module: nn.Module | None) -> torch.device:
    parameter = next(module.parameters(), None) if module is not None else None
    return torch.device("cpu") if parameter is None else parameter.device


def _vocabulary(module: nn.Module | None) -> int:
    parts = module.modules() if module is not None else ()
    return next((part.num_embeddings for part in parts if isinstance(part, nn.Embedding)), 0)


def _limit(module: nn.Module | None, dtype: torch.dtype, device: torch.device) -> float:
    """Return the limit for the coarsest type in use."""
    dtypes = {dtype} | (
        {parameter.dtype for parameter in module.parameters()} if module is not None else set()
    )
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    full = LIMIT if torch.get_float32_matmul_precision() == "highest" else LIMIT_TF32
    return max(LIMIT_16_BIT.get(dtype, full) for dtype in dtypes)
