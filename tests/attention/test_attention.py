"""Masks against a naive loop. `test_packed_equals_alone` tests them in models, test_flex.py block masks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from streampack import Batch, IterablePackedDataset, collate_packed, prepare_model_for_packing
from streampack.attention import dense_mask, document_ids
from streampack.attention.prepare import make_mask
from tests.support import hf_models, tiny_torchtune


def naive_ids(seq_lens: list[list[int]], max_seq_len: int) -> list[list[int]]:
    packs = []
    for lengths in seq_lens:
        ids = [number for number, length in enumerate(lengths) for _ in range(length)]
        packs.append(ids + [len(lengths)] * (max_seq_len - len(ids)))
    return packs


def naive_mask(seq_lens: list[list[int]], max_seq_len: int) -> list[list[list[bool]]]:
    return [
        [
            [query >= key and ids[query] == ids[key] for key in range(max_seq_len)]
            for query in range(max_seq_len)
        ]
        for ids in naive_ids(seq_lens, max_seq_len)
    ]


def padded(seq_lens: list[list[int]]) -> torch.Tensor:
    """Make ``seq_lens`` as in a `Batch`: int32, zeros at the end."""
    most = max(map(len, seq_lens))
    return torch.tensor([lengths + [0] * (most - len(lengths)) for lengths in seq_lens], dtype=torch.int32)


@st.composite
def packed(draw: st.DrawFn, *, longest: int = 24) -> tuple[list[list[int]], int]:
    """Draw the segments of one to three packs, with or without the padding's, and the packs' length."""
    max_seq_len = draw(st.integers(1, longest))
    packs = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, max_seq_len), min_size=1))
        ends = sorted(cuts)
        packs.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return packs, max_seq_len


@given(packed())
@example(([[3, 2, 1], [6], [1, 1, 1, 1, 1, 1]], 6))  # zeros behind a full pack
@example(([[4, 1], [5]], 6))  # the padding left out
@example(([[1]], 1))
def test_masks_equal_the_naive_ones(case: tuple[list[list[int]], int]) -> None:
    seq_lens, max_seq_len = case
    ids = document_ids(padded(seq_lens), max_seq_len=max_seq_len)
    expected = naive_ids(seq_lens, max_seq_len)
    assert ids.dtype == torch.int64
    # Padding that was left out has a higher number where there are zeros at the end; only equality counts.
    assert [same(row) for row in ids.tolist()] == [same(row) for row in expected]

    dense = dense_mask(padded(seq_lens), max_seq_len=max_seq_len)
    assert dense.dtype == torch.bool
    assert dense.tolist() == naive_mask(seq_lens, max_seq_len)
    assert dense.any(-1).all(), "softmax over a row without a True is NaN"


def same(ids: list[int]) -> list[int]:
    """Renumber ids in order of appearance."""
    return [list(dict.fromkeys(ids)).index(number) for number in ids]


def test_masks_need_no_host_sync() -> None:
    """On the meta device, reading a value raises."""
    seq_lens = torch.empty(2, 5, dtype=torch.int32, device="meta")
    assert document_ids(seq_lens, max_seq_len=16).device.type == "meta"
    assert dense_mask(seq_lens, max_seq_len=16).shape == (2, 16, 16)
    with pytest.raises((RuntimeError, NotImplementedError)):
        seq_lens.sum().item()


def real_batch() -> Batch:
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3, 3], 1)]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=8, num_lanes=1)))


def test_auto_follows_the_device() -> None:
    batch = real_batch()
    auto, dense, flex = (make_mask(batch, attention=word) for word in ("auto", "dense", "flex"))
    assert isinstance(auto, torch.Tensor)
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(auto, dense)
    assert torch.equal(make_mask(batch, attention="sdpa"), dense)  # type: ignore[arg-type]
    # Here each row has a token of its own, and padding is 0.
    assert torch.equal(dense, (batch.tokens[:, :, None] == batch.tokens[:, None]).tril())
    assert isinstance(flex, BlockMask)
    assert flex.shape == (3, 1, 8, 8)
    on_cuda = SimpleNamespace(
        tokens=SimpleNamespace(device=torch.device("cuda"), shape=batch.tokens.shape), seq_lens=batch.seq_lens
    )
    assert isinstance(make_mask(on_cuda), BlockMask)
    assert isinstance(make_mask(batch.to("meta")), torch.Tensor)


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(
        ValueError, match="attention='sparse' is unknown; choose one of 'auto', 'dense', 'sdpa', 'flex'"
    ):
        make_mask(real_batch(), attention="sparse")


def another_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def another_layer(model: Any) -> None:
    model.layers[1] = tiny_torchtune.build("llama3").layers[1]  # type: ignore[index]


def caches(model: Any) -> None:
    model.setup_caches(batch_size=3, dtype=torch.float32)


@pytest.mark.parametrize(
    ("build", "change", "message"),
    [
        (
            hf_models.build,
            another_attention,
            "prepared with attention='varlen', and .* changed to 'eager' since; call",
        ),
        (
            tiny_torchtune.build,
            another_layer,
            "was not prepared, or was replaced since; call prepare_model_for_packi",
        ),
        (
            tiny_torchtune.build,
            caches,
            "the model has a key-value cache, .* take it away with torchtune.modules",
        ),
    ],
)
def test_a_model_that_was_changed_since_is_refused(build: Any, change: Any, message: str) -> None:
    model = build("llama3" if build is tiny_torchtune.build else "llama")
    inputs = prepare_model_for_packing(model, attention="varlen")
    model(**inputs(real_batch()))
    change(model)
    with pytest.raises(ValueError, match=message):
        model(**inputs(real_batch()))


@pytest.mark.parametrize("build", [hf_models.build, tiny_torchtune.build])
def test_a_token_that_the_model_does_not_have_is_named(build: Any) -> None:
    """The model itself would only say that an index is out of range."""
    model = build("llama3" if build is tiny_torchtune.build else "llama")
    inputs, batch = prepare_model_for_packing(model), real_batch()
    inputs(replace(batch, tokens=batch.tokens.clone().fill_(60)))
    with pytest.raises(
        ValueError, match=r"token id 61 is outside the model's vocabulary of 61 ids \(0 to 60\); use"
    ):
        inputs(replace(batch, tokens=batch.tokens.clone().index_fill_(1, torch.tensor([3]), 61)))
