"""Log-probabilities of sequences, pairs of answers and policies, against one prediction after the other.

Losses of pairs against torchtune's classes and the papers' formulas, those of policies against a loop over tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Batch, Group, IterablePackedDataset, collate_packed
from streampack.losses import (
    PreferenceLoss,
    bradley_terry_losses,
    label_weights,
    last_values,
    pair_of,
    policy_losses,
    require_unshared,
    sequence_logps,
    token_logps,
    token_losses,
    trained_tokens,
)
from streampack.packing.assemble import null_pack
from streampack.packing.batch import stack_packs
from tests.harness.groups import batch_of, label, segments, trees, without_sharing

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


# The gradient is rounded once, to bf16, from sums in fp32.
@pytest.mark.parametrize(
    ("dtype", "limit", "rounding"),
    [(torch.float64, 1e-12, 1e-10), (torch.float32, 1e-6, 1e-5), (torch.bfloat16, 1e-6, 2.0**-8)],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("chunk_size", [1, 5, 512])
def test_sums_counts_and_gradients_are_those_of_single_predictions(
    dtype: torch.dtype, limit: float, rounding: float, parts: int, chunk_size: int
) -> None:
    assert len(BATCH.tokens) > 1
    logits = logits_for(BATCH, dtype=dtype)
    given = logits if parts == 1 else list(logits.chunk(parts, 1))
    sums, counts = sequence_logps(given, BATCH, chunk_size=chunk_size)
    exact = logits.detach().double().requires_grad_()
    theirs, numbers = naive_sums(exact, BATCH)
    assert torch.equal(counts, numbers)
    assert counts.sum() > 60
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(sums.double(), theirs, rtol=limit, atol=limit)
    (grad,) = torch.autograd.grad((sums * WEIGHTS).sum(), logits)
    (expected,) = torch.autograd.grad((theirs * WEIGHTS).sum(), exact)
    assert torch.allclose(grad.double(), expected, rtol=rounding, atol=min(rounding / 100, 1e-5))


def test_numbers_of_tokens_are_at_their_labels() -> None:
    logits = logits_for(BATCH)
    ours, naive = token_logps(logits, BATCH), naive_tokens(logits, BATCH)
    expected = torch.zeros_like(ours)
    for place, value in naive.items():
        expected[place] = value.detach()
    assert torch.allclose(ours, expected, rtol=1e-12, atol=0)
    assert trained_tokens(BATCH).nonzero().tolist() == sorted(map(list, naive))


def test_numbers_of_plain_batches_are_their_cross_entropies() -> None:
    batch = packed([[i + 1] * n for i, n in enumerate([5, 9, 2, 7, 27, 4])])
    assert batch.groups is None
    logits = logits_for(batch, dtype=torch.float32)
    assert torch.equal(token_logps(logits, batch), -token_losses(logits, batch.labels))
    sums, counts = sequence_logps(logits, batch)
    sums, losses = sums.detach(), token_losses(logits, batch.labels).detach()
    for pack, lengths in enumerate(batch.seq_lens.tolist()):
        ends = [*accumulate(lengths, initial=0)]
        for number, (start, stop) in enumerate(pairwise(ends)):
            assert float(sums[pack, number]) == pytest.approx(
                -float(losses[pack, start:stop].sum()), rel=1e-6
            )
            assert counts[pack, number] == (batch.labels[pack, start:stop] != IGNORE_INDEX).sum()


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
    for way in (groups, [without_sharing(group) for group in groups]):
        batch = batch_of(way, max_seq_len=40)
        logits = torch.zeros(*batch.tokens.shape, VOCAB, dtype=torch.float64)
        for pack, _, path in segments(batch):
            seen = torch.cat([batch.tokens[pack, start:stop] for start, stop in path]).cumsum(0)
            start, stop = path[-1]
            logits[pack, start:stop] = table[seen[start - stop :] % 1000]
        sums, counts = sequence_logps(logits, batch)
        found.append(
            {
                row: ([float(sums[place]) for place in places], [int(counts[place]) for place in places])
                for row, places in answers_of(batch).items()
            }
        )
    assert found[0].keys() == found[1].keys()
    for row, (values, numbers) in found[0].items():
        assert numbers == found[1][row][1]
        assert values == pytest.approx(found[1][row][0], rel=1e-9)


def answers_of(batch: Batch) -> dict[Any, list[tuple[int, int]]]:
    """The segments that no other continues, by row: pack and number of each."""
    assert batch.groups is not None
    found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for pack, (fragments, parents) in enumerate(zip(batch.fragments, batch.groups.parents, strict=True)):
        for number, fragment in enumerate(fragments):
            if number not in parents:
                found[fragment.row_id].append((pack, number))
    return found


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


def packed(samples: list[Any], **settings: Any) -> Batch:
    rows = [{"sample": sample} for sample in samples]
    common: dict[str, Any] = {"max_seq_len": 28, "num_lanes": 1, "encoder": lambda row: row["sample"]}
    data = IterablePackedDataset(rows, **common | settings)
    return collate_packed(list(data))


def test_the_first_answer_of_a_group_is_the_chosen_one() -> None:
    groups = preference_groups()
    shared, unshared = packed(groups), packed([without_sharing(group) for group in groups])
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


def group_of(answers: int) -> Group:
    lengths = [2, *[1] * answers]
    return Group(range(sum(lengths)), range(sum(lengths)), lengths=lengths, parents=[-1, *[0] * answers])


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        ([group_of(1)], {}, r"row \(0,\) has 1 answer and a pair has 2, the chosen one"),
        ([without_sharing(group_of(1))], {}, r"row \(0,\) has 1 answer and a pair has 2, the chosen one"),
        ([group_of(3)], {}, r"row \(0,\) has 3 answers and a pair has 2, the chosen one"),
        ([without_sharing(group_of(3))], {}, r"row \(0,\) has 3 answers and a pair has 2, the chosen one"),
        ([[1, 2]] * 2, {}, "has 1 answer and a pair has 2"),
        ([group_of(2), [1] * 40], {"overlong": "split"}, r"row \(1,\) has 1 answer and a pair has 2"),
    ],
)
def test_what_is_no_pair(samples: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair_of(packed(samples, **settings))


def test_padding_alone_has_no_pair_and_no_loss_but_a_gradient() -> None:
    """Other ranks wait in the backward pass."""
    batch = stack_packs([null_pack(8), null_pack(8)])
    chosen, rejected = pair_of(batch)
    assert chosen.shape == rejected.shape == (0,)
    logits = torch.randn(2, 8, 5, requires_grad=True)
    sums, counts = sequence_logps(logits, batch)
    assert not counts.any()
    policy = policy_losses(token_logps(logits, batch), batch)
    assert not policy.any()
    for loss in (sums.flatten()[chosen].sum(), policy.sum()):
        assert not torch.autograd.grad(loss, logits)[0].any()


def test_last_values_are_those_of_last_tokens_and_not_of_padding() -> None:
    samples = [[9] * n for n in (3, 8, 5)]
    for batch in (BATCH, packed(samples, max_seq_len=16, pad_seqs_to=8, strategy="next_fit")):
        values = torch.arange(batch.tokens.numel(), dtype=torch.float64).view(batch.tokens.shape)
        found = last_values(values, batch)
        expected = torch.zeros_like(found)
        for pack, (fragments, lengths) in enumerate(
            zip(batch.fragments, batch.seq_lens.tolist(), strict=True)
        ):
            starts = accumulate(lengths, initial=0)
            for segment, (fragment, start) in enumerate(zip(fragments, starts, strict=False)):
                expected[pack, segment] = values[pack, start + fragment.stop - fragment.start - 1]
        assert torch.equal(found, expected)


def test_cross_entropy_over_shared_prompts_is_refused() -> None:
    groups = preference_groups()
    shared, unshared = packed(groups), packed([without_sharing(group) for group in groups])
    for refuse in (require_unshared, lambda batch: label_weights(batch, loss_norm="token")):
        with pytest.raises(
            ValueError, match="share a prompt, and cross-entropy .*; set share_prefix=False in"
        ):
            refuse(shared)
    weights = label_weights(unshared, loss_norm="token")
    assert weights.sum() == shared.num_trained == unshared.num_trained


def siblings(answers: int) -> Group:
    """A prompt and so many answers, whose first tokens one token predicts."""
    lengths, size = [3, *[2] * answers], 3 + 2 * answers
    return Group(
        range(1, size + 1), [-100] * 3 + [5] * 2 * answers, lengths=lengths, parents=[-1, *[0] * answers]
    )


@pytest.mark.parametrize("groups", [[siblings(2)] * 3, [siblings(8)] * 3, trees()], ids=["2", "8", "trees"])
def test_memory_that_nobody_wrote_reaches_no_number(groups: list[Group]) -> None:
    """Each tensor that is made without values holds NaN."""
    batch = batch_of(groups)
    found = []
    for poisoned in (False, True):
        torch.use_deterministic_algorithms(poisoned)
        try:
            assert bool(torch.empty(100).isnan().all()) == poisoned
            logits = logits_for(batch)
            sums, counts = sequence_logps(list(logits.chunk(3, 1)), batch, chunk_size=5)
            (grad,) = torch.autograd.grad((sums * torch.arange(sums.numel()).view_as(sums)).sum(), logits)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append((sums, counts, grad))
    assert all(torch.equal(clean, same) for clean, same in zip(*found, strict=True))


# Losses of pairs.

DRAWN = torch.Generator().manual_seed(0)
LOGPS = [-20 * torch.rand(50, generator=DRAWN, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("DPOLoss", {"beta": 0.3}, {"beta": 0.3}),
        ("DPOLoss", {"beta": 0.3, "label_smoothing": 0.2}, {"beta": 0.3, "label_smoothing": 0.2}),
        ("RSOLoss", {"gamma": 0.3}, {"beta": 0.3, "form": "hinge"}),
    ],
)
def test_losses_and_rewards_are_torchtunes(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    losses = pytest.importorskip("torchtune.rlhf.loss")
    found, expected = [], []
    for module, results in ((PreferenceLoss(**ours), found), (getattr(losses, name)(**theirs), expected)):
        logps = [each.clone().requires_grad_() for each in LOGPS]
        values = module(*logps)
        results += [*values, *torch.autograd.grad(values[0].sum(), logps)]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    assert not found[1].requires_grad
    assert not found[2].requires_grad


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({"form": "ipo", "beta": 0.4}, lambda c, r, rc, rr: ((c - rc) - (r - rr) - 1 / 0.8) ** 2),
        ({"form": "ipo", "beta": 0.4, "label_smoothing": 0.1},
         lambda c, r, rc, rr: 0.9 * ((c - rc) - (r - rr) - 1 / 0.8) ** 2
                              + 0.1 * ((r - rr) - (c - rc) - 1 / 0.8) ** 2),
        ({"beta": 2.0, "margin": 0.5, "reference_free": True},  # SimPO, of means
         lambda c, r, rc, rr: -math.log(sigmoid(2 * (c - r) - 0.5))),
        ({"form": "hinge", "beta": 0.2, "margin": 0.5},
         lambda c, r, rc, rr: max(0.0, 1.5 - 0.2 * ((c - rc) - (r - rr)))),
    ],
)  # fmt: skip
def test_other_forms_are_those_of_their_papers(settings: dict[str, Any], formula: Any) -> None:
    losses, chosen, rejected = PreferenceLoss(**settings)(*(each / 4 for each in LOGPS))
    rows = list(zip(*((each / 4).tolist() for each in LOGPS), strict=True))
    assert losses.tolist() == pytest.approx([formula(*row) for row in rows])
    free = settings.get("reference_free", False)
    beta = settings["beta"]
    assert chosen.tolist() == pytest.approx([beta * (c - (0 if free else rc)) for c, _, rc, _ in rows])
    assert rejected.tolist() == pytest.approx([beta * (r - (0 if free else rr)) for _, r, _, rr in rows])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "dpo"}, "form='dpo' is unknown; choose one of 'sigmoid', 'ipo', 'hinge'"),
        ({"beta": 0}, "beta=0 is no weight; give a number above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 is no fraction of wrong pairs; give a number from 0"),
        ({"margin": -1.0}, "margin=-1.0 with form='sigmoid'; give 0, or a positive number"),
        ({"margin": 1.0, "form": "ipo"}, "margin=1.0 with form='ipo'; give 0, or a positive number with"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(**settings)


def test_bradley_terry_is_the_odds_of_the_right_order() -> None:
    chosen, rejected, margins = LOGPS[:3]
    for margin in (0.0, -margins):
        losses = bradley_terry_losses(chosen, rejected, margin=margin)
        differences = (chosen - rejected - margin).tolist()
        assert losses.tolist() == pytest.approx([-math.log(sigmoid(each)) for each in differences])


# Losses of policies.


def rollouts(**without: bool) -> Batch:
    """A prompt with three answers and one with two, with advantages and log-probabilities of two older policies."""
    groups, draw = [], np.random.default_rng(5)
    for lengths in ([4, 3, 5, 1], [2, 6, 2]):
        size = sum(lengths)
        tokens = draw.integers(1, 16, size)
        labels = np.where(np.arange(size) < lengths[0], IGNORE_INDEX, tokens)
        masked = np.arange(size) < lengths[0]
        fields = {"advantage": [math.nan, *draw.normal(size=len(lengths) - 1)]}
        token_fields = {
            name: np.where(masked, np.nan, -5 * draw.random(size)) for name in ("old_logps", "ref_logps")
        }
        kept = {name: values for name, values in token_fields.items() if not without.get(name)}
        fields = {} if without.get("advantage") else fields
        parents = [-1, *[0] * (len(lengths) - 1)]
        groups.append(
            Group(tokens, labels, lengths=lengths, parents=parents, fields=fields, token_fields=kept)
        )
    return packed(groups)


def naive_policy(logps: torch.Tensor, batch: Batch, low: float, high: float, kl: float) -> torch.Tensor:
    assert batch.groups is not None
    losses = torch.zeros_like(logps)
    old, ref = (batch.groups.token_fields.get(name) for name in ("old_logps", "ref_logps"))
    trained = trained_tokens(batch)
    for pack, segment, path in segments(batch):
        advantage = float(batch.groups.fields["advantage"][pack, segment])
        for token in range(*path[-1]):
            if not trained[pack, token]:
                continue
            logp = logps[pack, token]
            before = logp.detach() if old is None else old[pack, token]
            ratio = torch.exp(logp - before)
            bound = ratio.clamp(1 - low, 1 + high)
            loss = -min(ratio * advantage, bound * advantage)
            if kl:
                assert ref is not None
                distance = ref[pack, token] - logp
                loss = loss + kl * (distance.exp() - distance - 1)
            losses[pack, token] = loss
    return losses


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("sampled_now", [False, True])
def test_each_token_has_the_loss_of_the_formula(kl: float, sampled_now: bool) -> None:
    batch = rollouts(old_logps=sampled_now)
    logits = torch.randn(*batch.tokens.shape, 16, generator=torch.Generator().manual_seed(1)).double()
    logits.requires_grad_()
    logps = token_logps(logits, batch)
    ours = policy_losses(logps, batch, clip=(0.2, 0.3), kl=kl)
    theirs = naive_policy(logps, batch, 0.2, 0.3, kl)
    assert torch.allclose(ours, theirs)
    assert (ours != 0).sum() == trained_tokens(batch).sum() == 17
    grads = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (ours, theirs)]
    assert torch.allclose(*grads)
    assert grads[0].isfinite().all()
    assert grads[0].any()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda: rollouts(advantage=True), {}, r"no 'advantage' among its fields \(none\); name its column in the"),
        (lambda: rollouts(ref_logps=True), {"kl": 0.1}, r"no 'ref_logps' among its token_fields \(old_logps\); name"),
        (rollouts, {"clip": (1.5, 0.2)}, r"clip=\(1.5, 0.2\) is no pair of distances from 1; give two such as"),
        (lambda: packed([[1, 2]]), {}, "the batch has no groups, so no advantages; encode rows with AnswersEncoder"),
    ],
)  # fmt: skip
def test_what_a_policys_loss_lacks_is_named(make: Any, settings: dict[str, Any], message: str) -> None:
    batch = make()
    with pytest.raises(ValueError, match=message):
        policy_losses(torch.zeros(batch.tokens.shape), batch, **settings)


# On a GPU as on a CPU, and the same each time.


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_losses_and_gradients_are_those_of_the_cpu(dtype: torch.dtype, limit: float) -> None:
    """Of sequences, pairs and policies, and of 200 answers whose first tokens share a predictor."""
    batches = (BATCH, batch_of([siblings(200)], max_seq_len=512), packed(preference_groups()), rollouts())
    for number, batch in enumerate(batches):
        found = []
        for device in ("cpu", "cuda", "cuda"):
            there = batch.to(device)
            logits = logits_for(batch, dtype=dtype).detach().to(device).requires_grad_()
            sums, _ = sequence_logps(list(logits.chunk(3, 1)), there, chunk_size=7)
            loss = (sums * torch.arange(sums.numel(), device=device).view_as(sums)).sum()
            if number == 2:
                chosen, rejected = (sums.flatten()[each] for each in pair_of(there))
                loss = PreferenceLoss()(chosen, rejected, chosen * 0, rejected * 0)[0].sum()
            elif number == 3:
                loss = policy_losses(token_logps(logits, there), there, kl=0.1).sum()
            found.append((loss.detach().cpu(), torch.autograd.grad(loss, logits)[0].cpu()))
        cpu, once, again = found
        for ours, theirs in zip(once, cpu, strict=True):
            assert (ours - theirs).double().norm() <= limit * theirs.double().norm()
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
