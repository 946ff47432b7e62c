"""Does any sample of a pack see another? Asked of the model itself, by changing one and looking at the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from streampack.attention.report import Kind, Leak, LeakReport
from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX, Fragment

SAMPLES = 4  # looked at in a pack
SHARES = (0.3, 0.0, 0.4, 0.2)  # their parts of the probe's own pack; 0 is a single token, the rest is padding

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
    max_seq_len: int = 256,
    vocab_size: int | None = None,
    limit: float | None = None,
    seed: int = 0,
) -> LeakReport:
    """Look for samples of a pack that see one another, for padding that is seen, and for wrong positions.

    Four samples are changed in turn, and no other's logits may move. Then the padding is changed. Then
    each sample goes through the model by itself, and must have the logits that it has in the pack. That is 12 forward
    passes of one pack, without gradients. The model's mode and the random generators are afterwards as before.

    >>> def leaky(batch):  # every token sees all before it, over the ends of samples
    ...     return batch.tokens.cumsum(1)[..., None].double()
    >>> report = find_leaks(leaky, vocab_size=50)
    >>> report.ok, report.leaks[0].source, report.leaks[0].sample
    (False, 0, 1)

    Args:
        model: a module that is called as ``model(**inputs(batch))``; without ``inputs``, anything that makes logits
            ``[batch, max_seq_len, vocab]`` of a batch. Of a model that is sharded over ranks, all of them call.
        batch: a batch of yours, on the model's device, of whose first pack the first samples are taken; by default
            a pack is made.
        inputs: what `prepare_model_for_packing` gave.
        max_seq_len: of the pack that is made. Its longest sample has 0.4 of that, and only a sample longer than a
            sliding window shows that the window was lost.
        vocab_size: tokens are below it; by default what the model's first embedding holds, or else the batch.
        limit: how far logits may move, by norm, relative to the mean norm; by default what the arithmetic needs:
            1e-4 in fp32, 0.01 with TF32, 0.02 in fp16, 0.1 in bf16.
        seed: of the tokens.

    Raises:
        ValueError: if there is no token to change another into, or no sample to change, or if all logits are 0.
    """
    module = model if isinstance(model, nn.Module) else None
    device = batch.tokens.device if batch is not None else _device(module)
    vocab_size = vocab_size or _vocabulary(module) or (0 if batch is None else int(batch.tokens.max()) + 1)
    if vocab_size < 2:
        raise ValueError(
            f"vocab_size is {vocab_size}; give the number of tokens that the model knows, at least 2"
        )
    generator = torch.Generator().manual_seed(seed)
    pack = _first(batch) if batch is not None else _make_pack(max_seq_len, vocab_size, generator).to(device)
    rows = _rows(pack)
    shifts = torch.randint(1, vocab_size, pack.tokens.shape, generator=generator).to(device)
    other = (pack.tokens + shifts) % vocab_size  # in every place another token

    def logits(of: Batch) -> torch.Tensor:
        torch.manual_seed(seed)
        return _logits(model(of) if inputs is None else model(**inputs(of)))

    def logits_with_other(where: slice) -> torch.Tensor:
        tokens = pack.tokens.clone()
        tokens[:, where] = other[:, where]
        return logits(replace(pack, tokens=tokens))

    moves: list[Leak] = []

    def compare(kind: Kind, ours: torch.Tensor, sample: int, source: int | None = None) -> None:
        """Of ``ours`` the rows of the sample."""
        distances = ((ours - base[rows[sample]]).norm(dim=-1) / scale).nan_to_num(nan=torch.inf)
        # Alone, a token of a mixture of experts may take another one, by rounding; lost positions or windows move many.
        moves.append(
            Leak(kind, sample, float(distances.mean() if kind == "alone" else distances.max()), source)
        )

    # Where there are fewer, some are looked at twice: passes of a sharded model are collective, and all ranks
    # must make as many.
    looked_at = [number % len(rows) for number in range(SAMPLES)]
    with _undisturbed(module, device, eager=batch is None):
        base = logits(pack)
        scale = base[: rows[-1].stop].norm(dim=-1).mean()
        if scale == 0:
            raise ValueError(
                "all logits of the model are 0, so nothing shows; give it weights, random ones will do"
            )
        again, repadded = logits(pack), logits_with_other(slice(rows[-1].stop, None))
        for sample, where in enumerate(rows):
            compare("noise", again[where], sample)
            compare("padding", repadded[where], sample)
        longest = max(rows, key=lambda where: where.stop - where.start)
        middle = (longest.start + longest.stop) // 2
        halved = logits_with_other(slice(longest.start, middle))[middle : longest.stop]
        seen = (halved - base[middle : longest.stop]).norm(dim=-1).max() / scale
        for source in looked_at:
            changed = logits_with_other(rows[source])
            for sample, where in enumerate(rows):
                if sample != source:
                    compare("sample", changed[where], sample, source)
        with _native(module, inputs) as native:
            for sample in looked_at:
                tokens = pack.tokens[:, rows[sample]]
                alone = logits(_alone(pack, tokens)) if native is None else native(tokens)
                compare("alone", alone[: tokens.shape[1]], sample)
    allowed = _limit(module, base.dtype, device) if limit is None else limit
    leaks = [move for move in dict.fromkeys(moves) if move.moved > allowed]
    return LeakReport(
        lengths=tuple(where.stop - where.start for where in rows),
        leaks=tuple([leak for leak in leaks if leak.kind == "noise"] or leaks),
        limit=allowed,
        worst=max(move.moved for move in moves),
        blind=bool(seen <= allowed),
    )


def _make_pack(max_seq_len: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """Four samples and padding, with tokens at random."""
    if max_seq_len < 8:
        raise ValueError(f"max_seq_len is {max_seq_len}; the probe's pack needs 8 tokens or more")
    return _pack_of(
        torch.randint(0, vocab_size, (1, max_seq_len), generator=generator),
        [max(1, int(share * max_seq_len)) for share in SHARES],
    )


def _pack_of(tokens: torch.Tensor, lengths: list[int]) -> Batch:
    """Samples of these lengths, and padding for what is left."""
    segments = [*lengths, tokens.shape[1] - sum(lengths)]
    positions = torch.cat([torch.arange(length) for length in segments])[None]
    return Batch(
        tokens=tokens,
        labels=torch.full_like(tokens, IGNORE_INDEX),
        input_pos=positions.to(tokens.device),
        seq_lens=torch.tensor([segments], dtype=torch.int32, device=tokens.device),
        fragments=(tuple(Fragment((number,), 0, length) for number, length in enumerate(lengths)),),
    )


def _first(batch: Batch) -> Batch:
    """Its first pack."""
    if not batch.fragments or not batch.fragments[0]:
        raise ValueError("the first pack of the batch holds no sample; give another batch, or none")
    return Batch(
        batch.tokens[:1], batch.labels[:1], batch.input_pos[:1], batch.seq_lens[:1], batch.fragments[:1]
    )


def _alone(pack: Batch, tokens: torch.Tensor) -> Batch:
    """One sample in a pack of its own, as long as the other."""
    rest = pack.tokens.shape[1] - tokens.shape[1]
    return _pack_of(nn.functional.pad(tokens, (0, rest)), [tokens.shape[1]])


def _rows(pack: Batch) -> list[slice]:
    """Where each sample lies."""
    ends = accumulate((fragment.stop - fragment.start for fragment in pack.fragments[0]), initial=0)
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _logits(output: Any) -> torch.Tensor:
    """``[tokens, vocab]`` of the only pack, from what torchtune's and Hugging Face's models return."""
    if isinstance(output, list):  # torchtune's, in chunks
        output = torch.cat(output, 1)
    elif not isinstance(output, torch.Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    logits: torch.Tensor = output[0].detach()
    return logits if logits.dtype == torch.float64 else logits.float()


@contextmanager
def _native(
    module: nn.Module | None, inputs: object
) -> Iterator[Callable[[torch.Tensor], torch.Tensor] | None]:
    """From one sequence ``[1, length]`` to its logits, by the model as its authors wrote it, with its own windows.

    None where nobody but the caller knows how to call it.
    """
    if module is None or inputs is None:
        yield None
    elif "transformers" in sys.modules and _hugging_face().find_pretrained(module) is not None:
        with _hugging_face().unprepared(module):
            yield lambda tokens: _logits(module(input_ids=tokens, use_cache=False))
    elif "torchtune" in sys.modules and any(
        isinstance(part, sys.modules["torchtune"].modules.TransformerDecoder) for part in module.modules()
    ):
        yield lambda tokens: _logits(module(tokens))
    else:
        yield None


def _hugging_face() -> Any:
    """Not at the top: it imports this module, and transformers is an extra."""
    return import_module("streampack.attention.transformers")


@contextmanager
def _undisturbed(module: nn.Module | None, device: torch.device, *, eager: bool) -> Iterator[None]:
    """No gradients, no dropout; mode and random generators as before. ``eager``: compiled code is left aside.

    For a pack of the probe's own it must be: torch.compile would take its length as a sign that
    lengths vary, and make kernels for varying ones, which are slower in all that follows.
    """
    training = {part: part.training for part in module.modules()} if module is not None else {}
    devices = [device.index or 0] if device.type != "cpu" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile")
        try:
            if module is not None:
                module.eval()
            yield
        finally:
            for part, mode in training.items():
                part.training = mode
                if isinstance(part, FSDPModule):
                    part.reshard()  # nobody else will: there is no backward pass


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
