"""Log-probabilities of sequences and pairs of answers, against one prediction after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, collate_packed
from streampack.losses import (
    label_weights,
    last_values,
    pair_of,
    require_unshared,
    sequence_logps,
    token_logps,
    token_losses,
    trained_tokens,
)
from streampack.losses import sequences as sequences_module
from streampack.packing.batch import null_pack, stack_packs
from streampack.packing.groups import Group
from tests.support.groups import batch_of, label, segments, trees

VOCAB = 64


def logits_for(batch: Batch, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = 3 * torch.randn(*batch.tokens.shape, VOCAB, generator=generator, dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def naive_tokens(logits: torch.Tensor, batch: Batch) -> dict[tuple[int, int], torch.Tensor]:
    """The log-probability of each trained token, by pack and index, each from the logits of the token before it."""
    found = {}
    for pack, segment, path in segments(batch):
        start, stop = path[-1]
        predictors = [path[-2][1] - 1 if len(path) > 1 else -1, *range(start, stop - 1)]
        for token, predictor in zip(range(start, stop), predictors, strict=True):
            if (target := label(batch, pack, segment, token, start)) != IGNORE_INDEX:
                found[pack, token] = logits[pack, predictor].log_softmax(0)[target]
    return found


def naive_sums(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = naive_tokens(logits, batch)
    sums = logits.new_zeros(batch.seq_lens.shape)
    counts = torch.zeros(batch.seq_lens.shape, dtype=torch.int64)
    for pack, segment, path in segments(batch):
        places = [(pack, token) for start, stop in path for token in range(start, stop)]
        values = [tokens[place] for place in places if place in tokens]
        if values:
            sums[pack, segment] = torch.stack(values).sum()
        counts[pack, segment] = len(values)
    return sums, counts


BATCH = batch_of(trees())
WEIGHTS = torch.rand(BATCH.seq_lens.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("chunk_size", [1, 5, 512])
def test_sums_counts_and_gradients_are_those_of_single_predictions(parts: int, chunk_size: int) -> None:
    assert len(BATCH.tokens) > 1
    logits = logits_for(BATCH)
    given = logits if parts == 1 else list(logits.chunk(parts, 1))
    sums, counts = sequence_logps(given, BATCH, chunk_size=chunk_size)
    theirs, numbers = naive_sums(logits, BATCH)
    assert torch.equal(counts, numbers)
    assert counts.sum() > 60
    assert torch.allclose(sums, theirs, rtol=1e-12, atol=0)
    ours, expected = (torch.autograd.grad((values * WEIGHTS).sum(), logits)[0] for values in (sums, theirs))
    assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-12)


def test_numbers_of_tokens_are_at_their_labels() -> None:
    logits = logits_for(BATCH)
    ours, naive = token_logps(logits, BATCH), naive_tokens(logits, BATCH)
    expected = torch.zeros_like(ours)
    for place, value in naive.items():
        expected[place] = value.detach()
    assert torch.allclose(ours, expected, rtol=1e-12, atol=0)
    assert trained_tokens(BATCH).nonzero().tolist() == sorted(map(list, naive))


def test_numbers_of_plain_batches_are_their_cross_entropies() -> None:
    rows = [
        {"tokens": [i % 50 + 1] * n, "labels": [i % 50 + 1] * n} for i, n in enumerate([5, 9, 2, 7, 30, 4])
    ]
    batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=32, num_lanes=1)))
    assert batch.groups is None
    logits = logits_for(batch, dtype=torch.float32)
    assert torch.equal(token_logps(logits, batch), -token_losses(logits, batch.labels))
    sums, counts = sequence_logps(logits, batch)
    theirs, numbers = naive_sums_of_plain(logits, batch)
    assert torch.equal(counts, numbers)
    assert torch.allclose(sums, theirs, rtol=1e-6)


def naive_sums_of_plain(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    losses = token_losses(logits, batch.labels)
    sums, counts = torch.zeros(batch.seq_lens.shape), torch.zeros(batch.seq_lens.shape, dtype=torch.int64)
    for pack, lengths in enumerate(batch.seq_lens.tolist()):
        start = 0
        for number, length in enumerate(lengths):
            sums[pack, number] = -losses[pack, start : start + length].sum()
            counts[pack, number] = (batch.labels[pack, start : start + length] != IGNORE_INDEX).sum()
            start += length
    return sums, counts


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_16_bit_logits_are_summed_in_fp32(dtype: torch.dtype, limit: float) -> None:
    logits = logits_for(BATCH, dtype=dtype)
    sums, _ = sequence_logps(logits, BATCH)
    assert sums.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    theirs, _ = naive_sums(exact, BATCH)
    assert torch.allclose(sums.double(), theirs, rtol=limit, atol=1e-6)
    (grad,) = torch.autograd.grad((sums * WEIGHTS.float()).sum(), logits)
    (expected,) = torch.autograd.grad((theirs * WEIGHTS.float()).sum(), exact)
    assert torch.allclose(grad.double(), expected, rtol=2.0**-8, atol=1e-5)  # rounded once, to bf16


def test_gradients_are_those_of_differences() -> None:
    pair = Group([1, 2, 3, 4, 5, 3], [-100, 2, 3, 4, 5, 3], lengths=[2, 2, 2], parents=[-1, 0, 0])
    batch = batch_of([pair], max_seq_len=10)
    logits = torch.randn(1, 10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check = torch.autograd.gradcheck(
        lambda values: sequence_logps(values, batch, chunk_size=3)[0], logits.requires_grad_()
    )
    assert check


def test_siblings_may_begin_with_one_token_and_share_a_predictor() -> None:
    pair = Group([1, 3, 3, 3], [-100, 3, 3, 3], lengths=[1, 1, 2], parents=[-1, 0, 0])
    batch = batch_of([pair], max_seq_len=8)
    logits = logits_for(batch, dtype=torch.float32)
    sums, _ = sequence_logps(logits, batch)
    (grad,) = torch.autograd.grad(sums[0, 1] + sums[0, 2], logits)
    theirs = 2 * logits[0, 0].log_softmax(0)[3] + logits[0, 2].log_softmax(0)[3]
    assert torch.allclose(grad, torch.autograd.grad(theirs, logits)[0], atol=1e-6)


def test_untrained_predictors_may_have_logits_that_are_not_finite() -> None:
    pair = Group([1, 2, 3, 4], [-100, -100, -100, 4], lengths=[2, 1, 1], parents=[-1, 0, 0])
    whole = Group([1, 2, 3, 4], [-100] * 4, lengths=[2, 1, 1], parents=[-1, 0, 0])
    for group, trained in ((pair, 1), (whole, 0)):
        batch = batch_of([group], max_seq_len=7)
        logits = logits_for(batch).detach()
        logits[0, 0], logits[0, 2:4], logits[0, 6] = torch.nan, torch.inf, torch.nan
        if not trained:
            logits[0, 1] = torch.nan
        logits.requires_grad_()
        sums, counts = sequence_logps(logits, batch)
        assert counts[0, :3].sum() == trained
        (grad,) = torch.autograd.grad(sums.sum(), logits)
        assert sums.isfinite().all()
        assert grad.isfinite().all()
        assert bool(grad[0, 1].any()) == bool(trained)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
def test_shared_and_unshared_groups_have_the_same_numbers(
    sizes: list[tuple[int, list[int]]], seed: int
) -> None:
    """With logits that depend on what a token sees: the sum of its own and all ids before it on its path."""
    draw = np.random.default_rng(seed)
    groups = []
    for prompt, answers in sizes:
        lengths = [prompt, *answers]
        tokens = draw.integers(1, VOCAB, sum(lengths))
        labels = np.where(draw.random(sum(lengths)) < 0.8, tokens, IGNORE_INDEX)
        labels[:prompt] = IGNORE_INDEX
        groups.append(Group(tokens, labels, lengths=lengths, parents=[-1, *[0] * len(answers)]))
    table = torch.randn(1000, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = []
    for way in (groups, [group.unshared() for group in groups]):
        batch = batch_of(way, max_seq_len=40)
        logits = torch.zeros(*batch.tokens.shape, VOCAB, dtype=torch.float64)
        for pack, _, path in segments(batch):
            seen = torch.cat([batch.tokens[pack, start:stop] for start, stop in path]).cumsum(0)
            start, stop = path[-1]
            logits[pack, start:stop] = table[seen[start - stop :] % 1000]
        sums, counts = sequence_logps(logits, batch)
        leaves = [place for _, answers in sequences_module._groups(batch) for place in answers]
        by_row = dict(sequences_module._groups(batch))
        assert len(leaves) == sum(map(len, by_row.values()))
        flat = sums.flatten(), counts.flatten()
        found.append(
            {row: [(float(flat[0][i]), int(flat[1][i])) for i in answers] for row, answers in by_row.items()}
        )
    assert found[0].keys() == found[1].keys()
    for row, answers in found[0].items():
        assert [count for _, count in answers] == [count for _, count in found[1][row]]
        assert [value for value, _ in answers] == pytest.approx(
            [value for value, _ in found[1][row]], rel=1e-9
        )


def planted(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = sequences_module._branches

    def wrong(batch: Batch) -> Any:
        branches = right(batch)
        return branches and change(branches)

    monkeypatch.setattr(sequences_module, "_branches", wrong)


MUTATIONS = {
    "predictor off by one": lambda b: b._replace(
        predictors=[(pack, max(0, at - 1)) for pack, at in b.predictors]
    ),
    "the token before, a sibling's": lambda b: b._replace(
        predictors=list(zip(b.starts[0].tolist(), (b.starts[1] - 1).tolist(), strict=True))
    ),
    "labels in another order": lambda b: b._replace(labels=b.labels.roll(1)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_these_tests_see_a_wrong_predictor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, MUTATIONS[name])
    with pytest.raises(AssertionError):
        test_sums_counts_and_gradients_are_those_of_single_predictions(1, 512)
    with pytest.raises(AssertionError):
        test_numbers_of_tokens_are_at_their_labels()


def pairs_of_rows(batch: Batch) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of the chosen and the rejected answers of a batch, each without what it continues."""
    found = []
    width = batch.seq_lens.shape[1]
    places = {pack * width + number: (pack, *path[-1]) for pack, number, path in segments(batch)}
    for pair in zip(*(index.tolist() for index in pair_of(batch)), strict=True):
        spans = [places[each] for each in pair]
        found.append(tuple(tuple(batch.tokens[pack, start:stop].tolist()) for pack, start, stop in spans))
    return found


def preference_groups(count: int = 9) -> list[Group]:
    groups = []
    for i in range(count):
        lengths = [1 + i % 4, 1 + i % 3, 2 + i % 2]
        tokens = np.arange(sum(lengths)) + 3 * i
        labels = tokens.copy()
        labels[: lengths[0]] = IGNORE_INDEX
        groups.append(Group(tokens, labels, lengths=lengths, parents=[-1, 0, 0]))
    return groups


def packed(groups: list[Group]) -> Batch:
    rows = [{"group": group} for group in groups]
    data = IterablePackedDataset(rows, max_seq_len=28, num_lanes=1, encoder=lambda row: row["group"])
    return collate_packed(list(data))


def test_the_first_answer_of_a_group_is_the_chosen_one() -> None:
    groups = preference_groups()
    shared, unshared = packed(groups), packed([group.unshared() for group in groups])
    assert shared.groups is not None
    assert len(shared.tokens) > 1
    assert unshared.seq_lens.shape[1] > max(map(len, unshared.fragments)), "padding counts as a segment"
    expected = []
    for group in groups:
        spans = [group.bounds[leaf] for leaf in group.leaves]
        expected.append(tuple(tuple(group.tokens[start:stop].tolist()) for start, stop in spans))
    assert sorted(pairs_of_rows(shared)) == sorted(expected)
    whole = [tuple(group.tokens[: group.lengths[0]].tolist()) for group in groups]
    pairs = [tuple(prompt + answer for answer in pair) for prompt, pair in zip(whole, expected, strict=True)]
    assert sorted(pairs_of_rows(unshared)) == sorted(pairs)


@pytest.mark.parametrize("answers", [1, 3])
def test_a_group_of_another_number_of_answers_is_no_pair(answers: int) -> None:
    lengths = [2, *[1] * answers]
    group = Group(range(sum(lengths)), range(sum(lengths)), lengths=lengths, parents=[-1, *[0] * answers])
    for each in (group, group.unshared()):
        with pytest.raises(
            ValueError, match=rf"row \(0,\) has {answers} answers? and a pair has 2, the chosen one"
        ):
            pair_of(packed([each]))


def test_parts_of_split_samples_are_no_answers_of_a_group() -> None:
    rows: list[Any] = [{"input_ids": [1] * 20}, {"group": preference_groups(1)[0]}, {"input_ids": [2] * 3}]
    data = IterablePackedDataset(
        rows,
        max_seq_len=16,
        num_lanes=1,
        overlong="split",
        encoder=lambda row: row.get("group") or row["input_ids"],
    )
    batch = collate_packed(list(data))
    assert any(fragment.start for fragments in batch.fragments for fragment in fragments if fragment.trained)
    found = sorted(len(answers) for _, answers in sequences_module._groups(batch))
    assert found == [1, 1, 1, 2]


def test_plain_samples_are_no_pairs_and_padding_has_none() -> None:
    plain = collate_packed(
        list(IterablePackedDataset([{"input_ids": [1, 2]}] * 2, max_seq_len=8, num_lanes=1))
    )
    with pytest.raises(ValueError, match="has 1 answer and a pair has 2"):
        pair_of(plain)
    empty = stack_packs([null_pack(8), null_pack(8)])
    chosen, rejected = pair_of(empty)
    assert chosen.shape == rejected.shape == (0,)
    logits = torch.randn(2, 8, 5, requires_grad=True)
    sums, counts = sequence_logps(logits, empty)
    assert not counts.any()
    sums.flatten()[chosen].sum().backward()  # other ranks wait in the backward pass
    assert logits.grad is not None
    assert not logits.grad.any()


def test_last_values_are_not_those_of_padding() -> None:
    rows = [{"input_ids": [9] * n} for n in (3, 8, 5)]
    data = IterablePackedDataset(rows, max_seq_len=16, pad_seqs_to=8, strategy="next_fit", num_lanes=1)
    batch = collate_packed(list(data))
    values = torch.arange(batch.tokens.numel()).view(batch.tokens.shape)
    assert last_values(values, batch).tolist() == [[2, 15], [16 + 4, 0]]


def test_last_values_are_those_of_last_tokens() -> None:
    values = torch.arange(BATCH.tokens.numel(), dtype=torch.float64).view(BATCH.tokens.shape)
    found = last_values(values, BATCH)
    real = torch.zeros_like(found, dtype=torch.bool)
    for pack, segment, path in segments(BATCH):
        assert found[pack, segment] == values[pack, path[-1][1] - 1]
        real[pack, segment] = True
    assert not found[~real].any()


def test_cross_entropy_over_shared_prompts_is_refused() -> None:
    groups = preference_groups()
    shared, unshared = packed(groups), packed([group.unshared() for group in groups])
    for refuse in (require_unshared, lambda batch: label_weights(batch, loss_norm="token")):
        with pytest.raises(
            ValueError, match="share a prompt, and cross-entropy .*; set share_prefix=False in"
        ):
            refuse(shared)
    weights = label_weights(unshared, loss_norm="token")
    assert weights.sum() == shared.num_trained == unshared.num_trained
