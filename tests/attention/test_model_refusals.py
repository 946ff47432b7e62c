"""Models that cannot keep samples apart, and batches that a prepared model cannot take: each is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from streampack import (
    Batch,
    FlatteningCollator,
    IterablePackedDataset,
    collate_packed,
    prepare_model_for_packing,
)
from tests.harness import groups
from tests.harness.hf_models import MAX_SEQ_LEN, Wrapper, build, prepared
from tests.harness.hf_trainers import samples
from tests.harness.isolation import differences, run_alone, run_packed, stream_and_batch
from tests.harness.tiny_torchtune import attention_modules
from tests.harness.tiny_torchtune import build as decoder
from tests.harness.vision_models import IMAGE, VIDEO, build_vision

transformers = pytest.importorskip("transformers")
modules = pytest.importorskip("torchtune.modules")


# Models.


def changed(change: Callable[[Any], Any]) -> Any:
    """Return a model of torchtune that was changed."""
    model = decoder("llama3")
    change(model)
    return model


def attention_of_its_own(model: Any) -> None:
    attention = attention_modules(model)[1]
    attention.__class__ = type("Own", (type(attention),), {"forward": lambda self, *args: None})


def encoder(model: Any) -> None:
    attention = attention_modules(model)[1]
    attention.pos_embeddings = None
    model.layers[1] = modules.TransformerCrossAttentionLayer(attention, model.layers[1].mlp)


class Averages(nn.Module):
    """Mixes along the row: each token gets the mean of those before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> Any:
        counts = torch.arange(1, hidden_states.shape[1] + 1)[None, :, None]
        return self.inner(hidden_states + hidden_states.cumsum(1) / counts)


def averaging() -> Any:
    """Return a model of a known family that is probed because one of its modules is nobody's that we know."""
    model: Any = build("llama")
    model.model.layers[1].mlp = Averages(model.model.layers[1].mlp)
    return model


BOTH = ("auto", "dense")
# What makes the model, the attentions, and parts of the message in their order.
MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...], str]] = {
    "no model": (lambda: nn.Linear(2, 2), BOTH, "Linear is not a torchtune or Hugging Face model"),
    "a cache": (
        lambda: changed(lambda model: model.setup_caches(1, torch.float32)),
        BOTH,
        "layer 0 has a key-value cache, ... take it away with torchtune.modules.common_utils.delete_kv_",
    ),
    "a layer that sees ahead": (
        lambda: changed(lambda model: setattr(attention_modules(model)[1], "is_causal", False)),
        BOTH,
        "layer 1 sees later tokens (is_causal=False), which a pack's masks hide; train this model ",
    ),
    "an attention of its own": (
        lambda: changed(attention_of_its_own),
        BOTH,
        "layer 1 has an attention that is not known (Own); train this model without ",
    ),
    "an encoder": (
        lambda: changed(encoder),
        BOTH,
        "layer 1 attends to a second input (images, an encoder's)",
    ),
    "inside another": (lambda: nn.Sequential(decoder("llama3")), BOTH, "Sequential is no TransformerDecoder"),
    "torchtune's dropout": (
        lambda: decoder("llama3", attn_dropout=0.1),
        ("flex", "varlen", "flash"),
        "will not do: only 'dense' has dropout in its attention, ... use 'dense'",
    ),
    "dropout": (
        lambda: build("llama", attention_dropout=0.1),
        ("varlen",),
        "the model drops out attention weights (0.1), which varlen cannot; use 'dense'",
    ),
    "a router's loss": (
        lambda: build("gpt_oss", output_router_logits=True),
        ("dense",),
        "its router's loss (output_router_logits) cannot read",
    ),
    "prompt tuning": (
        lambda: Wrapper(build("llama"), prompt_learning=True),
        ("auto",),
        "prompt tuning trains tokens before each row",
    ),
    "ALiBi": (
        lambda: build("falcon", alibi=True),
        BOTH,
        "this model cannot be packed: falcon counts its bias (ALiBi) from the beginning of a row; train it on padded",
    ),
    "no boundaries": (
        lambda: build("nemotron"),
        ("varlen",),
        "nemotron does not hand boundaries on to its attention; use 'dense' or 'flex'",
    ),
    **{
        f"positions after the padding's, {family}": (
            lambda family=family: build(family, is_decoder=True),
            BOTH,
            f"this model cannot be packed: {family} counts positions from 1 (pad_token_id + 1), and a pack's positions "
            "begin at 0; train it on padded batches, one sample a row",
        )
        for family in ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm")
    },
    "a leak": (
        lambda: build("bert", is_decoder=False),
        ("auto",),
        "this model cannot be packed: bert attends to later tokens (is_causal=False), and a pack's masks hide them; "
        "use padded batches, one sample a row",
    ),
}


@pytest.mark.parametrize(
    ("name", "attention"), [(name, word) for name, (_, words, _) in MODELS.items() for word in words]
)
def test_a_model_is_refused_and_left_as_it_was(name: str, attention: str) -> None:
    make, _, message = MODELS[name]
    model = make()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ValueError, match="(?s:.*)".join(map(re.escape, message.split(" ... ")))):
        prepare_model_for_packing(model, attention=attention)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


@pytest.mark.parametrize(
    ("make", "attention", "message"),
    [
        (
            lambda: build("roformer"),
            "auto",
            "nothing is known of roformer with attention='dense', and it mixes samples",
        ),
        (
            lambda: build("roformer").to("meta"),
            "dense",
            "the model has no weights yet, so nothing shows; load them first",
        ),
        (averaging, "dense", "changing sample 0 moved sample 1 ... try another attention"),
        (averaging, "varlen", "changing sample 0 moved sample 1"),
    ],
)
def test_a_model_of_which_nothing_is_known_is_tried_on_its_first_batch(
    make: Any, attention: str, message: str
) -> None:
    """And on the next one, if it was refused."""
    inputs = prepare_model_for_packing(make(), attention=attention)
    _, batch = stream_and_batch("exact_fit")
    for _ in range(2):
        with pytest.raises(ValueError, match="(?s:.*)".join(map(re.escape, message.split(" ... ")))):
            inputs(batch)


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        # Samples that varlen would not cut into chunks: in packs of any length, and in those the model takes.
        ({"attn_temperature_tuning": False}, "dense"),
        ({"floor_scale": 64}, "dense"),
        ({"floor_scale": 9}, "varlen"),
    ],
)
def test_auto_takes_what_computes_samples_longer_than_a_chunk(
    changes: dict[str, Any], attention: str
) -> None:
    model, alone = (build("llama4_text", attention_chunk_size=8, **changes) for _ in range(2))
    inputs = prepare_model_for_packing(model)
    assert inputs.attention == attention
    longest = 20 if attention == "dense" else 8
    rows = [{"tokens": [*range(5, 5 + n)], "labels": [*range(5, 5 + n)]} for n in (longest, 5, longest, 3)]
    data = IterablePackedDataset(rows, max_seq_len=50 if attention == "dense" else 8, num_lanes=1)
    batch = collate_packed(list(data))
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, batch, data)).values()) < 1e-5
    if attention == "dense":
        why = "varlen refused: llama4_text with this config takes samples of up to 8 tokens: varlen does not cut"
        assert inputs.summary.startswith(f"attention=dense, float32 on cpu; {why}")


# Models that were changed since.


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (
            lambda: build("llama"),
            lambda model: model.set_attn_implementation("eager"),
            "prepared with attention='varlen', and .* changed to 'eager' since; call",
        ),
        (
            lambda: decoder("llama3"),
            lambda model: model.layers.__setitem__(1, decoder("llama3").layers[1]),  # type: ignore[index]
            "was not prepared, or was replaced since; call prepare_model_for_packi",
        ),
        (
            lambda: decoder("llama3"),
            lambda model: model.setup_caches(batch_size=3, dtype=torch.float32),
            "the model has a key-value cache, .* take it away with torchtune.modules",
        ),
    ],
    ids=["attention", "layer", "cache"],
)
def test_a_model_that_was_changed_since_is_refused(make: Any, change: Any, message: str) -> None:
    model = make()
    inputs = prepare_model_for_packing(model, attention="varlen")
    _, batch = stream_and_batch("exact_fit")
    model(**inputs(batch))
    change(model)
    with pytest.raises(ValueError, match=message):
        model(**inputs(batch))


# Batches: how long, with which tokens, and dicts.


def batch_of(length: int, *, spare: int = 0, token: int = 7) -> Batch:
    """Return a pack of one sample."""
    rows = [{"tokens": [token] * length, "labels": [token] * length}]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=length + spare)))


def images(token: int) -> Batch:
    _, batch = stream_and_batch("overlong")
    return replace(batch, tokens=batch.tokens.clone().index_fill_(1, torch.tensor([3]), token))


FOUR = torch.tensor([[7, 8, 9, 4]])
GIVEN = {"input_ids": FOUR, "position_ids": torch.tensor([[0, 1, 2, 0]])}


def flat(**changes: Any) -> dict[str, Any]:
    rows = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in samples(5)]
    return FlatteningCollator(**changes)(rows)


NO_TOKEN = r"token id 61 is outside the model's vocabulary of 61 ids \(0 to 60\); use"
# What makes the model and the batch, and the message.
BATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "torchtune's positions": (
        lambda: decoder("llama3"),
        lambda: batch_of(20, spare=53),
        "packs have 73 tokens, and the model has max_seq_len=32; set max_seq_len=32 or less for the packs, or build "
        "the model with max_seq_len=73",
    ),
    "a token of torchtune": (lambda: decoder("llama3"), lambda: batch_of(4, token=61), NO_TOKEN),
    "a token": (lambda: build("llama"), lambda: batch_of(4, token=61), NO_TOKEN),
    "states and groups": (
        lambda: build("mamba"),
        lambda: groups.batch_of(groups.trees()),
        "mamba has layers that run one sequence at a time, .* share_prefix=False",
    ),
    "no tokens": (
        lambda: build("llama"),
        lambda: {"labels": torch.ones(1, 3)},
        "no tensor of 2 dimensions 'input_ids'",
    ),
    "no boundaries": (
        lambda: build("llama"),
        lambda: flat(return_position_ids=False),
        r"nothing in the batch says where its sequences begin \(it has 'input_ids', 'labels'\); give seq_lens, ",
    ),
    "a mask of 4 dimensions": (
        lambda: build("llama"),
        lambda: flat() | {"attention_mask": torch.ones(1, 1, 9, 9)},
        r"attention_mask has the shape \[1, 1, 9, 9\]",
    ),
    **{
        f"the token {token} of an image": (
            lambda: build_vision("qwen2_5_vl"),
            lambda token=token: images(token),
            f"the token {token}, which stands for an image, video or sound",
        )
        for token in (IMAGE, VIDEO)
    },
    **{
        column: (
            lambda: build_vision("qwen2_5_vl"),
            lambda column=column: GIVEN | {column: torch.zeros(2, 4)},
            f"the batch has {column!r}, and packs hold images only as VisionEncoder makes",
        )
        for column in ("pixel_values", "input_features")
    },
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_refused(name: str) -> None:
    make, batch, message = BATCHES[name]
    inputs = prepare_model_for_packing(make())
    with pytest.raises(ValueError, match=message):
        inputs(batch())


def test_torchtune_counts_windows_of_dense_masks_in_packs() -> None:
    """So an answer behind other answers would see too little of its prompt."""
    inputs = prepare_model_for_packing(decoder("gemma2"))
    with pytest.raises(ValueError, match="torchtune counts this model's window of 7 tokens"):
        inputs(groups.batch_of(groups.trees()))


def test_the_same_without_what_is_refused_is_taken() -> None:
    prepare_model_for_packing(build_vision("qwen2_5_vl"))(GIVEN)
    prepare_model_for_packing(build("llama"))(batch_of(4, token=60))
    prepare_model_for_packing(decoder("llama3"))(batch_of(4, token=60))
    prepare_model_for_packing(decoder("llama3"))(batch_of(20, spare=12))


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("family", "changes", "longest", "message"),
    [
        ("gpt2", {}, 32, "max_seq_len is 33, and this gpt2 model has 32 positions; set max_seq"),
        ("gptj", {}, 32, "max_seq_len is 33, and this gptj model has 32 positions; set max_seq"),
        (
            "llama4_text",
            {"floor_scale": 8},
            7,
            "max_seq_len is 8, but a packed llama4_text model with this config keeps samples apart up to 7: layers "
            r"without RoPE scale queries by their place in the pack \(attn_temperature_tuning\); set max_seq_len=7 or ",
        ),
        ("llama", {}, None, ""),  # RoPE has no table
        ("qwen2_vl", {}, None, ""),  # and that of an image model does not count
    ],
    ids=["gpt2", "gptj", "llama4_text", "llama", "qwen2_vl"],
)
def test_packs_longer_than_a_model_can_take_are_refused(
    family: str, changes: dict[str, Any], longest: int | None, message: str
) -> None:
    """On CUDA, the model would abort the process."""
    model = build_vision(family) if family == "qwen2_vl" else build(family, **changes)
    inputs = prepare_model_for_packing(model, attention="dense")
    taken = inputs(batch_of(5, spare=(longest or MAX_SEQ_LEN) - 5))
    assert int(taken["position_ids"].max()) >= 4
    with pytest.raises(ValueError, match=message) if longest else nullcontext():
        inputs(batch_of(5, spare=(longest or MAX_SEQ_LEN) - 4))


@pytest.mark.parametrize(
    ("family", "attention", "changes", "longest", "why"),
    [
        ("phi3", "dense", LONGROPE, 16, "longrope RoPE turns all samples"),
        ("llama", "varlen", DYNAMIC, MAX_SEQ_LEN, "dynamic RoPE turns all samples"),
        ("llama4_text", "varlen", {}, MAX_SEQ_LEN, "varlen does not cut samples into chunks"),
    ],
)
def test_samples_may_be_shorter_than_their_packs(
    family: str, attention: str, changes: dict[str, Any], longest: int, why: str
) -> None:
    """A limit of a model on lengths holds for samples, not for packs."""
    model, inputs, alone = prepared(family, attention, **changes)
    rows = [{"tokens": [*range(5, 5 + n)], "labels": [*range(5, 5 + n)]} for n in (longest, 5, longest, 3)]
    data = IterablePackedDataset(rows, max_seq_len=4 * longest, num_lanes=1, shuffle=False)
    batch = collate_packed(list(data))
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, batch, data)).values()) < 1e-5
    message = f"of up to {longest}: {why}.*; leave longer ones out, or set max_seq_len="
    with pytest.raises(ValueError, match=message):
        inputs(batch_of(longest + 1, spare=2))
