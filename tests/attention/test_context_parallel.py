"""Shards of context parallelism: the same tokens again, and an attention over ranks that equals the unsharded one."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    Batch,
    IterablePackedDataset,
    collate_packed,
    make_mask,
    shard_for_context_parallel,
    unshard_context_parallel,
)
from streampack.packing.batch import null_pack, to_torchtune
from tests.harness import groups

HEADS, WIDTH, VOCAB = 2, 12, 40


def batch_of(lengths: list[int], *, max_seq_len: int, null: bool = False, **options: Any) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        prompt = length // 3 if number % 2 else 0
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
    data = IterablePackedDataset(rows, max_seq_len=max_seq_len, num_lanes=1, **options)
    return collate_packed([*data, *[to_torchtune(null_pack(max_seq_len))] * null])


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Batch, int]:
    """Draw a batch of padded sequences, and a number of ranks that can share it."""
    size = draw(st.integers(1, 4))
    multiple = 2 * size * draw(st.integers(1, 2))
    limit = multiple * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, limit), min_size=1, max_size=8))
    split = draw(st.booleans())
    options = {"pad_seqs_to": multiple, "split_across_pack": split}
    return batch_of(lengths, max_seq_len=limit, null=draw(st.booleans()), **options), size


def zigzag(length: int, rank: int, size: int) -> list[int]:
    """The places of a rank's tokens in a sequence: chunks written out."""
    chunk = length // (2 * size)
    chunks = [list(range(at, at + chunk)) for at in range(0, length, chunk or 1)]
    return chunks[rank] + chunks[2 * size - 1 - rank] if length else []


def counted(numbers: torch.Tensor, segments: int) -> list[int]:
    return [0, *accumulate(torch.bincount(numbers.flatten(), minlength=segments).tolist())]


@settings(max_examples=60)
@given(drawn=sharded())
def test_shards_are_the_batch_in_two_chunks_of_each_sequence_a_rank(drawn: tuple[Batch, int]) -> None:
    """Lengths of real and of padded tokens are counted one by one."""
    batch, size = drawn
    real = torch.ones_like(batch.tokens, dtype=torch.bool)
    number = torch.zeros_like(batch.tokens)  # of the sequence of each token, through all packs
    for row, lens in enumerate(batch.seq_lens.tolist()):
        for segment, (start, length) in enumerate(zip([0, *accumulate(lens)], lens, strict=False)):
            number[row, start : start + length] = row * len(lens) + segment
            if segment < len(batch.fragments[row]):
                fragment = batch.fragments[row][segment]
                real[row, start + fragment.stop - fragment.start : start + length] = False
    segments = batch.seq_lens.numel()

    shards = [shard_for_context_parallel(batch, rank=rank, size=size) for rank in range(size)]
    for rank, shard in enumerate(shards):
        for row, lens in enumerate(batch.seq_lens.tolist()):
            wanted = [
                start + at
                for start, length in zip([0, *accumulate(lens)], lens, strict=False)
                for at in zigzag(length, rank, size)
            ]
            assert shard.indices[row].tolist() == wanted
            shifted = [*batch.labels[row, 1:].tolist(), IGNORE_INDEX]
            assert shard.labels[row].tolist() == [shifted[i] for i in wanted]
        mine, kept = number.gather(1, shard.indices), real.gather(1, shard.indices)
        assert shard.cu_seqlens.tolist() == counted(number[real], segments)
        assert shard.cu_seqlens_padded.tolist() == counted(number, segments)
        assert shard.rank_cu_seqlens.tolist() == counted(mine[kept], segments)
        assert shard.rank_cu_seqlens_padded.tolist() == counted(mine, segments)
        assert shard.cu_seqlens.dtype == shard.rank_cu_seqlens.dtype == torch.int32
    for name in ("tokens", "input_pos"):
        joined = unshard_context_parallel([getattr(shard, name) for shard in shards], batch)
        assert torch.equal(joined, getattr(batch, name)), name
    assert sum((shard.labels != IGNORE_INDEX).sum() for shard in shards) == batch.num_trained
    wide = torch.randn(*batch.tokens.shape, 3)
    pieces = [wide[torch.arange(len(wide))[:, None], shard.indices] for shard in shards]
    assert torch.equal(unshard_context_parallel(pieces, batch), wide)


def weights() -> dict[str, torch.Tensor]:
    """Embeddings of tokens and positions, queries, keys and values, and logits; in fp64."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"tokens": VOCAB, "positions": 64, "qkv": 3 * WIDTH, "out": VOCAB}
    return {
        name: (0.5 * torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)).requires_grad_()
        for name, rows in shapes.items()
    }


def attended(
    batch: Batch, parts: list[Any]
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Compute logits and loss of all parts of a batch, each of which attends to the keys of all, and the gradients."""
    found = weights()
    mask = make_mask(batch, attention="dense")
    hidden = [found["tokens"][part.tokens] + found["positions"][part.input_pos] for part in parts]
    qkv = [F.linear(x, found["qkv"]).unflatten(-1, (3, HEADS, -1)).unbind(2) for x in hidden]
    keys, values = (
        unshard_context_parallel(each, batch) if len(parts) > 1 else each[0]
        for each in list(zip(*qkv, strict=True))[1:]
    )
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for part, x, (queries, _, _) in zip(parts, hidden, qkv, strict=True):
        own = (
            mask[torch.arange(len(mask))[:, None], part.indices][:, None] if len(parts) > 1 else mask[:, None]
        )
        labels = part.labels if len(parts) > 1 else F.pad(part.labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        out = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (queries, keys, values)), attn_mask=own
        )
        logits.append(F.linear(x + out.transpose(1, 2).flatten(-2), found["out"]))
        loss = loss + F.cross_entropy(
            logits[-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
    (loss / batch.num_trained).backward()
    gradients = {name: weight.grad for name, weight in found.items() if weight.grad is not None}
    return logits, loss, gradients


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"split_across_pack": True}], ids=["exact_fit", "wrap"])
def test_attention_over_ranks_is_that_of_whole_packs(size: int, options: Any) -> None:
    """The ranks are computed one after another, and their gradients add up."""
    lengths = [13, 32, 1, 7, 40, 22, 5, 9]
    batch = batch_of(lengths, max_seq_len=48, pad_seqs_to=8, null=True, **options)
    assert (batch.seq_lens != batch.unpadded_lens).any()
    [whole], loss, gradients = attended(batch, [batch])
    shards = [shard_for_context_parallel(batch, rank=rank, size=size) for rank in range(size)]
    parts, sum_of_parts, sums = attended(batch, shards)
    torch.testing.assert_close(unshard_context_parallel(parts, batch), whole)
    torch.testing.assert_close(sum_of_parts, loss)
    assert len(gradients) == 4
    for name, wanted in gradients.items():
        torch.testing.assert_close(sums[name], wanted)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (
            0,
            4,
            "sequence 1 of pack 0 has 12 tokens, which 4 ranks with two chunks each .* set pad_seqs_to=8 where",
        ),
        (-1, 2, "rank=-1 is not among the size=2 ranks of the group"),
        (2, 2, "rank=2 is not among the size=2 ranks of the group"),
        (0, 0, "size=0 is below 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(rank: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_for_context_parallel(batch_of([8, 12], max_seq_len=32), rank=rank, size=size)


def test_parts_of_other_shapes_and_groups_are_refused() -> None:
    batch = batch_of([8, 12], max_seq_len=32)
    message = r"the part of rank 1 has shape \[1, 8\], .* has parts of \[1, 16\] over 2 ranks"
    with pytest.raises(ValueError, match=message):
        unshard_context_parallel([batch.tokens[:, :16], batch.tokens[:, :8]], batch)
    with pytest.raises(ValueError, match="groups, whose answers attend to a prompt that lies elsewhere"):
        shard_for_context_parallel(groups.batch_of(groups.trees()), rank=0, size=1)


def test_a_shard_moves_to_a_device() -> None:
    batch = batch_of([8, 12], max_seq_len=32, pad_seqs_to=8)
    shard = shard_for_context_parallel(batch, rank=1, size=2)
    moved = shard.to("meta")
    assert moved.tokens.device.type == moved.rank_cu_seqlens.device.type == "meta"
    assert moved.tokens.shape == shard.tokens.shape
