"""``pad_seqs_to`` and ``pad_pack_to``: what the planner charges, what lies in packs, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import DISTRIBUTIONS, lower_bound
from benchmarks.lengths import lengths as benchmark_lengths
from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, PackedDataset, collate_packed, plan_packs
from streampack.packing.assemble import assemble
from streampack.packing.batch import stack_packs, unstack_packs
from streampack.packing.groups import Group
from streampack.packing.settings import Packing
from streampack.types import Sample
from tests.support import oracle
from tests.support.strategies import WAYS, settings_of

PAD = 77


@st.composite
def padded_corpora(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw (lengths, max_seq_len, pad_seqs_to)."""
    multiple = draw(st.integers(1, 6))
    limit = multiple * draw(st.integers(1, 5))
    return draw(st.lists(st.integers(1, limit), min_size=1, max_size=20)), limit, multiple


@settings(max_examples=60)
@given(corpus=padded_corpora(), way=st.sampled_from(WAYS))
def test_packs_are_those_of_samples_of_the_padded_lengths(
    corpus: tuple[list[int], int, int], way: str
) -> None:
    lengths, limit, multiple = corpus
    padded = [-(-length // multiple) * multiple for length in lengths]
    reference = oracle.plan(padded, limit, strategy=way, buffer_size=8)
    wanted = [[(i, start, min(stop, lengths[i])) for i, start, stop in pack] for pack in reference]
    found = plan_packs(lengths, limit, buffer_size=8, pad_seqs_to=multiple, **settings_of(way))
    assert [[tuple(span) for span in pack] for pack in found] == wanted


@pytest.mark.parametrize("multiple", [8, 64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_padding_is_within_half_a_point_of_what_the_multiple_costs(name: str, multiple: int) -> None:
    lengths = benchmark_lengths(name, count=4000).tolist()
    packs = sum(1 for _ in plan_packs(lengths, 4096, pad_seqs_to=multiple))
    bound = lower_bound((-(-length // multiple) * multiple for length in lengths), 4096)
    padding, least = (1 - sum(lengths) / (count * 4096) for count in (packs, bound))
    assert 0 <= padding - least < 0.005


@settings(max_examples=60)
@given(corpus=padded_corpora(), way=st.sampled_from(WAYS), most=st.sampled_from([None, 2]))
def test_sequences_lie_at_multiples_and_padding_trains_nothing(
    corpus: tuple[list[int], int, int], way: str, most: int | None
) -> None:
    lengths, limit, multiple = corpus
    rows = [{"tokens": [i + 1] * n, "labels": [i + 1] * n} for i, n in enumerate(lengths)]
    data = IterablePackedDataset(
        rows,
        max_seq_len=limit,
        num_lanes=1,
        padding_idx=PAD,
        pad_seqs_to=multiple,
        max_seqs_per_pack=most,
        **settings_of(way),
    )
    packs = list(data)
    for pack in packs:
        at = 0
        lens = pack["seq_lens"].tolist()
        assert all(length % multiple == 0 for length in lens)
        assert len(pack["fragments"]) <= (most or limit)
        for (row_id, start, stop, _, padding), length in zip(pack["fragments"], lens, strict=False):
            assert length == stop - start + padding
            assert padding < multiple
            assert not padding or stop == lengths[row_id[0]], "only the last part of a sample is padded"
            number, real = row_id[0] + 1, stop - start
            assert pack["tokens"][at : at + length].tolist() == [number] * real + [PAD] * padding
            trained = [IGNORE_INDEX] + [number] * (real - 1) + [IGNORE_INDEX] * padding
            assert pack["labels"][at : at + length].tolist() == trained
            assert pack["input_pos"][at : at + length].tolist() == list(range(length)), "positions go on"
            at += length
        assert set(pack["tokens"][at:].tolist()) <= {PAD}
    ledger = data.ledger()
    assert (ledger.packed, ledger.buffered, ledger.tokens_in) == (sum(lengths), 0, sum(lengths))
    assert ledger.capacity == limit * len(packs)


ROWS = [{"tokens": [i + 1] * n, "labels": [i + 1] * n} for i, n in enumerate((5, 9, 3, 16, 1, 7, 12))]


def batch_of(**changes: Any) -> Batch:
    data = IterablePackedDataset(ROWS, max_seq_len=16, num_lanes=1, **{"pad_seqs_to": 4, **changes})
    return collate_packed(list(data))


def test_a_batch_tells_lengths_with_and_without_padding() -> None:
    batch = batch_of()
    for lens, unpadded, pack in zip(
        batch.seq_lens.tolist(), batch.unpadded_lens.tolist(), batch.fragments, strict=True
    ):
        real = [each.stop - each.start for each in pack]
        assert unpadded[: len(pack)] == real
        assert lens[: len(pack)] == [-(-length // 4) * 4 for length in real]
        assert unpadded[len(pack) :] == lens[len(pack) :], "the padding at the pack's end is a sequence"
    assert batch.num_tokens == sum(len(row["tokens"]) for row in ROWS)
    plain = batch_of(pad_seqs_to=1)
    assert plain.unpadded_lens is plain.seq_lens


def test_packs_of_a_batch_are_packs_again() -> None:
    batch = batch_of()
    again = stack_packs(unstack_packs(batch))
    for name in ("tokens", "labels", "input_pos", "seq_lens", "unpadded_lens"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert again.fragments == batch.fragments


@pytest.mark.parametrize("way", WAYS)
def test_map_style_packs_are_those_of_a_stream(way: str) -> None:
    options = {"max_seq_len": 16, "pad_seqs_to": 4, "padding_idx": PAD, **settings_of(way)}
    stream, packs = IterablePackedDataset(ROWS, num_lanes=1, **options), PackedDataset(ROWS, **options)
    theirs = list(stream)
    assert len(packs) == len(theirs)
    for mine, other in zip(packs, theirs, strict=True):
        for name in ("tokens", "labels", "input_pos", "seq_lens"):
            assert torch.equal(mine[name], other[name]), name
        assert mine["fragments"] == other["fragments"]
    assert packs.ledger().packed == stream.ledger().packed == sum(len(row["tokens"]) for row in ROWS)


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_a_sample_is_too_long_by_its_own_tokens(overlong: str) -> None:
    """One of 16 tokens fits a pack of 16 with any multiple, and one of 17 does not."""
    rows = [{"tokens": [1] * n, "labels": [1] * n} for n in (15, 16, 17)]
    data = IterablePackedDataset(rows, max_seq_len=16, pad_seqs_to=8, overlong=overlong, num_lanes=1)
    found = sorted(each.stop - each.start for pack in data for each in pack["fragments"])
    assert found == {"truncate": [15, 16, 16], "split": [1, 15, 16, 16], "drop": [15, 16]}[overlong]


def test_ids_of_64_bits_and_a_full_pack_are_padded() -> None:
    wide = Sample(np.array([2**40, 2]), np.array([2**40, 2]))
    tokens, labels = assemble([wide, wide], max_seq_len=8, padding_idx=PAD, pad_seqs_to=4)
    assert tokens.tolist() == [2**40, 2, PAD, PAD] * 2
    assert labels.tolist() == [IGNORE_INDEX, 2, IGNORE_INDEX, IGNORE_INDEX] * 2


def test_a_state_of_another_multiple_is_refused_and_can_be_read_on_behind() -> None:
    data = IterablePackedDataset(ROWS, max_seq_len=16, num_lanes=1, pad_seqs_to=4)
    next(iter(data))
    other = IterablePackedDataset(ROWS, max_seq_len=16, num_lanes=1, pad_seqs_to=8)
    with pytest.raises(
        ValueError, match="the state was made with pad_seqs_to=4 and this dataset has pad_seqs_to=8"
    ):
        other.load_state_dict(data.state_dict())
    other.continue_from(data.state_dict())
    assert all(length % 8 == 0 for pack in other for length in pack["seq_lens"].tolist())


@pytest.mark.parametrize("name", ["pad_seqs_to", "pad_pack_to"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: Packing(**options),
        lambda **options: IterablePackedDataset(ROWS, **options),
        lambda **options: PackedDataset(ROWS, **options),
    ],
)
def test_packs_that_are_no_multiple_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError) as error:
        make(max_seq_len=100, **{name: 16})
    assert str(error.value) == (
        f"max_seq_len=100 is no multiple of {name}=16; set max_seq_len to 112, or choose another {name}"
    )
    with pytest.raises(ValueError, match=f"{name}=0 is below 1; give at least 1"):
        make(max_seq_len=100, **{name: 0})


def test_groups_and_torchtunes_packs_are_refused() -> None:
    pair = Group([5, 6, 7], [-100, 6, 7], lengths=[1, 1, 1], parents=[-1, 0, 0])
    data = IterablePackedDataset([0], encoder=lambda _: pair, max_seq_len=16, pad_seqs_to=4)
    with pytest.raises(ValueError, match="is a group of segments, and pad_seqs_to=4 pads samples only"):
        next(iter(data))
    with pytest.raises(ValueError, match="pad_seqs_to, truncate_eos, empty and untrained have no effect"):
        PackedDataset(ROWS, max_seq_len=16, pad_seqs_to=4, parity="torchtune")
