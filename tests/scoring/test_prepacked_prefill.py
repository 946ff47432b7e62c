"""`prefill`: caches and generated tokens are those of each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.prepacked_prefill import prefill
from streampack import prepare_model_for_packing
from tests.harness.hf_models import FAMILIES, VOCAB, Wrapper, build, sizes_of
from tests.harness.hybrid_models import HYBRIDS
from tests.harness.other_families import ISOLATED
from tests.harness.quick import sweep

transformers = pytest.importorskip("transformers")

# One far longer than the window, one without anything to cache, two equal ones with others between them.
LENGTHS = (5, 1, 8, 3, 5, 19)
NEW = 32
MAX_SEQ_LEN = 18  # so that there are two packs
MORE: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
# Families with more in their caches than keys and values, and what is named of it.
REFUSED = {
    "axk2": "DynamicIndexedLayer",
    "deepseek_v32": "DynamicIndexedLayer",
    "dots3_note_text": "DynamicIndexedLayer",
    "glm_moe_dsa": "DynamicIndexedLayer",
    "hy_v4": "DynamicIndexedLayer",
    "mamba": "LinearAttentionLayer, MambaMixer",
    "minimax": "LinearAttentionLayer, MiniMaxLightningAttention",
    "moshi": "DynamicSlidingWindowLayer, and its masks no window",
    "qwen3_next": "LinearAttentionLayer, Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "LinearAttentionLayer, RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvFeedForward, RwkvSelfAttention",
    "xlstm": "xLSTMLayer",
}
QUICK = ("deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "gptj", "llama")
EVERY = sorted({*FAMILIES, *MORE, *ISOLATED} - {*REFUSED, *HYBRIDS})


def models(family: str, **changes: Any) -> tuple[Any, Any]:
    """A model to be prefilled, and the same one that is left as it is."""
    sizes = sizes_of(family) | MORE.get(family, {})
    sizes |= {name: 64 for name in POSITIONS if name in sizes} | changes
    pair = build(family, **sizes), build(family, **sizes)
    for model in pair:
        model.generation_config.eos_token_id = None  # all go on to the end
        model.generation_config.pad_token_id = 0
    return pair


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def check_caches(filled: dict[str, Any], alone: Any, texts: list[list[int]]) -> int:
    """Compare each row with the cache of its prompt alone; return how many tensors were compared."""
    compared = 0
    for number, text in enumerate(texts):
        if len(text) == 1:
            continue
        with torch.no_grad():
            cache = alone(input_ids=torch.tensor([text[:-1]]), use_cache=True).past_key_values
        for ours, theirs in zip(filled["past_key_values"].layers, cache.layers, strict=True):
            if getattr(theirs, "keys", None) is not None:
                length = min(theirs.keys.shape[2], ours.keys.shape[2])
                row = slice(ours.keys.shape[2] - length, None)
                assert_near(ours.keys[number, :, row], theirs.keys[0, :, -length:])
                assert_near(ours.values[number, :, row], theirs.values[0, :, -length:])
                compared += 2
    return compared


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 1e-5 * max(1.0, float(theirs.abs().max()))


def check_generated(
    model: Any,
    filled: dict[str, Any],
    alone: Any,
    texts: list[list[int]],
    *,
    new: int = 8,
    **settings: Any,
) -> None:
    """`generate` goes on with the tokens, and the first logits, that it finds for each prompt alone."""
    settings = {"max_new_tokens": new, "do_sample": False, **settings}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**filled, **settings)
    for number, text in enumerate(texts):
        wanted = alone.generate(torch.tensor([text]), **settings)
        assert found.sequences[number, -new:].tolist() == wanted.sequences[0, -new:].tolist(), number
        assert_near(found.logits[0][number], wanted.logits[0][0])


@pytest.mark.parametrize("family", sweep(EVERY, QUICK))
def test_caches_and_tokens_are_those_of_each_prompt_alone(family: str) -> None:
    model, alone = models(family)
    if family == "llama4_text":
        prepare_model_for_packing(model, attention="dense")  # varlen does not cut samples into chunks
    filled = prefill(model, prompts(), max_seq_len=MAX_SEQ_LEN)
    assert check_caches(filled, alone, prompts()) >= 8
    check_generated(model, filled, alone, prompts(), new=NEW)


@pytest.mark.parametrize(
    "family", sweep(REFUSED, ("deepseek_v32", "minimax", "qwen3_next", "recurrent_gemma", "rwkv"))
)
def test_families_with_more_than_keys_and_values_are_refused(family: str) -> None:
    model, _ = models(family)
    with pytest.raises(ValueError) as error:
        prefill(model, prompts(), max_seq_len=MAX_SEQ_LEN)
    begin = f"prefill fills caches of keys and values, and {family} has {REFUSED[family]}; use model.generate"
    assert str(error.value).startswith(begin)


@pytest.mark.parametrize("lengths", [(7,), (1,), (1, 1, 1), (24, 1), (25,)])
@pytest.mark.parametrize("max_seq_len", [24, 1000])
def test_few_and_short_prompts(lengths: tuple[int, ...], max_seq_len: int) -> None:
    model, alone = models("qwen3")
    if max_seq_len == 1000:
        model.config.max_position_embeddings = 1000
    filled = prefill(model, prompts(lengths), max_seq_len=max_seq_len)
    assert filled["past_key_values"].get_seq_length() == max(lengths) - 1
    check_generated(model, filled, alone, prompts(lengths))


def test_arrays_and_tensors_are_prompts() -> None:
    model, _ = models("llama")
    texts = prompts()
    mixed = [torch.tensor(texts[0]), torch.tensor(texts[2]).numpy(), tuple(texts[3])]
    filled = prefill(model, iter(mixed), max_seq_len=MAX_SEQ_LEN, pad_token_id=7)
    assert filled["input_ids"].tolist() == [[7] * 3 + texts[0], texts[2], [7] * 5 + texts[3]]
    assert filled["attention_mask"].tolist() == [[0] * 3 + [1] * 5, [1] * 8, [0] * 5 + [1] * 3]


def test_beams_after_rows_are_repeated() -> None:
    model, alone = models("llama")
    filled = prefill(model, prompts(), max_seq_len=MAX_SEQ_LEN)
    filled["past_key_values"].batch_repeat_interleave(2)
    settings: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    found = model.generate(**filled, **settings)[:, -6:].tolist()
    assert found == [alone.generate(torch.tensor([text]), **settings)[0, -6:].tolist() for text in prompts()]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, way) for family in ("mistral", "gemma2") for way in ("dense", "varlen")),
        ("llama", "wrapped"),
        ("llama", "in training"),
    ],
)
def test_a_model_is_taken_as_it_is(family: str, way: str) -> None:
    """Prepared, wrapped, or in training, whose activation checkpointing would take the cache away."""
    model, alone = models(family)
    if way in ("dense", "varlen"):
        inputs = prepare_model_for_packing(model, attention=way)
    elif way == "in training":
        model.activation_checkpointing_enable()
        model.train()
    given = Wrapper(model) if way == "wrapped" else model
    filled = prefill(given, prompts(), max_seq_len=MAX_SEQ_LEN)
    if way in ("dense", "varlen"):
        inputs(filled)  # which refuses a model whose attention was changed
    assert check_caches(filled, alone, prompts())
    assert model.training == (way == "in training")
    assert not filled["past_key_values"].layers[0].keys.requires_grad
    model.eval()
    check_generated(model, filled, alone, prompts())


@pytest.mark.slow
def test_a_compiled_model_that_ran_before() -> None:
    """Its graphs were made without a cache."""
    torch._dynamo.reset()
    model, alone = models("llama")
    model.compile(backend="eager")
    inputs = prepare_model_for_packing(model, attention="dense")
    for length in (13, 20):  # of two lengths, so that the second graph is for any
        rows = {
            "input_ids": torch.ones(1, length, dtype=torch.long),
            "seq_lens": torch.tensor([[length - 3, 3]]),
        }
        with torch.no_grad():
            model(**inputs(rows))
    assert check_caches(prefill(model, prompts(), max_seq_len=MAX_SEQ_LEN), alone, prompts())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "there are no prompts; give at least one"),
        ({"prompts": [[3], []]}, "prompt 1 is empty; begin it with a token that begins texts, such as the"),
        (
            {"prompts": [[3], [4] * 26]},
            "prompt 1 has 26 tokens, and max_seq_len=18 allows 19; raise max_seq_len",
        ),
        ({"prompts": [[3, VOCAB]]}, f"prompt 0: token id {VOCAB} is outside the vocabulary of {VOCAB} ids"),
        ({"prompts": [3, 4]}, "prompt 0: "),
        ({"prompts": ["ab"]}, "prompt 0: "),
        ({"max_seq_len": 0}, "max_seq_len=0 is below 1; give at least 1"),
        ({"max_seq_len": 65}, "max_seq_len is 65, and this gpt2 model has 64 positions; set max_seq_len=64"),
        (
            {"of": ("gemma3_text", {"use_bidirectional_attention": True})},
            "this model cannot be packed: gemma3_text",
        ),
        (
            {"model": nn.Linear(2, 2)},
            "Linear holds no Hugging Face model, and prefill fills caches of Hugging",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": prompts(), "max_seq_len": MAX_SEQ_LEN} | changes
    family, sizes = arguments.pop("of", ("gpt2", {}))
    model = arguments.pop("model", None) or models(family, **sizes)[0]
    with pytest.raises(ValueError) as error:
        prefill(model, arguments.pop("prompts"), **arguments)
    assert message in str(error.value)
