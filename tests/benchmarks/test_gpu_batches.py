"""The rows of `make gpu` compare like with like: the same samples, counted right, and FLOPs as torch counts them."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from benchmarks.gpu.batches import BATCHES, samples_of, steps_of
from benchmarks.gpu.model import MODELS, Shape, utilization
from benchmarks.gpu.settings import CPU_PARTS
from streampack.attention import dense_mask

TINY = CPU_PARTS["flan-256"]
STACK = replace(TINY, lengths="stack", max_seq_len=512, most_places=700)  # many truncated; steps in parts


# ---- batches


def rows_of_tokens(kind, step):
    """Yield (tokens, labels, segment lengths with padding) for every row of a step's batches."""
    for batch in step.passes:
        if kind == "stock":
            yield from ((pack["tokens"], pack["labels"], pack["seq_lens"].tolist()) for pack in batch)
        else:
            for row, labels, lengths in zip(batch.tokens, batch.labels, batch.seq_lens.tolist(), strict=True):
                yield row, labels, [length for length in lengths if length]


def sequences(kind, steps):
    """Yield the real sequences of all steps, as tuples of tokens. No sample holds a 0, and all padding is 0."""
    for step in steps:
        for row, _, lengths in rows_of_tokens(kind, step):
            yield from (tuple(s.tolist()) for s in row.split(lengths) if s[0] != 0)


@pytest.mark.parametrize("settings", [TINY, STACK], ids=["flan", "stack"])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_sample_comes_once(kind, settings):
    samples = samples_of(settings)
    steps = steps_of(kind, samples, settings)
    found = list(sequences(kind, steps))
    there = [tuple(sample["tokens"].tolist()) for sample in samples]
    if kind == "wrapped":  # cut anywhere, but nothing lost and nothing moved
        assert [*chain(*found)] == [*chain(*there)]
    else:
        assert sorted(found) == sorted(there)
    assert sum(step.tokens for step in steps) == sum(map(len, there))
    assert len(steps) > settings.steps - 1  # enough to time


@pytest.mark.parametrize("settings", [TINY, STACK], ids=["flan", "stack"])
@pytest.mark.parametrize("kind", BATCHES)
def test_the_counts_of_a_step(kind, settings):
    """Counted token by token and pair by pair."""
    for step in steps_of(kind, samples_of(settings), settings):
        tokens = places = pairs = trained = 0
        for row, labels, lengths in rows_of_tokens(kind, step):
            real = row != 0
            segments = [len(row)] if kind == "wrapped" else lengths
            sees = dense_mask(torch.tensor([segments]), max_seq_len=len(row))[0]
            tokens += int(real.sum())
            places += len(row)
            pairs += int((sees & real[:, None] & real[None, :]).sum())
            trained += int((labels[1:] != -100).sum())
        assert (step.tokens, step.places, step.pairs, step.trained) == (tokens, places, pairs, trained)


@pytest.mark.parametrize("kind", ["padded", "grouped", "flattened"])
def test_passes_keep_the_limit(kind):
    steps = steps_of(kind, samples_of(STACK), STACK)
    places = [
        sum(len(row) for row, _, _ in rows_of_tokens(kind, step._replace(passes=[batch])))
        for step in steps
        for batch in step.passes
    ]
    assert max(places) <= STACK.most_places
    assert len(places) > len(steps)  # else nothing was tried
    whole = replace(STACK, most_places=10**6)
    assert all(len(step.passes) == 1 for step in steps_of(kind, samples_of(whole), whole))


def test_mini_batches_arrive_in_order_and_are_padded_to_their_longest():
    samples = samples_of(TINY)
    settings = replace(TINY, most_places=10**6)
    padded, flat = (steps_of(kind, samples, settings) for kind in ("padded", "flattened"))
    assert len(padded) == len(flat) == TINY.steps + 1
    arrived = [sample["tokens"].tolist() for sample in samples]
    per_step = len(arrived) // len(padded)
    for number, (rows, row) in enumerate(zip(padded, flat, strict=True)):
        expected = arrived[number * per_step : (number + 1) * per_step]
        (rows,), (row,) = rows.passes, row.passes
        longest = max(map(len, expected))
        assert rows.tokens.tolist() == [sample + [0] * (longest - len(sample)) for sample in expected]
        assert row.tokens.tolist() == [[*chain(*expected)]]
        assert row.input_pos.tolist() == [[i for sample in expected for i in range(len(sample))]]


# ---- FLOPs


def test_flops_by_hand():
    shape = Shape(vocab_size=10, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=4, intermediate_dim=3)
    # q and output 4 x 4, k and v 4 x 2, three of 4 x 3, output 4 x 10
    assert shape.matmul_weights == 2 * 16 + 2 * 8 + 3 * 12 + 40 == 124
    # 5 tokens, see 1 + 2 + 3 + 4 + 5 = 15: of 2 heads with 2 channels, 2 for the score and 2 for the sum, times 3
    flops = shape.train_flops(tokens=5, pairs=15)
    assert flops == 6 * 124 * 5 + 3 * 15 * 2 * 2 * (2 + 2) == 4440
    assert utilization(shape, tokens=5, pairs=15, seconds=2.0, device="NVIDIA H200") == 4440 / 2 / 989e12
    assert utilization(shape, tokens=5, pairs=15, seconds=2.0, device="a toaster") is None


def test_flops_equal_torchs_count():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shape = Shape(vocab_size=50, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=48)
    with torch.random.fork_rng():
        model = shape.build(device="cpu", dtype="fp32", seed=0)
    counter = FlopCounterMode(display=False)
    with (
        counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # which multiplies whole squares: 16 x 16 pairs in each of 2 rows
        torch.cat(model(torch.ones(2, 16, dtype=torch.int64)), 1).sum().backward()
    assert counter.get_total_flops() == shape.train_flops(tokens=32, pairs=2 * 16 * 16)


def test_the_model_is_llama_3_2_1b():
    from torchtune.models.llama3_2 import llama3_2_1b

    def shapes(model):
        return {name: value.shape for name, value in model.state_dict().items()}

    with torch.random.fork_rng():
        ours = MODELS["1b"].build(device="meta", dtype="bf16", seed=0)
    with torch.device("meta"):
        theirs = llama3_2_1b()
    assert shapes(ours) == shapes(theirs)
    assert next(ours.parameters()).dtype == torch.bfloat16
    norms = sum(value.numel() for name, value in theirs.named_parameters() if name.endswith("scale"))
    assert MODELS["1b"].matmul_weights == sum(value.numel() for value in theirs.parameters()) - norms
