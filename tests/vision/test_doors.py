"""Images through the doors: Trainer, the example, ranks and workers, trace and inspect."""

from __future__ import annotations

import json
import os
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from streampack import (
    Batch,
    Group,
    IterablePackedDataset,
    MapSource,
    PackedDataLoader,
    PackedDataset,
    VisionEncoder,
    prepare_model_for_packing,
    prepare_trainer_for_packing,
)
from streampack.inspection.page import report_page
from streampack.inspection.survey import inspect_dataset
from streampack.scoring.requests import read_request
from streampack.tokenize import tokenize
from tests.harness.processes import run_forked, run_ranks
from tests.vision.families import FAMILIES, build, picture, processor_of
from tests.vision.rows import encode, rows
from tests.vision.test_models import TEXTS, chat
from tests.vision.test_packs import data, equal

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")


def packs_of(family: str, *, images: int = 3, **settings: Any) -> IterablePackedDataset:
    given = [chat(number, images=number % images) for number in range(24)]
    encoder = VisionEncoder(processor_of(family), model=build(family).config)
    return IterablePackedDataset(MapSource(given), max_seq_len=256, encoder=encoder, num_lanes=2, **settings)


def trainer_of(family: str, folder: Path, *, max_steps: int = 4) -> Any:
    args = transformers.TrainingArguments(
        str(folder), max_steps=max_steps, per_device_train_batch_size=1, gradient_accumulation_steps=2, use_cpu=True,
        report_to="none", disable_tqdm=True, save_steps=2, logging_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer, packs = (
        transformers.Trainer(build(family).train(), args),
        packs_of(family, epochs=None, max_media=200),
    )
    prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense")
    return trainer


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_trainer_trains_packs_with_images_and_resumes_exactly(family: str, tmp_path: Path) -> None:
    whole = trainer_of(family, tmp_path / "whole")
    before = {name: each.clone() for name, each in whole.model.named_parameters()}
    whole.train()
    moved = [name for name, each in whole.model.named_parameters() if not torch.equal(each, before[name])]
    assert any("vis" in name for name in moved)
    assert whole.state.log_history[0]["loss"] > 0
    assert 0 < whole.state.log_history[0]["num_images"] < whole.state.log_history[3]["num_images"]
    trainer_of(family, tmp_path / "parts", max_steps=2).train()
    resumed = trainer_of(family, tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    for (name, ours), theirs in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    # The loss of a step is the mean over its trained tokens, whose number differs between its batches.
    model = build(family).train()
    inputs = prepare_model_for_packing(model, attention="dense")
    loader = PackedDataLoader(packs_of(family, epochs=None, max_media=200), batch_size=1, packs_per_step=2)
    total = count = 0.0
    for batch in islice(loader, 2):
        with torch.no_grad():
            logits = model(**inputs(batch)).logits[:, :-1].flatten(0, 1)
        total += float(F.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum"))
        count += int(batch.num_trained)
    assert whole.state.log_history[0]["loss"] == pytest.approx(total / count, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_every_family_takes_the_number_of_trained_tokens(family: str, tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    trainer, packs = transformers.Trainer(build(family), args), packs_of(family, epochs=None)
    inputs = prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense")
    batch = next(iter(PackedDataLoader(packs, batch_size=1)))
    with torch.no_grad():
        found = trainer.compute_loss(
            trainer.model, {**inputs(batch), "labels": batch.labels}, num_items_in_batch=torch.tensor(7)
        )
        logits = trainer.model(**inputs(batch)).logits[0, :-1]
    torch.testing.assert_close(found * 7, F.cross_entropy(logits, batch.labels[0, 1:], reduction="sum"))


def test_the_best_weights_are_loaded_and_labels_smoothed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_steps": 1, "eval_steps": 1,
        "eval_strategy": "steps", "load_best_model_at_end": True, "learning_rate": 0.5, "greater_is_better": True,
        "metric_for_best_model": "eval_loss", "per_device_train_batch_size": 1, "label_smoothing_factor": 0.1,
        "logging_steps": 1,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(tmp_path), **settings)
    trainer = transformers.Trainer(build("qwen2_5_vl").train(), args, eval_dataset=packs_of("qwen2_5_vl"))
    packs = packs_of("qwen2_5_vl", epochs=None)
    inputs = prepare_trainer_for_packing(
        trainer, train_dataset=packs, attention="dense", verify_isolation=False
    )
    batch = next(iter(PackedDataLoader(packs_of("qwen2_5_vl", epochs=None), batch_size=1)))
    with torch.no_grad():
        logits = trainer.model(**inputs(batch)).logits[0, :-1]
    smoothed = F.cross_entropy(logits, batch.labels[0, 1:], label_smoothing=0.1)
    trainer.train()
    losses = {each["step"]: each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each}
    assert losses[1] > 1.01 * losses[2]  # so the first step is the best here
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[1])
    assert next(each["loss"] for each in trainer.state.log_history) == pytest.approx(float(smoothed))


class Wrapped(torch.nn.Module):
    """A module of a user's own around a model, under whose names Trainer saves it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        return self.inner(input_ids=input_ids, labels=labels, **others)


@pytest.mark.parametrize("kind", ["compiled", "wrapped", "moe"])
def test_a_resume_goes_on_with_the_weights_of_text_models(kind: str, tmp_path: Path) -> None:
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}

    def trained(steps: int, folder: Path, *, resume: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
        if kind == "moe":
            model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_local_experts=2))
        if kind != "moe":
            model = Wrapped(model) if kind == "wrapped" else torch.compile(model, backend="eager")
        args = transformers.TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=1, use_cpu=True, report_to="none",
            disable_tqdm=True, save_steps=2, learning_rate=1e-2, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model, args)
        packs = IterablePackedDataset([{"input_ids": list(range(1, 30))}] * 30, max_seq_len=64, epochs=None)
        prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense")
        trainer.train(resume_from_checkpoint=resume)
        return [each.detach().clone() for each in model.parameters()]

    whole = trained(4, tmp_path / "whole")
    trained(2, tmp_path / "parts")
    parts = trained(4, tmp_path / "parts", resume=True)
    assert all(map(torch.equal, whole, parts))


def test_the_example_trains_a_folder(tmp_path: Path) -> None:
    from examples import vision_sft

    build("llava").save_pretrained(tmp_path / "model")
    processor_of("llava").save_pretrained(tmp_path / "model")
    lines = []
    for number in range(30):
        Image.fromarray(picture(number)).save(tmp_path / f"{number}.png")
        parts: list[dict[str, Any]] = [{"type": "text", "text": TEXTS[number % 4]}]
        if number % 3:
            parts.insert(0, {"type": "image", "path": f"{number}.png"})
        answer = {"role": "assistant", "content": "four"}
        lines.append({"messages": [{"role": "user", "content": parts}, answer]})
    (tmp_path / "7.png").write_bytes(b"no image")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = vision_sft.main([
            "--model", str(tmp_path / "model"), "--data", str(tmp_path / "a.jsonl"),
            "--max_seq_len", "256", "--output_dir", str(tmp_path / "out"), "--dataloader_num_workers", "0",
            "--disable_tqdm", "True", "--max_media", "8", "--logging_steps", "1",
        ])  # fmt: skip
    assert trainer.state.global_step >= 3
    listed = [path.read_text() for path in (tmp_path / "out" / "bad_records").rglob("*") if path.is_file()]
    assert "it cannot be decoded" in "".join(listed)
    counts = [logs["bad_records"] for logs in trainer.state.log_history if "bad_records" in logs]
    assert counts[-1] == sum(text.count("\n") for text in listed) > 0


def batches_of(
    state: dict[str, Any] | None, steps: int | None, workers: int
) -> tuple[list[Batch], dict[str, Any]]:
    """Batches of this rank, and the state behind them."""
    dataset = IterablePackedDataset(
        MapSource(rows(150)), max_seq_len=64, max_media=40, encoder=encode, num_lanes=6, shuffle=True
    )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    loader = PackedDataLoader(dataset, batch_size=6 // ranks, packs_per_step=6, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        found.append(batch)
        if len(found) == steps:
            break
    return found, loader.state_dict()


def pixels_by_place(batch: Batch) -> dict[Any, Any]:
    """Return the tokens, pixels and positions of each sequence of a batch, by the number of its row."""
    found, first = {}, 0
    for pack, fragments in enumerate(batch.fragments):
        start = 0
        for number, fragment in enumerate(fragments):
            place = slice(start, start := start + fragment.length)
            found[fragment.row_id] = [batch.tokens[pack, place].tolist()]
            if batch.media is not None and (count := batch.media.rows["pixel_values"][pack][number]):
                assert batch.media.positions is not None
                pixels = batch.media.tensors["pixel_values"][first : (first := first + count)]
                found[fragment.row_id] += [pixels.tolist(), batch.media.positions[:, pack, place].tolist()]
    return found


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_go_on_as_one_and_as_three_with_workers() -> None:
    whole, _ = batches_of(None, None, 0)
    steps = [pixels_by_place(batch) for batch in whole]
    assert len(steps) > 6
    first = run_forked(batches_of, 2, None, 2, 1)
    assert [merged(first, step) for step in range(2)] == steps[:2]
    middle, state = batches_of(first[0][1], 2, 2)
    assert [pixels_by_place(batch) for batch in middle] == steps[2:4]
    last = run_forked(batches_of, 3, state, None, 0)
    # Steps are the same until the first lane ends; then they are shared out anew.
    assert [merged(last, step) for step in range(4)] == steps[4:8]
    rest = [merged(last, step) for step in range(4, max(len(batches) for batches, _ in last))]
    assert {k: v for step in rest for k, v in step.items()} == {
        k: v for step in steps[8:] for k, v in step.items()
    }
    again, _ = batches_of(state, None, 2)
    assert all(map(equal, again, whole[4:]))


def merged(ranks: list[tuple[list[Batch], Any]], step: int) -> dict[Any, Any]:
    found = [pixels_by_place(batches[step]) for batches, _ in ranks if step < len(batches)]
    return {key: value for each in found for key, value in each.items()}


def test_inspect_shows_both_budgets_and_images() -> None:
    report, dataset = inspect_dataset(packs_of("llava", max_media=6)), packs_of("llava", max_media=6)
    packs = list(dataset)
    for fragment in packs[0]["fragments"]:
        assert dataset.trace(fragment)["text"].count("<image>") == 16 * (fragment.row_id[0] % 3)
    assert dataset.ledger().images == dataset.ledger().media == 24
    assert report.chosen.packs == len(packs)
    assert report.chosen.media == pytest.approx(24 / (6 * len(packs)))
    assert report.chosen.padding == pytest.approx(dataset.ledger().padding)
    assert {outcome.name for outcome in report.outcomes} >= {"exact_fit", "next_fit", "padded"}
    page = report_page(report)
    shown = [each for pack in report.packs for each in pack.sequences]
    assert sum(each.media for each in shown) > 0
    assert "max_media used" in page
    plain = report_page(inspect_dataset(IterablePackedDataset([{"input_ids": [1, 2, 3]}] * 9, max_seq_len=8)))
    assert "max_media" not in plain


def test_who_takes_text_only_refuses_images(tmp_path: Path) -> None:
    for take in (
        lambda: tokenize(MapSource(rows(9)), out=str(tmp_path / "shards"), encoder=encode, progress=False),
        lambda: read_request(encode(rows(9)[3]), vocab_size=None),
        lambda: list(PackedDataset([encode(row) for row in rows(9)], max_seq_len=64)),
        lambda: list(data(groups_and_images(), encoder=lambda row: row["sample"], num_lanes=1)),
    ):
        with pytest.raises(ValueError, match="image"):
            take()


def groups_and_images() -> list[dict[str, Any]]:
    group = Group([5, 6, 7], [-100, 6, 7], lengths=[1, 2], parents=[-1, 0])
    return [{"sample": sample} for sample in (group, encode(rows(9)[3]))]


@pytest.mark.parametrize("max_media", [None, 200])
def test_trainer_checks_samples_of_ones_own_encoder(
    max_media: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = VisionEncoder(processor_of("llava"))

    def stray(given: dict[str, Any]) -> Any:  # a text that has the token of an image
        sample = make(given)
        return sample if given["images"] else (np.r_[sample.tokens, 4], np.r_[sample.labels, -100])

    packs = IterablePackedDataset(
        MapSource([chat(number, images=number % 3) for number in range(24)]),
        max_seq_len=256, encoder=stray, num_lanes=1, epochs=None, max_media=max_media,
    )  # fmt: skip
    args = transformers.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    trainer = transformers.Trainer(build("llava").train(), args)
    prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense", verify_isolation=False)
    to = Batch.to
    monkeypatch.setattr(Batch, "to", lambda self, _: to(self, "meta"))  # as if to a GPU
    with pytest.raises(
        ValueError, match="has tokens of images" if max_media else "give the encoder reads_images = True"
    ):
        trainer.train()


def train_on_ranks(folder: str, find_unused: bool | None, frozen: tuple[str, ...]) -> Any:
    """Train where rank 0 never has an image and rank 1 always has; return the weights, or why it is refused."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = build("llava").train()
    for name, each in model.named_parameters():
        each.requires_grad_(not name.startswith(frozen))
    args = transformers.TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2 // ranks, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", ddp_find_unused_parameters=find_unused, optim="sgd",
        ddp_backend="gloo" if ranks > 1 else None, learning_rate=0.1,
    )  # fmt: skip
    trainer = transformers.Trainer(model, args)
    packs = packs_of("llava", epochs=None, images=2, max_media=1)
    try:
        prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense", verify_isolation=False)
    except ValueError as error:
        return str(error)
    trainer.train()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.slow
def test_ranks_train_a_tower_only_where_none_waits_for_another(tmp_path: Path) -> None:
    tower, projector = "model.vision_tower", "model.multi_modal_projector"
    for found in run_ranks(train_on_ranks, 2, str(tmp_path), False, (tower,)):
        assert "set ddp_find_unused_parameters=True, or freeze" in found
    for find_unused, frozen in ((None, ()), (False, (tower, projector))):
        expected = train_on_ranks(str(tmp_path), find_unused, frozen)
        assert any("vision" in name and not torch.equal(each, build("llava").get_parameter(name))
                   for name, each in expected.items()) is not bool(frozen)  # fmt: skip
        for weights in run_ranks(train_on_ranks, 2, str(tmp_path), find_unused, frozen):
            for name, each in weights.items():
                torch.testing.assert_close(each, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "idefics3", "gemma3", "qwen2_vl"])
def test_what_only_images_reach_is_frozen_where_ranks_would_wait(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", ddp_find_unused_parameters=False, max_steps=1
    )
    trainer, packs = transformers.Trainer(build(family).train(), args), packs_of(family, epochs=None)
    monkeypatch.setattr(type(args), "world_size", property(lambda _: 2))

    def prepare() -> str:
        try:
            prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense")
        except ValueError as error:
            return str(error)
        return "prepared"

    seeing = [
        name for name, _ in trainer.model.named_parameters() if "language" not in name and "text" not in name
    ]
    seeing.remove("lm_head.weight")
    for name in seeing:
        assert prepare().startswith(f"{name} is trained")
        trainer.model.get_parameter(name).requires_grad_(False)
    assert prepare() == "prepared"
    kinds = type(trainer.accelerator.distributed_type)
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", property(lambda _: kinds.FSDP))
    assert "train with DDP" in prepare()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_sft_trainer_trains_its_own_rows_packed(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    given = [chat(number, images=number % 3) for number in range(12)]
    for each in given:
        each["images"] = [Image.fromarray(one) for one in each["images"]]
    features = datasets.Features(
        messages=[{"role": datasets.Value("string"), "content": [{
            "type": datasets.Value("string"), "text": datasets.Value("string")}]}],
        images=[datasets.Image()],
    )  # fmt: skip
    rows_of_trl = datasets.Dataset.from_list(given, features=features)
    processor, model = processor_of("gemma3"), build("gemma3").train()
    args = trl.SFTConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = trl.SFTTrainer(model, args, train_dataset=rows_of_trl, processing_class=processor)
    packs = IterablePackedDataset(
        rows_of_trl, encoder=VisionEncoder(processor), max_seq_len=256, max_media=6, epochs=None, num_lanes=1
    )
    prepare_trainer_for_packing(trainer, train_dataset=packs, attention="dense", verify_isolation=False)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["num_images"] > 0
