"""`score` against one forward pass for each sample: every order, length of packs, way of sharing, number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from streampack import Group, IterablePackedDataset, collate_packed, prepare_model_for_packing, score
from streampack.distributed.rank_sync import OtherRankFailed
from streampack.scoring import Score
from tests.harness import hf_models, tiny_torchtune
from tests.harness.hybrid_models import HYBRIDS
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


def check(found: list[Score], expected: list[Score], *, tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.num_tokens == other.num_tokens
        assert one.greedy == other.greedy
        assert one.logp == pytest.approx(other.logp, rel=tolerance, abs=tolerance)
        if one.token_logps is not None:
            np.testing.assert_allclose(one.token_logps, other.token_logps, rtol=tolerance, atol=tolerance)  # type: ignore[arg-type]


def scored(model: nn.Module, pairs: Any, **settings: Any) -> list[Score]:
    return list(score(model, pairs, **({"max_seq_len": 32, "progress": False} | settings)))


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf_models.build("llama").eval()


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "auto"), ("llama", "dense"), ("gemma2", "auto"), ("gpt2", "auto"), ("lfm2", "auto")],
)
def test_hugging_face_models(family: str, attention: str) -> None:
    plain, model = (hf_models.build(family, **HYBRIDS.get(family, {})) for _ in range(2))
    inputs = prepare_model_for_packing(model, attention=attention)
    pairs = requests()
    expected = [alone(plain, pair) for pair in pairs]
    check(scored(model, pairs, inputs=inputs, per_token=True), expected)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
@pytest.mark.parametrize("chunks", [0, 4])
def test_torchtune_models(family: str, chunks: int) -> None:
    plain, model = (tiny_torchtune.build(family, vocab_size=VOCAB) for _ in range(2))
    if chunks:
        model.set_num_output_chunks(chunks)  # type: ignore[operator]
    pairs = requests()
    check(scored(model, pairs, per_token=True), [alone(plain.eval(), pair) for pair in pairs])
    assert not model.norm._forward_hooks  # type: ignore[union-attr]


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_torchtune_models(whole: bool) -> None:
    """A graph leaves out a hook that came after it, and one with a hook is made again for each other hook."""
    torch._dynamo.reset()
    graphs = 0

    def count(graph: Any, _inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    plain, model = (tiny_torchtune.build("llama3", vocab_size=VOCAB).eval() for _ in range(2))
    inputs = prepare_model_for_packing(model, attention="dense")
    compiled: Any = model
    if whole:
        compiled = torch.compile(model, backend=count)
    else:
        model.compile(backend=count)
    draw = random.Random(5)
    pairs = [(ids(draw, 20, 20), ids(draw, 4, 4)) for _ in range(3)]
    expected = [alone(plain, pair) for pair in pairs]
    tokens = [*pairs[0][0], *pairs[0][1]][:-1]  # the last token's logits are not asked for
    batch = collate_packed(list(IterablePackedDataset([tokens], max_seq_len=23, num_lanes=1)))
    tokens_of_score = batch.tokens.as_strided((1, 23), (0, 1))  # graphs depend on strides
    batch = replace(batch, tokens=tokens_of_score)
    with torch.no_grad():
        before = compiled(**inputs(batch))
        for pair, each in zip(pairs, expected, strict=True):
            check(list(score(compiled, [pair], inputs=inputs, max_seq_len=32, progress=False)), [each])
        longer = pairs[0][0][:10], pairs[0][0][10:]  # of other tokens, in a pack as long
        check(scored(compiled, [longer], inputs=inputs), [alone(plain, longer)])
        assert torch.equal(compiled(**inputs(batch)), before)
        before_scores = graphs
        for start in (5, 9):  # one pack, of which other tokens are scored
            labels = [-100] * start + [*tokens, 0][start : start + 3] + [-100] * (21 - start)
            sample = {"tokens": [*tokens, 0], "labels": labels}
            list(score(compiled, [sample], inputs=inputs, max_seq_len=32, progress=False))
        assert graphs == before_scores


@pytest.mark.parametrize("max_seq_len", [31, 32])
@pytest.mark.parametrize("look_ahead", [1, 7, 1000])
@pytest.mark.parametrize("share", [True, False])
def test_any_packs_and_any_order(llama: Any, max_seq_len: int, look_ahead: int, share: bool) -> None:
    pairs = requests(max_seq_len)
    settings = {"max_seq_len": max_seq_len, "look_ahead": look_ahead, "share_prefix": share}
    expected = [alone(llama, pair) for pair in pairs]
    check(scored(llama, pairs, **settings), expected)
    check(scored(llama, iter(pairs[::-1]), **settings), expected[::-1])


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


def test_the_output_layer_computes_what_is_asked_for(llama: Any) -> None:
    rows = []
    hook = llama.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    scored(llama, [([*range(3, 23)], [5]), ([*range(3, 23)], [6]), ([7, 7], [8, 9])])
    hook.remove()
    assert rows == [3]  # one for both letters, two for the other


def test_scores_are_yielded_while_samples_are_read(llama: Any) -> None:
    read = []

    def samples() -> Iterator[Pair]:
        for number, pair in enumerate(requests()):
            read.append(number)
            yield pair

    found = score(llama, samples(), max_seq_len=32, look_ahead=4, progress=False)
    next(found)
    assert len(read) == 4


def test_one_sample_and_none(llama: Any) -> None:
    assert scored(llama, []) == []
    assert scored(llama, [([5, 6], [])]) == [Score(0.0, 0, True)]
    check(scored(llama, [([5], [6])]), [alone(llama, ([5], [6]))])
    [empty] = scored(llama, [([5, 6], [])], per_token=True)
    assert empty.token_logps is not None
    assert empty.token_logps.shape == (0,)


def test_too_long_samples(llama: Any) -> None:
    draw = random.Random(3)
    text, before = ids(draw, 75, 75), ids(draw, 4, 4)
    with pytest.raises(ValueError, match="sample 1: has 74 tokens before its last one, and max_seq_len=32"):
        scored(llama, [before, text])
    [_, cut] = scored(llama, [before, (text, [5, 6])], overlong="truncate")
    check([cut], [alone(llama, (text[-31:], [5, 6]))])
    windows = [(text[:1], text[1:33]), (text[32:33], text[33:65]), (text[42:65], text[65:])]
    parts = [alone(llama, pair) for pair in windows]
    [whole] = scored(llama, [text], overlong="windows", per_token=True)
    joined = np.concatenate([part.token_logps for part in parts if part.token_logps is not None])
    check([whole], [Score(sum(part.logp for part in parts), 74, False, joined)])


def test_a_pair_of_answers(llama: Any) -> None:
    pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
    expected = [alone(llama, ([5, 6], [7, 8])), alone(llama, ([5, 6], [9]))]
    check(scored(llama, pair.answers()), expected)
    check(scored(llama, pair.unshared().answers()), expected)


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


def test_a_prepared_model_keeps_its_attention() -> None:
    model = hf_models.build("llama")
    prepare_model_for_packing(model, attention="dense")
    before = model.config._attn_implementation  # type: ignore[union-attr]
    scored(model, requests()[:3])
    assert model.config._attn_implementation == before  # type: ignore[union-attr]


def test_arguments_that_do_not_fit(llama: Any) -> None:
    with pytest.raises(ValueError, match="overlong='drop' is unknown"):
        score(llama, [], max_seq_len=32, overlong="drop")
    with pytest.raises(ValueError, match="look_ahead=0 is below 1"):
        score(llama, [], max_seq_len=32, look_ahead=0)
    gpt2 = hf_models.build("gpt2")
    with pytest.raises(ValueError, match="has 32 positions"):
        score(gpt2, [], max_seq_len=33)
    with pytest.raises(ValueError, match="sample 1: token id 61 is outside the vocabulary of 61"):
        scored(llama, [[5, 6], ([5], [61])])


def on_ranks(model: nn.Module, pairs: list[Pair], look_ahead: int) -> list[Score]:
    return scored(model, pairs, look_ahead=look_ahead)


@pytest.mark.parametrize("look_ahead", [3, 30, 100])
def test_ranks_share_the_work(llama: Any, look_ahead: int) -> None:
    pairs = requests()
    expected = [alone(llama, pair) for pair in pairs]
    for found in run_forked(on_ranks, 2, llama, pairs, look_ahead):
        check(found, expected)


def many_times(model: nn.Module) -> list[int]:
    opened = []
    for _ in range(3):
        scored(model, [[5, 6], [7, 8, 9]])
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    return opened


def test_ranks_connect_once_for_all_calls(llama: Any) -> None:
    """An evaluation harness calls it for each of its tasks, and a training for each evaluation."""
    for first, *later in run_forked(many_times, 2, llama):
        assert set(later) == {first}


def sharded(model: nn.Module, pairs: list[Pair]) -> list[Score]:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return scored(model, pairs, look_ahead=9)


def test_ranks_of_a_sharded_model() -> None:
    model = hf_models.build("llama").eval()
    pairs = requests()[:23]
    expected = [alone(model, pair) for pair in pairs]
    for found in run_forked(sharded, 2, model, pairs):
        check(found, expected)


def with_other_samples(model: nn.Module) -> tuple[str, list[Score]]:
    pairs = requests(seed=dist.get_rank())
    with pytest.raises(
        ValueError, match=r"different samples, among numbers 0 to 44; .* across_ranks=False"
    ) as caught:
        scored(model, pairs)
    return str(caught.value), scored(model, pairs, across_ranks=False)


def test_ranks_with_samples_of_their_own(llama: Any) -> None:
    for rank, (_, found) in enumerate(run_forked(with_other_samples, 2, llama)):
        check(found, [alone(llama, pair) for pair in requests(seed=rank)])


def with_a_failure(model: nn.Module) -> str:
    def fail(*_: Any) -> None:
        raise MemoryError("full")

    if dist.get_rank() == 1:
        model.register_forward_pre_hook(fail)
    with pytest.raises((MemoryError, OtherRankFailed)) as caught:
        scored(model, requests(), look_ahead=10)
    return str(caught.value)


def test_a_rank_that_fails_ends_the_others() -> None:
    messages = run_forked(with_a_failure, 2, hf_models.build("llama"))
    assert messages == ["rank 1 failed while scoring: MemoryError: full", "full"]


def with_tensor_parallelism(model: Any) -> list[Score]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match=r"must compute the same packs .* set across_ranks=False"):
        broken = hf_models.build("llama")
        broken.lm_head.weight = nn.Parameter(distribute_tensor(broken.lm_head.weight.detach(), mesh))  # type: ignore[union-attr,arg-type]
        scored(broken, [[5, 6]])
    return scored(model, requests()[:5], across_ranks=False)


def test_ranks_that_must_compute_the_same(llama: Any) -> None:
    for found in run_forked(with_tensor_parallelism, 2, llama):
        check(found, [alone(llama, pair) for pair in requests()[:5]])


@pytest.fixture(scope="module")
def five_thousand() -> tuple[Any, list[Pair], list[Score]]:
    """Requests of 1 to 150 tokens, many with a question in common, in random order."""
    model = hf_models.build("llama", max_position_embeddings=4096).eval()
    draw = random.Random(0)
    pairs: list[Pair] = []
    while len(pairs) < 5000:
        question = ids(draw, 1, 140)
        pairs += [(question, ids(draw, 0, 10)) for _ in range(draw.choice([1, 1, 1, 4]))]
    draw.shuffle(pairs)
    return model, pairs, [alone(model, pair) for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("max_seq_len", [150, 1024, 4096])
@pytest.mark.parametrize("ranks", [1, 2])
def test_five_thousand_requests(five_thousand: Any, max_seq_len: int, ranks: int) -> None:
    model, pairs, expected = five_thousand
    settings = {"max_seq_len": max_seq_len, "look_ahead": 700}
    if ranks == 1:
        check(scored(model, pairs, **settings), expected)
        return
    for found in run_forked(with_settings, ranks, model, pairs, settings, timeout=300):
        check(found, expected)


def with_settings(model: nn.Module, pairs: list[Pair], settings: dict[str, int]) -> list[Score]:
    return scored(model, pairs, **settings)
