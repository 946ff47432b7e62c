"""A packed batch trains exactly as its samples do one by one.

Packs come from a stream, and the packed side takes the path that recipes take (a mask from `make_mask`,
`summed_cross_entropy`). On the other side every sequence goes through the model by itself, unpadded, without mask or
positions, into torch's own cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from streampack import Batch, IterablePackedDataset, collate_packed
from streampack.attention.prepare import make_mask
from streampack.packing.batch import null_pack, to_torchtune
from tests.support.isolation import (
    FAMILIES,
    MAX_SEQ_LEN,
    STREAMS,
    VOCAB,
    Run,
    build,
    differences,
    is_padding,
    own,
    placed,
    run_alone,
    run_packed,
    stream_and_batch,
)

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-8}

# torch warns of torchtune's norm, which has an fp32 input and an fp64 weight.
mixed_precision = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")


@mixed_precision
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family: str, dtype: torch.dtype, stream: str) -> None:
    model = build(family, dtype)
    data, batch = stream_and_batch(stream)
    packed, alone = run_packed(model, batch), run_alone(model, data, batch)
    assert alone.gradient.dtype == alone.logits.dtype == dtype
    assert max(differences(packed, alone).values()) < LIMIT[dtype], differences(packed, alone)


@pytest.mark.parametrize("stream", STREAMS)
def test_the_packs_have_all_kinds_of_sequences(stream: str) -> None:
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


def test_a_null_pack_weighs_nothing() -> None:
    model = build("llama3")
    data, batch = stream_and_batch("exact_fit")
    null = to_torchtune(null_pack(MAX_SEQ_LEN))
    with_null = run_packed(model, collate_packed([*data, null]))
    assert max(differences(with_null, run_packed(model, batch)).values()) < LIMIT[torch.float32]
    only_null = run_packed(model, collate_packed([null, null]))
    assert only_null.loss == 0
    assert not only_null.gradient.any()


# Mistakes of a packer: each makes a wrong batch, or a wrong mask, from a right batch.


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
    """The gradient's difference, measured 0.06 to 0.9, is three orders above the limit in fp32, six in fp64."""
    model = build(family, dtype)
    data, batch = stream_and_batch(stream)
    right = run_alone(model, data, batch)
    wrong_batch, wrong_mask = mistake(data, batch)
    wrong = differences(run_packed(model, wrong_batch, mask=wrong_mask), right)
    assert wrong["gradient"] > 1e-2
    assert wrong["loss"] > 10 * LIMIT[torch.float32]


def test_rope_does_not_depend_on_absolute_positions() -> None:
    """Therefore one family here has absolute positions."""
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
    """Attention by itself, without torchtune."""
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
