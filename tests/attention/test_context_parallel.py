"""Shards of context parallelism: the same tokens again, and an attention over ranks that equals the unsharded one."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.context_parallel import shard_for_context_parallel, unshard_context_parallel
from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, collate_packed, make_mask
from streampack.packing.assemble import null_pack
from streampack.packing.batch import to_torchtune
from tests.harness import groups

VOCAB = 40


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"split_across_pack": True}], ids=["exact_fit", "wrap"])
def test_attention_over_ranks_is_that_of_whole_packs(size: int, options: Any) -> None:
    """The ranks are computed one after another, each with the keys of all, and their gradients add up."""
    batch = batch_of([13, 32, 1, 7, 40, 22, 5, 9], max_seq_len=48, pad_seqs_to=8, null=True, **options)
    assert (batch.seq_lens != batch.unpadded_lens).any()
    generator = torch.Generator().manual_seed(5)
    weight, out = (torch.randn(VOCAB, n, dtype=torch.float64, generator=generator) for n in (36, 12))
    weight.requires_grad_()
    mask = make_mask(batch, attention="dense")

    def loss_of(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            (hidden @ out.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    def heads(part: Any) -> Any:
        return (weight[part.tokens] * part.input_pos[..., None].cos()).chunk(3, -1)

    whole = F.scaled_dot_product_attention(*heads(batch), attn_mask=mask)
    loss = loss_of(whole, F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX))
    shards = [shard_for_context_parallel(batch, rank=rank, size=size) for rank in range(size)]
    queries, *others = zip(*map(heads, shards), strict=True)
    keys, values = (unshard_context_parallel(parts, batch) for parts in others)
    parts = [
        F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask.gather(1, shard.indices[..., None].expand(-1, -1, 48))
        )
        for query, shard in zip(queries, shards, strict=True)
    ]
    losses = [loss_of(part, shard.labels) for part, shard in zip(parts, shards, strict=True)]
    torch.testing.assert_close(unshard_context_parallel(parts, batch), whole)
    torch.testing.assert_close(sum(losses), loss)
    torch.testing.assert_close(*torch.autograd.grad(sum(losses), weight), *torch.autograd.grad(loss, weight))


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a sequence has 12 tokens, which 4 ranks .* set pad_seqs_to=8 where"
    ):
        shard_for_context_parallel(batch_of([8, 12], max_seq_len=32), rank=0, size=4)
    with pytest.raises(ValueError, match="groups, and their answers attend to a prompt on other ranks"):
        shard_for_context_parallel(groups.batch_of(groups.trees()), rank=0, size=1)
