"""No sample sees another: a packed batch trains exactly as its samples do one by one.

Packs come from the real stream, the packed side takes the path that recipes take (a mask from `make_mask`,
`summed_cross_entropy`). The other side knows nothing of packing: every sequence goes through the model by
itself, unpadded, without mask or positions, into torch's own cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from streampack import IGNORE_INDEX, Batch, Fragment, IterablePackedDataset, collate_packed
from streampack.attention.prepare import make_mask
from streampack.losses import summed_cross_entropy
from streampack.packing.batch import null_pack, to_torchtune

VOCAB, MAX_SEQ_LEN = 61, 32
LENGTHS = (5, 32, 1, 17, 9, 2, 23, 12, 3, 8, 20)
STREAMS: dict[str, dict[str, Any]] = {
    "exact_fit": {"strategy": "exact_fit"},
    "best_fit": {"strategy": "best_fit"},
    "first_fit": {"strategy": "first_fit"},
    "next_fit": {"strategy": "next_fit"},
    "overlong": {"overlong": "split"},
    "wrap": {"split_across_pack": True},
}
FAMILIES = ("llama3", "llama2", "lora", "absolute")
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-8}


def rows_of(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Random tokens; the first third of every other row is a prompt, one row is not trained at all."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        prompt = length if number == 4 else length // 3 if number % 2 else 0
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
    return rows


def stream_and_batch(stream: str) -> tuple[IterablePackedDataset, Batch]:
    """A stream and all its packs."""
    lengths = (*LENGTHS, 75) if "split" in str(STREAMS[stream]) else LENGTHS
    data = IterablePackedDataset(rows_of(lengths), max_seq_len=MAX_SEQ_LEN, num_lanes=1, **STREAMS[stream])
    return data, collate_packed(list(data))


class AbsolutePositions(nn.Module):
    """RoPE sees the distances of positions only; this sees the positions."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(MAX_SEQ_LEN, 1, head_dim))

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        return x + (self.table[: x.shape[1]] if input_pos is None else self.table[input_pos])


def build(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny torchtune model with grouped queries. All its parameters are random, LoRA's B too, which starts at 0."""
    llama2 = pytest.importorskip("torchtune.models.llama2")
    llama3 = pytest.importorskip("torchtune.models.llama3")
    sizes = {
        "vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64,
        "intermediate_dim": 48, "max_seq_len": MAX_SEQ_LEN,
    }  # fmt: skip
    if family == "lora":
        linears = ["q_proj", "k_proj", "v_proj", "output_proj"]
        model = llama3.lora_llama3(linears, True, True, lora_rank=4, lora_alpha=8, **sizes)
    elif family == "llama2":
        model = llama2.llama2(**sizes)
    else:
        model = llama3.llama3(**sizes)
    if family == "absolute":
        for layer in model.layers:
            layer.attn.pos_embeddings = AbsolutePositions(head_dim=16)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("scale" in name), std=0.2, generator=generator)
        parameter.requires_grad_(family != "lora" or "lora_" in name)
    # In fp32 the logits come whole, in fp64 as a list: only then does torchtune leave their type alone. Its norms
    # and RoPE compute in fp32 all the same, on the same numbers on both sides.
    model.set_num_output_chunks(3 if dtype == torch.float64 else 0)
    built: nn.Module = model.to(dtype)
    return built


@dataclass
class Run:
    loss: torch.Tensor  # [], the mean over trained tokens
    gradient: torch.Tensor  # [trainable parameters]
    logits: torch.Tensor  # [real tokens, vocab], in the order of the packs


def run_of(model: nn.Module, loss: torch.Tensor, logits: list[torch.Tensor]) -> Run:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trainable)
    return Run(loss.detach(), torch.cat([g.flatten() for g in gradients]), torch.cat(logits).detach())


def whole(output: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else torch.cat(output, 1)


def run_packed(model: nn.Module, batch: Batch, *, mask: Any = None) -> Run:
    mask = make_mask(batch) if mask is None else mask
    output = model(batch.tokens, mask=mask, input_pos=batch.input_pos)
    loss = summed_cross_entropy(output, batch.labels, chunk_size=50) / batch.num_trained.clamp(min=1)
    real = [sum(fragment.stop - fragment.start for fragment in pack) for pack in batch.fragments]
    return run_of(model, loss, [row[:length] for row, length in zip(whole(output), real, strict=True)])


def run_alone(model: nn.Module, data: IterablePackedDataset, batch: Batch) -> Run:
    """The token-weighted mean of the mean losses of the sequences, each by itself, read from its row."""
    loss, trained, logits = torch.zeros((), device=batch.tokens.device), 0, []
    for _, _, fragment in placed(batch):
        tokens, labels = (own(data, fragment, column).to(loss.device) for column in ("tokens", "labels"))
        logits.append(whole(model(tokens[None]))[0])
        if count := int((labels[1:] != IGNORE_INDEX).sum()):
            loss = loss + count * F.cross_entropy(logits[-1][:-1], labels[1:])
            trained += count
    return run_of(model, loss / trained, logits)


def placed(batch: Batch) -> Iterator[tuple[int, int, Fragment]]:
    """(pack, where it begins there, fragment) of all sequences."""
    for number, pack in enumerate(batch.fragments):
        start = 0
        for fragment in pack:
            yield number, start, fragment
            start += fragment.stop - fragment.start


def own(data: IterablePackedDataset, fragment: Fragment, column: str) -> torch.Tensor:
    """What the fragment's row holds."""
    return torch.tensor(data.trace(fragment)["row"][column][fragment.start : fragment.stop])


def differences(ours: Run, theirs: Run) -> dict[str, float]:
    """Relative, by norm."""
    return {
        name: float((getattr(ours, name) - value).norm() / value.norm())
        for name, value in vars(theirs).items()
    }


# torch's remark on torchtune's norm, which gives it an fp32 input and an fp64 weight.
mixed_precision = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")


@mixed_precision
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_alone(family: str, dtype: torch.dtype, stream: str) -> None:
    model = build(family, dtype)
    data, batch = stream_and_batch(stream)
    packed, alone = run_packed(model, batch), run_alone(model, data, batch)
    assert alone.gradient.dtype == alone.logits.dtype == dtype
    assert max(differences(packed, alone).values()) < LIMIT[dtype], differences(packed, alone)


@pytest.mark.parametrize("stream", STREAMS)
def test_the_packs_are_worth_the_test(stream: str) -> None:
    """Several sequences in a pack, padding, a sequence that fills a pack, one of a single token, fragments."""
    _, batch = stream_and_batch(stream)
    lengths = [fragment.stop - fragment.start for _, _, fragment in placed(batch)]
    assert max(map(len, batch.fragments)) > 2
    assert batch.num_tokens < batch.tokens.numel()
    assert {1, MAX_SEQ_LEN} <= set(lengths)
    continued = [fragment for _, _, fragment in placed(batch) if fragment.start > 0]
    assert bool(continued) == ("split" in str(STREAMS[stream]))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_moves_nothing(family: str) -> None:
    model = build(family)
    _, batch = stream_and_batch("next_fit")
    padding = is_padding(batch)
    noise = torch.randint(1, VOCAB, batch.tokens.shape, generator=torch.Generator().manual_seed(4))
    changed = replace(
        batch,
        tokens=torch.where(padding, noise, batch.tokens),
        input_pos=torch.where(padding, noise % MAX_SEQ_LEN, batch.input_pos),
    )
    assert not torch.equal(changed.tokens, batch.tokens)
    before, after = run_packed(model, batch), run_packed(model, changed)
    assert differences(after, before) == {"loss": 0, "gradient": 0, "logits": 0}


def is_padding(batch: Batch) -> torch.Tensor:
    padding = torch.ones_like(batch.tokens, dtype=torch.bool)
    for pack, start, fragment in placed(batch):
        padding[pack, start : start + fragment.stop - fragment.start] = False
    return padding


def test_a_null_pack_weighs_nothing() -> None:
    model = build("llama3")
    data, batch = stream_and_batch("exact_fit")
    null = to_torchtune(null_pack(MAX_SEQ_LEN))
    with_null = run_packed(model, collate_packed([*data, null]))
    assert max(differences(with_null, run_packed(model, batch)).values()) < LIMIT[torch.float32]
    only_null = run_packed(model, collate_packed([null, null]))
    assert only_null.loss == 0
    assert not only_null.gradient.any()


# What a packer can get wrong. Each of these makes a wrong batch, or a wrong mask, of a right batch.


Mistake = tuple[Batch, torch.Tensor | None]  # None: the mask that belongs to the batch


def plain_causal_mask(_data: IterablePackedDataset, batch: Batch) -> Mistake:
    return batch, torch.ones(len(batch.tokens), MAX_SEQ_LEN, MAX_SEQ_LEN).tril().bool()


def mask_a_token_late(_data: IterablePackedDataset, batch: Batch, *, late: int = 1) -> Mistake:
    seq_lens = batch.seq_lens.clone()
    movable = (seq_lens[:, :2] > 1).all(1)
    seq_lens[movable, 0] += late
    seq_lens[movable, 1] -= late
    return batch, make_mask(replace(batch, seq_lens=seq_lens))


def mask_a_token_early(data: IterablePackedDataset, batch: Batch) -> Mistake:
    return mask_a_token_late(data, batch, late=-1)


def positions_run_on(_data: IterablePackedDataset, batch: Batch) -> Mistake:
    return replace(batch, input_pos=torch.arange(MAX_SEQ_LEN).expand_as(batch.input_pos)), None


def positions_restart_a_token_late(_data: IterablePackedDataset, batch: Batch) -> Mistake:
    return replace(batch, input_pos=F.pad(batch.input_pos, (1, 0))[:, :-1]), None


def first_token_trained(
    data: IterablePackedDataset, batch: Batch, *, column: str = "tokens", fragments_only: bool = False
) -> Mistake:
    labels = batch.labels.clone()
    for pack, start, fragment in placed(batch):
        if start and (fragment.start or not fragments_only):
            labels[pack, start] = own(data, fragment, column)[0]
    assert not torch.equal(labels, batch.labels)
    return replace(batch, labels=labels), None


def first_label_kept(data: IterablePackedDataset, batch: Batch) -> Mistake:
    return first_token_trained(data, batch, column="labels")


def fragments_first_label_kept(data: IterablePackedDataset, batch: Batch) -> Mistake:
    return first_token_trained(data, batch, column="labels", fragments_only=True)


def padding_trained(_data: IterablePackedDataset, batch: Batch) -> Mistake:
    return replace(batch, labels=torch.where(is_padding(batch), batch.tokens, batch.labels)), None


MISTAKES: list[tuple[Callable[[IterablePackedDataset, Batch], Mistake], str, str]] = [
    (plain_causal_mask, "llama3", "exact_fit"),
    (mask_a_token_late, "llama3", "exact_fit"),
    (mask_a_token_early, "llama3", "exact_fit"),
    (positions_run_on, "absolute", "exact_fit"),
    (positions_restart_a_token_late, "llama3", "exact_fit"),
    (first_token_trained, "llama3", "exact_fit"),
    (first_label_kept, "llama3", "exact_fit"),
    (fragments_first_label_kept, "llama3", "overlong"),
    (padding_trained, "llama3", "exact_fit"),
]


@mixed_precision
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("mistake", "family", "stream"), MISTAKES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_mistake_shows(
    mistake: Callable[[IterablePackedDataset, Batch], Mistake], family: str, stream: str, dtype: torch.dtype
) -> None:
    """By orders of magnitude: three above the limit in fp32, six in fp64, in the gradient; seen were 0.06 to 0.9."""
    model = build(family, dtype)
    data, batch = stream_and_batch(stream)
    right = run_alone(model, data, batch)
    wrong_batch, wrong_mask = mistake(data, batch)
    wrong = differences(run_packed(model, wrong_batch, mask=wrong_mask), right)
    assert wrong["gradient"] > 1e-2
    assert wrong["loss"] > 10 * LIMIT[torch.float32]


def test_rope_does_not_see_positions_that_run_on() -> None:
    """It turns queries and keys by their distance alone: why one family here has absolute positions."""
    model = build("llama3")
    data, batch = stream_and_batch("exact_fit")
    wrong_batch, _ = positions_run_on(data, batch)
    assert max(differences(run_packed(model, wrong_batch), run_packed(model, batch)).values()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_packed_is_alone_on_cuda(attention: str) -> None:
    """With torchtune's compiled flex attention, both passes."""
    model = build("llama3").cuda()
    data, batch = stream_and_batch("exact_fit")
    batch = batch.to("cuda")
    packed = run_packed(model, batch, mask=make_mask(batch, attention=attention))
    alone = run_alone(model, data, batch)
    assert max(differences(packed, alone).values()) < LIMIT[torch.float32]


@pytest.mark.gpu
def test_flex_keeps_sequences_apart_on_cuda() -> None:
    """The same, of attention by itself: it needs no torchtune."""
    _, batch = stream_and_batch("exact_fit")
    batch = batch.to("cuda")
    generator = torch.Generator().manual_seed(5)
    size = (3, len(batch.tokens), 2, MAX_SEQ_LEN, 16)
    qkv = torch.randn(size, generator=generator).cuda().requires_grad_()
    kept = ~is_padding(batch)[:, None, :, None]
    packed = torch.compile(flex_attention)(*qkv, block_mask=make_mask(batch, attention="flex")) * kept
    alone = torch.zeros_like(packed)
    for pack, start, fragment in placed(batch):
        stop = start + fragment.stop - fragment.start
        q, k, v = qkv[:, pack, :, start:stop]
        alone[pack, :, start:stop] = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    upstream = torch.randn(packed.shape, generator=generator).cuda()
    runs = [
        Run((out * upstream).sum().detach(), torch.autograd.grad(out, qkv, upstream)[0], out.detach())
        for out in (packed, alone)
    ]
    assert max(differences(*runs).values()) < 1e-5
