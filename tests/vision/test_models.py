"""Samples with images in packs have the logits and gradients that they have alone, as the model's authors run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streampack import (
    IGNORE_INDEX,
    Batch,
    IterablePackedDataset,
    MapSource,
    VisionEncoder,
    collate_packed,
    find_leaks,
    make_mask,
    prepare_model_for_packing,
)
from streampack.attention.masks import dense_mask, flex_mask
from streampack.scoring.requests import read_request
from tests.vision.families import FAMILIES, build, picture, processor_of

TEXTS = ("What is the answer?", "one two three four five", "x", "def f(x): return x + 1 and more of it")


def chat(number: int, *, images: int) -> dict[str, Any]:
    """Return a row of two turns, with images of several sizes before, between and behind words."""
    pictures = [picture(10 * number + i, width=14 + 9 * i, height=24 - 5 * i) for i in range(images)]
    parts: list[dict[str, Any]] = [{"type": "text", "text": TEXTS[number % 4]}]
    for i in range(images):
        parts.insert(2 * i if number % 2 else len(parts), {"type": "image"})
        parts.append({"type": "text", "text": TEXTS[(number + i) % 4]})
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": TEXTS[(number + 1) % 4]}]},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": TEXTS[(number + 2) % 4]}]},
    ]
    return {"messages": messages, "images": pictures}


ROWS = [chat(number, images=images) for number, images in enumerate((1, 0, 2, 1, 0, 3, 1))]


@cache
def packed(family: str) -> tuple[IterablePackedDataset, Batch]:
    encoder = VisionEncoder(processor_of(family), model=build(family).config)
    data = IterablePackedDataset(MapSource(ROWS), max_seq_len=352, encoder=encoder, num_lanes=1)
    return data, collate_packed(list(data))


def alone(family: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the model's arguments as transformers makes them of a conversation."""
    pictures = iter(row["images"])
    messages = [
        {**m, "content": [p | {"image": next(pictures)} if p["type"] == "image" else p for p in m["content"]]}
        for m in row["messages"]
    ]
    made = processor_of(family).apply_chat_template(
        [messages], tokenize=True, return_dict=True, processor_kwargs={"return_tensors": "pt"}
    )
    return {name: torch.as_tensor(value) for name, value in made.items()}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def check(family: str, attention: str) -> None:
    data, batch = packed(family)
    assert batch.media is not None
    assert len(batch.tokens) > 1
    assert any(len(pack) > 2 for pack in batch.fragments)
    model, own = build(family), build(family)
    inputs = prepare_model_for_packing(model, attention=attention)
    logits = model(**inputs(batch)).logits
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")
    found, expected = gradients(model, total), dict.fromkeys(dict(own.named_parameters()), torch.zeros(()))
    for pack, fragments in enumerate(batch.fragments):
        start = 0
        for fragment in fragments:
            place = slice(start, start := start + fragment.length)
            given = alone(family, data.trace(fragment)["row"])
            assert torch.equal(given["input_ids"][0], batch.tokens[pack, place])
            if not data.trace(fragment)["row"]["images"]:
                given = {name: given[name] for name in ("input_ids",)}
            out = own(**given, use_cache=False).logits[0]
            assert (out - logits[pack, place]).abs().max() < 1e-5 * out.abs().max().clamp(min=1), fragment
            labels = batch.labels[pack, place]
            assert (
                labels[batch.tokens[pack, place] < 16] != IGNORE_INDEX
            ).sum() <= 2  # ends of answers alone
            loss = F.cross_entropy(out[:-1], labels[1:], reduction="sum")
            for name, grad in gradients(own, loss).items():
                expected[name] = expected[name] + grad
    scale = max(grad.abs().max() for grad in expected.values())
    tower = [name for name in expected if "vision" in name or "visual" in name]
    assert len(tower) > 10
    assert sum(bool(expected[name].abs().max() > 1e-5 * scale) for name in tower) > len(tower) / 2
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-5 * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_alone_with_the_tower(family: str) -> None:
    check(family, "dense")
    check(family, "varlen")


def test_text_and_tower_have_attention_of_their_own() -> None:
    _, batch = packed("llava")
    model, other = build("llava"), build("llava")
    other.set_attn_implementation({"text_config": "eager"})  # whose masks are numbers
    logits, own = (m(**prepare_model_for_packing(m, attention="dense")(batch)).logits for m in (model, other))
    assert (own - logits).abs().max() < 1e-5 * logits.abs().max()
    prepare_model_for_packing(model, attention="varlen")
    assert model.config.vision_config._attn_implementation == "sdpa"  # the tower's own


DEPTH = [0]


def hooked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **others: Any) -> Any:
        DEPTH[0] += 1
        try:
            return forward(*args, **others)
        finally:
            DEPTH[0] -= 1

    return call


def within(get_features: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_features)
    def call(*args: Any, **others: Any) -> Any:
        assert DEPTH[0], "the model was not called as a module"
        return get_features(*args, **others)

    return call


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_sees_images(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    for part in (model, model.model):  # past whose hooks FSDP has no weights
        monkeypatch.setattr(part, "forward", hooked(part.forward))
        monkeypatch.setattr(part, "get_image_features", within(part.get_image_features))
    inputs = prepare_model_for_packing(model, attention="dense")
    report = find_leaks(model, inputs=inputs, images=True)
    assert report.ok, report
    assert not report.blind
    assert report.worst < 1e-5


MUTATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "axes in another order": lambda given: given | {"position_ids": given["position_ids"].flip(0)},
    "positions that go on": lambda given: given | {
        "position_ids": torch.arange(given["input_ids"].shape[1]).expand(3, 1, -1)
    },
    "a shifted row of pixels": lambda given: given | {"pixel_values": given["pixel_values"].roll(1, 0)},
    "grids in another order": lambda given: given | {"image_grid_thw": given["image_grid_thw"].flip(0)},
    "no mask": lambda given: given | {"attention_mask": None},
    "a dropped grid": lambda given: given | {"image_grid_thw": given["image_grid_thw"][1:]},
    "no grid": lambda given: given | {"image_grid_thw": None},
    "no pixels": lambda given: given | {"pixel_values": torch.zeros_like(given["pixel_values"])},
}  # fmt: skip


@pytest.mark.parametrize("mutation", ["2-D positions", *MUTATIONS])
def test_the_probe_sees_what_goes_wrong(mutation: str) -> None:
    model = build("qwen2_vl")
    inputs = prepare_model_for_packing(model, attention="dense")

    def wrong(batch: Batch) -> dict[str, Any]:
        given = inputs(batch)
        if mutation == "2-D positions":
            return given | {"position_ids": batch.input_pos}
        return MUTATIONS[mutation](given) if batch.media is not None else given

    if "grid" in mutation and mutation != "grids in another order":
        with pytest.raises((ValueError, RuntimeError, TypeError, AttributeError, IndexError)):
            find_leaks(model, inputs=wrong, images=True)
    else:
        report = find_leaks(model, inputs=wrong, images=True)
        assert not report.ok or report.blind, report


def test_images_of_gemma3_see_both_ways_in_their_own_sample_only() -> None:
    model = build("gemma3")
    inputs = prepare_model_for_packing(model, attention="dense")

    def causal(batch: Batch) -> dict[str, Any]:
        given, size = inputs(batch), batch.tokens.shape[1]
        before = torch.ones(size, size, dtype=torch.bool).tril()
        masks = {
            name: mask if mask is None else mask & before for name, mask in given["attention_mask"].items()
        }
        return given | {"attention_mask": masks}

    report = find_leaks(model, inputs=causal, images=True)
    assert {leak.kind for leak in report.leaks} == {"alone"}
    seq_lens, size, blocks = torch.tensor([[200, 3, 97]]), 384, torch.full((1, 384), -1)
    runs = ((5, 9), (120, 150), (199, 200), (200, 203), (203, 204), (210, 300))
    for number, (start, stop) in enumerate(runs):
        blocks[0, start:stop] = number
    kinds, embedded = (blocks[:, :200] >= 0).long(), torch.zeros(1, 200, 32)
    theirs = model.create_masks_for_generate(model.config, embedded, None, None, None, token_type_ids=kinds)
    for kind, window in (("full_attention", None), ("sliding_attention", 12)):
        dense = dense_mask(seq_lens, max_seq_len=size, window=window, blocks=blocks)
        assert torch.equal(dense[0, :200, :200], theirs[kind][0, 0])
        assert not dense[0, :200, 200:].any()
        flex = flex_mask(seq_lens, max_seq_len=size, window=window, blocks=blocks)
        grid = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        assert torch.equal(flex.mask_mod(torch.zeros_like(grid[0]), None, *grid), dense[0])
        tiles = dense[0].view(3, 128, 3, 128).any(3).any(1)
        assert not (tiles & ~flex.to_dense()[0, 0].bool()).any()


@pytest.mark.parametrize(
    ("family", "pack", "sample", "images"), [("llava", 0, 2, 3), ("mistral3", 0, 2, 1), ("mistral3", 1, 0, 0)]
)
def test_a_token_too_many_is_refused(family: str, pack: int, sample: int, images: int) -> None:
    _, batch = packed(family)
    assert batch.media is not None
    assert batch.media.images[pack][sample] == images
    inputs, tokens = prepare_model_for_packing(build(family), attention="dense"), batch.tokens.clone()
    inputs(batch)
    places = (tokens[pack] == 4).nonzero()
    tokens[pack, places[-1 if images == 0 else 0]] = 40  # of another sample
    tokens[pack, sum(batch.seq_lens[pack, :sample].tolist())] = 4
    with pytest.raises(
        ValueError, match=f"pack {pack} has tokens of images: .* it would take the images of another"
    ):
        inputs(replace(batch, tokens=tokens))


def test_grids_of_other_samples_are_refused() -> None:
    _, batch = packed("qwen2_vl")
    assert batch.media is not None
    grids = batch.media.tensors["image_grid_thw"].clone()
    first = batch.media.rows["image_grid_thw"][0].index(1)
    grids[0, 1] *= 2  # of the sample's only image; the next one's is as much smaller
    grids[1, 1] = 1
    assert batch.media.rows["image_grid_thw"][0][first] == 1
    lying = replace(
        batch, media=replace(batch.media, tensors=batch.media.tensors | {"image_grid_thw": grids})
    )
    with pytest.raises(ValueError, match="it would take the images of another"):
        prepare_model_for_packing(build("qwen2_vl"), attention="dense")(lying)


def test_doors_of_text_refuse_images() -> None:
    _, batch = packed("llava")
    with pytest.raises(ValueError, match="the batch has images, and text alone is expected here"):
        make_mask(batch)
    builders = pytest.importorskip("torchtune.models.llama3")
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 8}
    model = builders.llama3(vocab_size=320, max_seq_len=352, **sizes)
    with pytest.raises(ValueError, match="only Hugging Face models take images"):
        prepare_model_for_packing(model)(batch)
    with pytest.raises(ValueError, match="has images, and only text is scored"):
        read_request(VisionEncoder(processor_of("llava"))(ROWS[0]))


def test_batches_that_would_mix_images_are_refused() -> None:
    _, batch = packed("llava")
    assert batch.media is not None
    inputs = prepare_model_for_packing(build("llava"), attention="dense")
    with pytest.raises(ValueError, match="has the token 4, which stands for an image"):
        inputs(replace(batch, media=None))
    with pytest.raises(ValueError, match="has the token 5"):
        inputs(replace(batch, tokens=batch.tokens.where(batch.tokens != 3, 5)))
    _, grids = packed("qwen2_vl")
    assert grids.media is not None
    seeing = prepare_model_for_packing(build("qwen2_vl"), attention="dense")
    with pytest.raises(ValueError, match="lack 'image_grid_thw'"):
        seeing(replace(grids, media=replace(grids.media, tensors={"pixel_values": torch.zeros(1)})))
    with pytest.raises(ValueError, match="have positions of 0 axes .0: none., and qwen2_vl takes 3"):
        seeing(replace(grids, media=replace(grids.media, positions=None)))
    positions = torch.zeros(4, *batch.tokens.shape).long()
    for model, media in ((inputs, batch.media), (seeing, grids.media)):
        with pytest.raises(ValueError, match="have positions of 4 axes"):
            model(replace(batch if model is inputs else grids, media=replace(media, positions=positions)))
    with pytest.raises(ValueError, match="have 'image_grid_thw', and llava takes images only"):
        inputs(replace(grids, media=replace(grids.media, positions=None)))
    from tests.harness.vision_models import build_vision

    other = build_vision("glm4v")
    with pytest.raises(ValueError, match="nothing shows that a packed glm4v model keeps the images"):
        prepare_model_for_packing(other, attention="dense")(replace(batch, tokens=batch.tokens % 60))
