"""`score` against one forward pass for each sample: every form, order, length of packs, way of sharing, ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from streampack import Group, Sample, Score, prepare_model_for_packing, score
from tests.harness import hf_models, tiny_torchtune
from tests.harness.groups import without_sharing
from tests.harness.processes import run_forked

VOCAB = hf_models.VOCAB
Pair = tuple[list[int], list[int]]


def ids(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(draw.randint(least, most))]


def requests(seed: int = 0, *, longest: int = 32) -> list[Pair]:
    """Return questions with several answers behind shared examples, and texts that share nothing."""
    draw = random.Random(seed)
    found: list[Pair] = []
    examples = ids(draw, 16, 16)
    for _ in range(6):
        question = examples + ids(draw, 1, 8)
        found += [(question, ids(draw, 1, 3)) for _ in range(4)]
    found += [(ids(draw, 1, longest - 6), ids(draw, 0, 6)) for _ in range(20)]
    draw.shuffle(found)
    return found


def alone(model: nn.Module, pair: Pair) -> Score:
    """Score a continuation by a forward pass of its own."""
    context, continuation = pair
    name = "tokens" if "torchtune" in type(model).__module__ else "input_ids"
    with torch.no_grad():
        arguments = {} if name == "tokens" else {"use_cache": False}
        output = model(**{name: torch.tensor([context + continuation])}, **arguments)
    logps = getattr(output, "logits", output)[0].double().log_softmax(-1)
    before = logps[len(context) - 1 : len(context) + len(continuation) - 1]
    targets = torch.tensor(continuation, dtype=torch.long)
    each = before.gather(1, targets[:, None])[:, 0]
    greedy = bool((before.argmax(1) == targets).all())
    return Score(float(each.sum()), len(continuation), greedy, each.numpy())


def check(found: list[Score], expected: list[Score]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.num_tokens, one.greedy) == (other.num_tokens, other.greedy)
        assert one.logp == pytest.approx(other.logp, rel=1e-5, abs=1e-5)
        if one.token_logps is not None:
            assert one.token_logps == pytest.approx(other.token_logps, rel=1e-5, abs=1e-5)


def scored(model: Any, pairs: Any, **settings: Any) -> list[Score]:
    return list(score(model, pairs, **({"max_seq_len": 32, "progress": False} | settings)))


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf_models.build("llama").eval()


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "auto"), ("llama", "dense"), ("gemma2", "auto"), ("gpt2", "auto"), ("lfm2", "auto")],
)
def test_hugging_face_models(family: str, attention: str) -> None:
    plain, model = (hf_models.build(family) for _ in range(2))
    inputs = prepare_model_for_packing(model, attention=attention)
    pairs = requests()
    check(scored(model, pairs, inputs=inputs, per_token=True), [alone(plain, pair) for pair in pairs])
    backend = "varlen" if attention == "auto" else attention
    summary = score(model, pairs, inputs=inputs, max_seq_len=32).summary
    assert summary == inputs.summary == f"attention={backend}, float32 on cpu"


def test_the_likeliest_answer_beside_another_one(llama: Any) -> None:
    question, answer = [*range(1, 21)], list[int]()
    for _ in range(2):
        answer.append(next(i for i in range(VOCAB) if alone(llama, (question + answer, [i])).greedy))
    pairs = [(question, answer), (question, [answer[0] ^ 1, 3])]
    check(scored(llama, pairs), [alone(llama, pair) for pair in pairs])


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
@pytest.mark.parametrize("chunks", [0, 4])
def test_torchtune_models(family: str, chunks: int) -> None:
    plain, model = (tiny_torchtune.build(family, vocab_size=VOCAB) for _ in range(2))
    if chunks:
        model.set_num_output_chunks(chunks)  # type: ignore[operator]
    pairs = requests()
    check(scored(model, pairs, per_token=True), [alone(plain.eval(), pair) for pair in pairs])


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_compiled_models(whole: bool) -> None:
    """A graph leaves out a hook that came after it, and afterwards the model computes what it did before."""
    torch._dynamo.reset()
    plain, model = (tiny_torchtune.build("llama3", vocab_size=VOCAB).eval() for _ in range(2))
    inputs = prepare_model_for_packing(model, attention="dense")
    compiled: Any = model
    if whole:
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    draw = random.Random(5)
    pairs = [(ids(draw, 20, 20), ids(draw, 4, 4))]
    rows = {"tokens": torch.tensor([pairs[0][0]]), "seq_lens": torch.tensor([[12, 8]])}
    with torch.no_grad():
        before = compiled(**inputs(rows))
        for pair in [*pairs, (pairs[0][0][:10], pairs[0][0][10:])]:  # the last is of other tokens
            check(scored(compiled, [pair], inputs=inputs), [alone(plain, pair)])
        assert torch.equal(compiled(**inputs(rows)), before)


@pytest.mark.parametrize(
    ("share", "look_ahead", "max_seq_len"),
    [(True, 1, 32), (False, 7, 31), (True, 1000, 31), (False, 1000, 32)],
)
def test_any_packs_and_any_order(llama: Any, max_seq_len: int, look_ahead: int, share: bool) -> None:
    pairs = requests(max_seq_len)
    settings = {"max_seq_len": max_seq_len, "look_ahead": look_ahead, "share_prefix": share}
    expected = [alone(llama, pair) for pair in pairs]
    check(scored(llama, pairs, **settings), expected)
    check(scored(llama, iter(pairs[::-1]), **settings), expected[::-1])


bits = st.lists(st.integers(3, 4), min_size=1, max_size=12)


@settings(max_examples=25)
@given(
    beginnings=st.lists(st.lists(st.integers(3, 4), min_size=16, max_size=20), min_size=2, max_size=2),
    asked=st.lists(st.tuples(st.integers(0, 1), bits, st.integers(1, 20)), min_size=1, max_size=12),
)
def test_any_trees_of_requests(
    llama: Any, beginnings: list[list[int]], asked: list[tuple[int, list[int], int]]
) -> None:
    """Each request finds its own tokens before each of its predictors, whatever it shares with others."""
    texts = [([*beginnings[which], *rest], start) for which, rest, start in asked]
    pairs = [(text[:start], text[start:]) for text, start in texts]
    expected = [alone(llama, pair) for pair in pairs]
    for share in (True, False):
        check(scored(llama, pairs, share_prefix=share, max_seq_len=48, per_token=True), expected)


def forwarded(model: Any, pairs: list[Pair], **settings: Any) -> int:
    """Return how many tokens the model reads to score pairs."""
    total = 0

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal total
        total += kwargs["input_ids"].numel()

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    scored(model, pairs, **settings)
    hook.remove()
    return total


def test_shared_contexts_are_read_once(llama: Any) -> None:
    draw = random.Random(0)
    question = ids(draw, 20, 20)
    answers = [(question, [*ids(draw, 3, 3), last]) for last in range(3, 7)]
    assert forwarded(llama, answers) == 20 + 4 * 3
    assert forwarded(llama, answers, share_prefix=False) == 4 * 23
    # Answers of one token need no more than the question, whether prefixes are shared or not.
    letters = [(question, [letter]) for letter in range(3, 7)]
    assert forwarded(llama, letters) == forwarded(llama, letters, share_prefix=False) == 20
    # The same sample again costs nothing.
    assert forwarded(llama, [*answers, *answers]) == 32
    # Two levels: examples before questions, and two answers to each.
    deep = [([*question[:8], *[5 + number] * 9], [6, 7, answer]) for number in range(2) for answer in (8, 9)]
    assert forwarded(llama, deep) <= 2 * (8 + 9 + 2)


def test_scores_are_yielded_while_samples_are_read(llama: Any) -> None:
    read = []

    def samples() -> Iterator[Pair]:
        for number, pair in enumerate(requests()):
            read.append(number)
            yield pair

    next(score(llama, samples(), max_seq_len=32, look_ahead=4, progress=False))
    assert len(read) == 4


@pytest.mark.parametrize(
    ("sample", "pair"),
    [
        (([5, 6], [7, 8]), ([5, 6], [7, 8])),
        ([[5, 6], [7, 8]], ([5, 6], [7, 8])),
        ((torch.tensor([5, 6]), np.array([7, 8])), ([5, 6], [7, 8])),
        ({"context": [5, 6], "continuation": [7, 8]}, ([5, 6], [7, 8])),
        ({"tokens": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, ([5, 6], [7, 8])),
        ({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, ([5, 6], [7, 8])),
        (
            Sample(np.array([5, 6, 7, 8]), np.array([5, -100, 7, 8])),
            ([5, 6], [7, 8]),
        ),  # nothing predicts the first
        ({"tokens": [5, 6, 7, 8], "labels": [-100, 6, -100, -100]}, ([5], [6])),
        ([5, 6, 7], ([5], [6, 7])),
        ({"input_ids": [5, 6, 7]}, ([5], [6, 7])),
        (torch.tensor([5, 6, 7]), ([5], [6, 7])),
        ([5, 6], ([5], [6])),  # two ids are no pair
        (([5, 6], []), ([5, 6], [])),
    ],
)
def test_every_form_of_a_sample(llama: Any, sample: Any, pair: Pair) -> None:
    check(scored(llama, [sample], per_token=True), [alone(llama, pair)])
    assert scored(llama, []) == []


GROUP = Group([5, 6, 7], [5, 6, 7], lengths=[1, 1, 1], parents=[-1, 0, 0])


@pytest.mark.parametrize(
    ("sample", "settings", "message"),
    [
        (
            ([], [7]),
            {},
            "an empty context, and nothing predicts the first token of its continuation; begin the",
        ),
        (([5], [61]), {}, "sample 1: token id 61 is outside the vocabulary of 61"),
        (([-1], [7]), {}, "token id -1 is outside"),
        (([5], ["a"]), {}, "column 'the continuation' has shape"),
        ("text", {}, "Texts need an encoder"),
        ({"text": "a"}, {}, "column 'tokens' is missing"),
        (GROUP, {}, r"samples of group.answers\(\)"),
        ([5] * 34, {}, "sample 1: has 33 tokens before its last one, and max_seq_len=32; raise"),
        ([5], {"overlong": "drop"}, "overlong='drop' is unknown"),
        ([5], {"look_ahead": 0}, "look_ahead=0 is below 1"),
        ([5], {"max_seq_len": 33, "model": "gpt2"}, "has 32 positions"),
    ],
)
def test_what_is_refused(llama: Any, sample: Any, settings: dict[str, Any], message: str) -> None:
    model = hf_models.build(settings.pop("model")) if "model" in settings else llama
    with pytest.raises(ValueError, match=message):
        scored(model, [[5, 6], sample], **settings)


@pytest.mark.parametrize("length", [2, 31, 32, 33, 64, 65, 75, 97])
def test_windows_score_each_token_of_a_long_text_once(llama: Any, length: int) -> None:
    """Windows are disjoint, and the last takes all the context it can."""
    text = ids(random.Random(3), length, length)
    parts, done = [], 1
    while done < length:
        stop = min(done + 32, length)
        parts.append(alone(llama, (text[max(0, stop - 33) : done], text[done:stop])))
        done = stop
    joined = np.concatenate([part.token_logps for part in parts if part.token_logps is not None])
    whole = Score(sum(part.logp for part in parts), length - 1, all(part.greedy for part in parts), joined)
    check(scored(llama, [text], overlong="windows", per_token=True), [whole])


def test_long_samples_are_truncated_on_the_left(llama: Any) -> None:
    text = ids(random.Random(3), 75, 75)
    for pair, cut in (((text, [5, 6]), (text[-31:], [5, 6])), (([7], text), (text[-33:-32], text[-32:]))):
        check(scored(llama, [pair], overlong="truncate"), [alone(llama, cut)])


def test_a_pair_of_answers(llama: Any) -> None:
    pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
    expected = [alone(llama, ([5, 6], [7, 8])), alone(llama, ([5, 6], [9]))]
    check(scored(llama, pair.answers()), expected)
    check(scored(llama, without_sharing(pair).answers()), expected)


def test_a_model_in_training_is_scored_without_dropout_and_trains_on() -> None:
    model = hf_models.build("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    plain = hf_models.build("gpt2").eval()
    model.transformer.h[1].eval()  # type: ignore[union-attr,index]
    pairs = requests()[:6]
    generator = torch.get_rng_state()
    check(scored(model, pairs), [alone(plain, pair) for pair in pairs])
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training
    assert not model.transformer.h[1].training  # type: ignore[union-attr,index]
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()


# On ranks, which are processes: what is shared goes over gloo.


def on_ranks(model: nn.Module, pairs: list[Pair]) -> tuple[list[list[Score]], list[Score], list[int]]:
    """Score with several sizes of a window, then samples of one's own; count the open files of each call."""
    shared, opened = [], []
    for look_ahead in (3, 30, 100):
        shared.append(scored(model, pairs, look_ahead=look_ahead))
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    own = requests(seed=dist.get_rank())
    with pytest.raises(ValueError, match=r"different samples, among numbers 0 to 44; .* across_ranks=False"):
        scored(model, own)
    return shared, scored(model, own, across_ranks=False), opened


def test_ranks_share_the_work_or_score_samples_of_their_own(llama: Any, tmp_path: Path) -> None:
    pairs = requests()
    expected = [alone(llama, pair) for pair in pairs]
    for rank, (shared, own, opened) in enumerate(run_forked(on_ranks, 2, llama, pairs)):
        for found in shared:
            check(found, expected)
        check(own, [alone(llama, pair) for pair in requests(seed=rank)])
        assert len(set(opened)) == 1, "ranks connect once for all calls"


def sharded(model: Any, pairs: list[Pair]) -> list[Score]:
    """Score with a sharded model, and refuse one whose ranks must compute the same."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallel: Any = hf_models.build("llama")
    parallel.lm_head.weight = nn.Parameter(distribute_tensor(parallel.lm_head.weight.detach(), mesh))
    with pytest.raises(ValueError, match=r"must compute the same packs .* set across_ranks=False"):
        scored(parallel, [[5, 6]])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return scored(model, pairs, look_ahead=9)


def test_ranks_of_a_sharded_model(tmp_path: Path) -> None:
    model = hf_models.build("llama").eval()
    pairs = requests()[:23]
    expected = [alone(model, pair) for pair in pairs]
    for found in run_forked(sharded, 2, model, pairs):
        check(found, expected)


def with_a_failure(model: nn.Module) -> str:
    def fail(*_: Any) -> None:
        raise MemoryError("full")

    if dist.get_rank() == 1:
        model.register_forward_pre_hook(fail)
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        scored(model, requests(), look_ahead=10)
    return str(caught.value)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    messages = run_forked(with_a_failure, 2, hf_models.build("llama"))
    assert messages == ["rank 1 failed while scoring: MemoryError: full", "full"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("dense", torch.float32),
        ("flex", torch.float32),
        ("varlen", torch.bfloat16),
        ("dense", torch.bfloat16),
    ],
)
def test_scores_of_a_gpu_are_those_of_the_cpu(attention: str, dtype: torch.dtype) -> None:
    """In 16 bits they are as near as those of one sample at a time."""
    pairs = requests()
    plain = hf_models.build("llama", dtype).float()
    model = hf_models.build("llama", dtype).to("cuda")
    inputs = prepare_model_for_packing(model, attention=attention)
    limits = {"rel": 1e-4, "abs": 1e-4} if dtype == torch.float32 else {"rel": 0.03, "abs": 0.1}
    for one, pair in zip(scored(model, pairs, inputs=inputs), pairs, strict=True):
        assert one.logp == pytest.approx(alone(plain, pair).logp, **limits)
