"""Does any sample of a pack see another? Asked of the model itself, by changing one and looking at the others."""

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

SAMPLES = 4  # looked at in a pack

# How far logits may move, relative, by the arithmetic. Tiny models of the 25 proven families moved by up to 8e-7 in
# fp32, 1.2e-3 in fp16 and 1.6e-2 in bf16; deep models round more often. The mistakes in the tests move them by over
# 1e-2 in fp32.
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

    Four samples are changed in turn, and no other's logits may move. Then the padding is changed. Then
    each sample goes through the model by itself, and must have the logits that it has in the pack. All but the last is
    done in training mode, too, where some models take another way: only dropout layers stay off. That is 19 forward
    passes of one pack, without gradients, and 12 of what is no module: of 4,864 tokens in all where the pack has 256.
    Afterwards the model's mode, its buffers and the random generators of Python, numpy and torch are as before.

    >>> def leaky(batch):  # every token sees all before it, over the ends of samples
    ...     return batch.tokens.cumsum(1)[..., None].double()
    >>> report = find_leaks(leaky, vocab_size=50)
    >>> report.ok, report.leaks[0].source, report.leaks[0].sample
    (False, 0, 1)

    Args:
        model: a module that is called as ``model(**inputs(batch))``; without ``inputs``, anything that makes logits
            ``[batch, max_seq_len, vocab]`` of a batch, or a model of torchtune's or Hugging Face's. Of a model that is
            sharded over ranks, all of them call.
        batch: a batch of yours, on the model's device, of whose first pack the first samples are taken; by default
            a pack is made.
        inputs: what `prepare_model_for_packing` gave; by default what it gave last for this model. A model of those
            libraries that was never prepared is called with tokens and positions only.
        max_seq_len: of the pack that is made. Its longest sample has 0.4 of 256 tokens, and all that the pack has
            beyond them; only a sample longer than a sliding window shows that the window was lost. By default 256, or
            as many more as the model's longest window or chunk has, up to 16,384 and to the positions that it has.
        vocab_size: tokens are below it; by default what the model's first embedding holds, or else the batch.
        limit: how far logits may move, by norm, relative to the mean norm; by default what the arithmetic needs:
            1e-4 in fp32, 0.01 with TF32, 0.02 in fp16, 0.1 in bf16.
        seed: of the tokens.

    Raises:
        ValueError: if there is no token to change another into, or no sample to change, if all logits are 0, or if
            there are not logits of every token.
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
    other = (pack.tokens + shifts) % vocab_size  # in every place another token

    def logits(of: Batch) -> torch.Tensor:
        seed_all(seed, device)
        try:
            output = model(of) if inputs is None else model(**inputs(of))
        except (TypeError, AttributeError) as error:
            if inputs is None:
                error.add_note(
                    "find_leaks called the model with a Batch; with inputs, it is called by keyword"
                )
            raise
        return logits_of(output, tokens=of.tokens.shape[1])

    def logits_with_other(where: slice) -> torch.Tensor:
        tokens = pack.tokens.clone()
        tokens[:, where] = other[:, where]
        return logits(replace(pack, tokens=tokens))

    moves: list[Leak] = []

    def compare(
        kind: Kind, ours: torch.Tensor, sample: int, source: int | None = None, *, training: bool = False
    ) -> None:
        """Of ``ours`` the rows of the sample."""
        distances = ((ours - base[rows[sample]]).norm(dim=-1) / scale).nan_to_num(nan=torch.inf)
        # Alone, a token of a mixture of experts may take another one, by rounding; lost positions or windows move many.
        moved = float(distances.mean() if kind == "alone" else distances.max())
        moves.append(Leak(kind, sample, moved, source, training))

    # Where there are fewer, some are looked at twice: passes of a sharded model are collective, and all ranks
    # must make as many.
    looked_at = [number % len(rows) for number in range(SAMPLES)]

    def change_each(*, training: bool) -> None:
        """Nothing, the padding and each sample; one pass at a time, for long packs have large logits."""
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
    leaks = [leak for leak in leaks if not leak.training] or leaks  # the same once more would say nothing new
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
    """What the coarsest arithmetic needs that is at work."""
    dtypes = {dtype} | (
        {parameter.dtype for parameter in module.parameters()} if module is not None else set()
    )
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    full = LIMIT if torch.get_float32_matmul_precision() == "highest" else LIMIT_TF32
    return max(LIMIT_16_BIT.get(dtype, full) for dtype in dtypes)
