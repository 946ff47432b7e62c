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

from streampack import Batch, IterablePackedDataset, collate_packed
from streampack.attention.prepare import make_mask
from streampack.packing.batch import null_pack, to_torchtune
from tests.support.isolation import (
    FAMILIES,
    MAX_SEQ_LEN,
    STREAMS,
    VOCAB,
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
@pytest.mark.parametrize(
    ("dtype", "stream"),
    [*((torch.float32, stream) for stream in STREAMS), (torch.float64, "overlong")],
    ids=str,
)
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


# Mistakes of a packer: each makes a wrong batch, or a wrong mask, from a right batch. test_torchtune.py has those of
# boundaries and positions.


Mistake = tuple[Batch, torch.Tensor | None]  # None: the mask that belongs to the batch


def plain_causal_mask(_data: IterablePackedDataset, batch: Batch) -> Mistake:
    return batch, torch.ones(len(batch.tokens), MAX_SEQ_LEN, MAX_SEQ_LEN).tril().bool()


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


MISTAKES: list[tuple[Callable[[IterablePackedDataset, Batch], Mistake], str]] = [
    (plain_causal_mask, "exact_fit"),
    (first_token_trained, "exact_fit"),
    (first_label_kept, "exact_fit"),
    (fragments_first_label_kept, "overlong"),
    (padding_trained, "exact_fit"),
]


@pytest.mark.parametrize(("mistake", "stream"), MISTAKES, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_mistake_changes_logits_and_gradients(
    mistake: Callable[[IterablePackedDataset, Batch], Mistake], stream: str
) -> None:
    """The gradient's difference, measured 0.06 to 0.9, is three orders above the limit."""
    model = build("llama3")
    data, batch = stream_and_batch(stream)
    right = run_alone(model, data, batch)
    wrong_batch, wrong_mask = mistake(data, batch)
    wrong = differences(run_packed(model, wrong_batch, mask=wrong_mask), right)
    assert wrong["gradient"] > 1e-2
    assert wrong["loss"] > 10 * LIMIT[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_packed_samples_match_samples_alone_on_cuda(attention: str) -> None:
    """With torchtune's compiled flex attention, both passes."""
    model = build("llama3").cuda()
    data, batch = stream_and_batch("exact_fit")
    batch = batch.to("cuda")
    packed = run_packed(model, batch, mask=make_mask(batch, attention=attention))
    alone = run_alone(model, data, batch)
    assert max(differences(packed, alone).values()) < LIMIT[torch.float32]
