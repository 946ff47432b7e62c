"""What prepared models take, batches of any collator, and what they refuse: lengths, positions, tokens, images."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from streampack import (
    Batch,
    FlatteningCollator,
    Group,
    IterablePackedDataset,
    PaddedCollator,
    collate_packed,
    find_leaks,
    make_mask,
    prepare_model_for_packing,
)
from streampack.map_style import collators
from tests.harness import groups, hf_models, tiny_torchtune
from tests.harness.hf_models import MAX_SEQ_LEN, build, prepared
from tests.harness.hf_trainers import model as trainers_model
from tests.harness.hf_trainers import samples, truth
from tests.harness.isolation import differences, stream_and_batch
from tests.harness.other_families import sizes_of
from tests.harness.vision_models import IMAGE, VIDEO, build_vision

transformers = pytest.importorskip("transformers")

ROWS = samples(5)
FEATURES = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in ROWS]


# Batches that are dicts of any collator.


def flat(**changes: Any) -> dict[str, Any]:
    return FlatteningCollator(**changes)(FEATURES)


def ones(batch: dict[str, Any]) -> dict[str, Any]:
    """Add the mask that other collators add, with which transformers ignores positions."""
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def left_padded() -> dict[str, Any]:
    batch = PaddedCollator()(FEATURES)
    order = batch["attention_mask"].argsort(dim=1, stable=True)
    return {name: value.gather(1, order) for name, value in batch.items()}


def of_trl() -> dict[str, Any]:
    sft_trainer = pytest.importorskip("trl.trainer.sft_trainer")
    made: dict[str, Any] = sft_trainer.DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True, pad_to_multiple_of=8
    )(FEATURES)
    return made


BATCHES = {
    "flat": flat,
    "flat, static": lambda: flat(max_tokens=96, max_seqs=7, return_flash_attn_kwargs=True),
    "flat, by lengths alone": lambda: flat(return_position_ids=False, return_flash_attn_kwargs=True),
    "flat, by numbers alone": lambda: flat(return_position_ids=False, return_seq_idx=True),
    "flat, from 2": lambda: flat(position_ids_start=2),
    "flat, all ones": lambda: ones(flat()),
    "flat, padded, all ones": lambda: ones(flat(pad_to_multiple_of=16)),
    "transformers": lambda: transformers.DataCollatorWithFlattening()(FEATURES),
    "TRL": of_trl,
    "padded": lambda: PaddedCollator()(FEATURES),
    "padded on the left": left_padded,
    "a BatchEncoding": lambda: transformers.BatchEncoding(flat()),
    "torch's own": lambda: {
        name: torch.stack([pack[name] for pack in IterablePackedDataset(ROWS, max_seq_len=64)])
        for name in ("tokens", "labels", "input_pos")
    },
}


@pytest.fixture(scope="module")
def true_loss() -> float:
    return truth(trainers_model(), ROWS)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("name", BATCHES)
def test_samples_of_a_dict_stay_apart(true_loss: float, attention: str, name: str) -> None:
    made = trainers_model()
    made.config.use_cache = True
    inputs = prepare_model_for_packing(made, attention=attention)
    batch = BATCHES[name]()
    given = {key: value.clone() for key, value in batch.items() if torch.is_tensor(value)}
    assert made(**inputs(batch)).loss.item() == pytest.approx(true_loss, rel=1e-5)
    assert all(torch.equal(batch[key], value) for key, value in given.items())


def test_without_inputs_they_see_one_another(true_loss: float) -> None:
    made = trainers_model()
    made.config.use_cache = True
    assert abs(made(**flat()).loss.item() - true_loss) > 3e-3


def test_the_first_label_of_a_sample_is_never_trained() -> None:
    """A collator may leave it in: it would be predicted from the sample before."""
    made = trainers_model()
    inputs = prepare_model_for_packing(made)
    found = made(**inputs(flat() | {"labels": flat()["input_ids"].clone()})).loss.item()
    rows = [{"tokens": row["tokens"], "labels": row["tokens"]} for row in ROWS]
    assert found == pytest.approx(truth(made, rows), rel=1e-5)
    assert "labels" not in inputs({name: value for name, value in flat().items() if name != "labels"})


def test_torchtune_models_take_dicts_too() -> None:
    llama3 = pytest.importorskip("torchtune.models.llama3").llama3
    decoder = llama3(vocab_size=1024, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=96)
    inputs = prepare_model_for_packing(decoder)
    [pack] = IterablePackedDataset(ROWS, max_seq_len=96)
    batch = collate_packed([pack])
    logits = decoder(**inputs(FlatteningCollator(max_tokens=96)([pack])))
    assert torch.equal(logits, decoder(**inputs(batch)))
    assert torch.equal(make_mask(flat(max_tokens=96)), make_mask(collate_packed([pack])))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": torch.ones(1, 3)}, "the batch has no tensor of 2 dimensions 'input_ids'"),
        ({"input_ids": [[1, 2]]}, "the batch has no tensor of 2 dimensions 'input_ids'"),
        (
            flat(return_position_ids=False),
            r"nothing in the batch says where its sequences begin \(it has 'input_ids', 'labels'\); give seq_lens, ",
        ),
        (flat() | {"attention_mask": torch.ones(1, 1, 9, 9)}, r"attention_mask has the shape \[1, 1, 9, 9\]"),
        (flat() | {"position_ids": torch.ones(3, 1, 9)}, r"position_ids has the shape \[3, 1, 9\]"),
        (
            flat() | {"cu_seq_lens_q": torch.tensor([0, 3])},
            r"cu_seq_lens_q ends at 3 and the batch has \d+ tokens",
        ),
        (flat() | {"seq_lens": [torch.tensor([3])]}, "seq_lens must be a tensor of 2 dimensions"),
    ],
    ids=range(7),
)
def test_a_dict_without_boundaries_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_model_for_packing(trainers_model())(batch)


def test_the_collator_warns_of_a_model_with_its_cache_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainers_model()
    monkeypatch.setattr(collators.gc, "get_objects", lambda: [made, made.config, FEATURES])
    made.config.use_cache = True
    for prepared_first in (False, True):
        monkeypatch.setattr(collators, "_checked_caches", False)
        if prepared_first:
            prepare_model_for_packing(made)
            flat()
            continue
        with pytest.warns(
            UserWarning, match=r"a LlamaForCausalLM in this process has its cache on, .*inputs = prep"
        ):
            flat()


# Lengths and positions.


def batch_of(length: int, *, spare: int = 0) -> Batch:
    """Return a pack of one sample."""
    rows = [{"tokens": [7] * length, "labels": [7] * length}]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=length + spare)))


@pytest.mark.parametrize("family", ["gpt2", "gptj", "opt", "llama", "qwen2_vl"])
def test_packs_longer_than_a_table_of_positions_are_refused(family: str) -> None:
    """On CUDA, the model would abort the process. RoPE has no table; that of an image model does not count."""
    of_text = family not in ("llama", "qwen2_vl")
    if family == "qwen2_vl":
        model = build_vision(family)
    else:
        model = build(family, **(sizes_of(family) if family in ("gptj", "opt") else {}))
    inputs = prepare_model_for_packing(model)
    assert int(inputs(batch_of(20, spare=MAX_SEQ_LEN - 20))["position_ids"].max()) == 19
    message = f"max_seq_len is 33, and this {family} model has 32 positions; set max_seq_len=32 or less"
    with pytest.raises(ValueError, match=message) if of_text else nullcontext():
        inputs(batch_of(20, spare=MAX_SEQ_LEN - 19))


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


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_packs_too_long_for_a_config_are_refused() -> None:
    inputs = prepare_model_for_packing(build("llama4_text", floor_scale=8), attention="dense")
    inputs(batch_of(5, spare=2))
    message = (
        "max_seq_len is 8, but a packed llama4_text model with this config keeps samples apart up to 7: layers without "
        "RoPE scale queries by their place in the pack (attn_temperature_tuning); set max_seq_len=7 or less"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        inputs(batch_of(6, spare=2))


@pytest.mark.parametrize(
    ("family", "attention", "changes", "longest", "why"),
    [
        ("phi3", "dense", LONGROPE, 16, "longrope RoPE turns all samples"),
        ("llama", "varlen", {"rope_parameters": DYNAMIC}, MAX_SEQ_LEN, "dynamic RoPE turns all samples"),
        ("llama4_text", "varlen", {}, MAX_SEQ_LEN, "varlen does not cut samples into chunks"),
    ],
)
def test_samples_may_be_shorter_than_their_packs(
    family: str, attention: str, changes: dict[str, Any], longest: int, why: str
) -> None:
    """What depends on the longest sample limits samples, not packs, whose padding may be longer, too."""
    model, inputs, alone = prepared(family, attention, **changes)
    rows = [{"tokens": [*range(5, 5 + n)], "labels": [*range(5, 5 + n)]} for n in (longest, 5, longest, 3)]
    data = IterablePackedDataset(rows, max_seq_len=4 * longest, num_lanes=1, shuffle=False)
    batch = collate_packed(list(data))
    flat = {"input_ids": batch.tokens[:, : 2 * longest + 8], "seq_lens": batch.seq_lens[:, :4]}
    with torch.no_grad():
        for logits in (model(**inputs(batch)).logits[0], model(**inputs(flat)).logits[0]):
            start = 0
            for length in batch.seq_lens[0, :4].tolist():
                wanted = alone(batch.tokens[:, start : start + length], use_cache=False).logits[0]
                torch.testing.assert_close(logits[start : start + length], wanted, rtol=1e-4, atol=1e-5)
                start += length
    with pytest.raises(
        ValueError, match=f"of up to {longest}: {why}.*; leave longer ones out, or set max_seq_len="
    ):
        inputs(batch_of(longest + 1, spare=2))


def test_a_shared_prompt_counts_for_each_answer() -> None:
    inputs = prepare_model_for_packing(build("phi3", **LONGROPE), attention="dense")
    for answer, refused in ((6, False), (7, True)):
        group = Group([5] * (13 + answer), [5] * (13 + answer), lengths=[10, 3, answer], parents=[-1, 0, 0])
        with pytest.raises(ValueError, match="a sample has 17 tokens") if refused else nullcontext():
            inputs(groups.batch_of([group], max_seq_len=48))


# Models that were changed, and tokens that they do not have.


def another_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def another_layer(model: Any) -> None:
    model.layers[1] = tiny_torchtune.build("llama3").layers[1]  # type: ignore[index]


def caches(model: Any) -> None:
    model.setup_caches(batch_size=3, dtype=torch.float32)


@pytest.mark.parametrize(
    ("build", "family", "change", "message"),
    [
        (
            hf_models.build,
            "llama",
            another_attention,
            "prepared with attention='varlen', and .* changed to 'eager' since; call",
        ),
        (
            tiny_torchtune.build,
            "llama3",
            another_layer,
            "was not prepared, or was replaced since; call prepare_model_for_packi",
        ),
        (
            tiny_torchtune.build,
            "llama3",
            caches,
            "the model has a key-value cache, .* take it away with torchtune.modules",
        ),
    ],
    ids=["attention", "layer", "cache"],
)
def test_a_model_that_was_changed_since_is_refused(
    build: Any, family: str, change: Any, message: str
) -> None:
    model = build(family)
    inputs = prepare_model_for_packing(model, attention="varlen")
    _, batch = stream_and_batch("exact_fit")
    model(**inputs(batch))
    change(model)
    with pytest.raises(ValueError, match=message):
        model(**inputs(batch))


@pytest.mark.parametrize(("build", "family"), [(hf_models.build, "llama"), (tiny_torchtune.build, "llama3")])
def test_a_token_that_the_model_does_not_have_is_named(build: Any, family: str) -> None:
    """The model itself would only say that an index is out of range."""
    inputs, batch = prepare_model_for_packing(build(family)), batch_of(4)
    inputs(replace(batch, tokens=batch.tokens.clone().fill_(60)))
    message = r"token id 61 is outside the model's vocabulary of 61 ids \(0 to 60\); use"
    with pytest.raises(ValueError, match=message):
        inputs(replace(batch, tokens=batch.tokens.clone().index_fill_(1, torch.tensor([3]), 61)))


# Models that read images beside text.


@pytest.fixture
def model() -> Any:
    return build_vision("qwen2_5_vl")


def test_all_rows_of_positions_are_equal(model: Any) -> None:
    _, batch = stream_and_batch("overlong")
    positions = prepare_model_for_packing(model, attention="dense")(batch)["position_ids"]
    assert positions.shape == (4, *batch.tokens.shape), "for masks, and for time, height and width"
    assert torch.equal(positions, batch.input_pos.expand_as(positions))
    assert prepare_model_for_packing(model, attention="varlen")(batch)["position_ids"].ndim == 2


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_prefixes_are_shared(model: Any, attention: str) -> None:
    batch = groups.batch_of(groups.trees())
    inputs = prepare_model_for_packing(model, attention=attention)
    found = differences(
        groups.run_packed(model, batch, inputs), groups.run_alone(build_vision("qwen2_5_vl"), batch)
    )
    assert max(found.values()) < 1e-6, found


def test_images_are_refused(model: Any) -> None:
    """Tokens that stand for them, and columns that hold them."""
    _, batch = stream_and_batch("overlong")
    inputs = prepare_model_for_packing(model)
    for token in (IMAGE, VIDEO):
        tokens = batch.tokens.clone()
        tokens[1, 3] = token
        with pytest.raises(ValueError, match=f"the token {token}, which stands for an image, video or sound"):
            inputs(replace(batch, tokens=tokens))
    given = {"input_ids": torch.tensor([[7, 8, 9, 4]]), "position_ids": torch.tensor([[0, 1, 2, 0]])}
    inputs(given)
    for column in ("pixel_values", "image_grid_thw", "input_features"):
        with pytest.raises(
            ValueError, match=f"the batch has {column!r}, and packs hold text only; leave such"
        ):
            inputs(given | {column: torch.zeros(2, 4)})


def test_the_probe_draws_no_token_of_an_image(model: Any) -> None:
    inputs, largest = prepare_model_for_packing(model), []

    def recorded(batch: Any) -> dict[str, Any]:
        largest.append(int(batch.tokens.max()))
        return inputs(batch)

    for seed in range(3):
        assert find_leaks(model, inputs=recorded, seed=seed, max_seq_len=MAX_SEQ_LEN).ok
    assert max(largest) == IMAGE - 1
