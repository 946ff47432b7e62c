"""The dpo recipe on toy models: its losses against torchtune's own computation, resume, ranks, references."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import defaultdict
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streampack_recipes.dpo import train
from torchtune.data import padded_collate_dpo
from torchtune.models.llama3 import llama3
from torchtune.rlhf.loss import DPOLoss

from streampack.instantiate import build
from streampack.training.checks import read_config
from streampack.training.data import build_data, build_loader
from streampack.training.preferences import Reference
from tests.harness.preferences import dpo_config, whole_pairs
from tests.harness.processes import run_ranks
from tests.harness.runs import Run, run_once
from tests.harness.tiny import interrupt_step, losses, numbers


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step, those of a validation after it among them."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found.setdefault(values.pop("step"), {}).update(values)
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(next((folder / "out" / "epoch_0").glob("*.bin")), weights_only=True)


def torchtunes_recipe() -> Any:
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parents[1] / "recipes" / "lora_dpo_single_device.py"
    loaded = importlib.util.spec_from_file_location("torchtunes_dpo", path)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    return module.LoRADPORecipeSingleDevice


def torchtunes_losses(config: Any, folder: Path, steps: int) -> list[dict[str, float]]:
    """Train on the same pairs in the same order, padded, with torchtune's collator, forward pass and loss."""
    cfg = read_config(config)
    dataset, _ = build_data(cfg, tokenizer=build(cfg.tokenizer), vocab_size=16)
    loader = build_loader(cfg, dataset, device=torch.device("cpu"))
    arguments = {key: value for key, value in cfg.model.items() if key != "_component_"}
    recipe = torchtunes_recipe()
    this = SimpleNamespace(_device=torch.device("cpu"), activations_handling_ctx=nullcontext())
    policy, reference = (llama3(**arguments) for _ in range(2))
    for model in (policy, reference):
        model.load_state_dict(torch.load(folder / "init" / "model.bin", weights_only=True))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.optimizer["lr"])
    loss_fn = DPOLoss(beta=cfg.loss["beta"])
    batches, found = iter(loader), []
    for _ in range(steps):
        pairs = [pair for batch in islice(batches, loader.batches_per_step) for pair in whole_pairs(batch)]
        examples = []
        for pair in pairs:
            # The two begin alike, and answers of one pair begin differently.
            shared = next(i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
            example = {}
            for name, ids in zip(("chosen", "rejected"), pair, strict=True):
                example[f"{name}_input_ids"] = ids
                example[f"{name}_labels"] = [-100] * shared + ids[shared:]
            examples.append(example)
        batch = padded_collate_dpo(examples)
        chosen, rejected, *_ = recipe.concatenated_forward(this, policy, batch)
        with torch.no_grad():
            references = recipe.concatenated_forward(this, reference, batch)[:2]
        each, chosen_rewards, rejected_rewards = loss_fn(chosen, rejected, *references)
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        found.append(
            {
                "loss": each.mean().item(),
                "rewards/chosen": chosen_rewards.mean().item(),
                "rewards/margins": (chosen_rewards - rejected_rewards).mean().item(),
                "rewards/accuracies": (chosen_rewards > rejected_rewards).float().mean().item(),
                "log_probs/chosen": chosen.mean().item(),
                "log_probs/rejected": rejected.mean().item(),
            }
        )
    return found


PREFERENCE = "streampack.losses.PreferenceLoss"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"max_steps": 30, "log_rows": True, "clip_grad_norm": None}
    return run_once(tmp_path_factory, "dpo", train, lambda folder: dpo_config(folder, **settings))


def test_thirty_steps_are_those_of_torchtunes_recipe_on_padded_pairs(whole: Run) -> None:
    config = dpo_config(whole.folder, max_steps=30, clip_grad_norm=None)
    ours = metrics(whole.folder)
    theirs = torchtunes_losses(config, whole.folder, 30)
    assert ours[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert ours[1]["rewards/accuracies"] == 0
    assert theirs[-1]["loss"] < 0.6
    for step, expected in enumerate(theirs, start=1):
        for name, value in expected.items():
            assert ours[step][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (step, name)


def test_a_run_learns_what_was_chosen_and_accounts_for_every_token(whole: Run) -> None:
    (first, before), (last, after) = whole.result["held_out"][0], whole.result["held_out"][-1]
    assert (first, last) == (0, 30)
    assert before == pytest.approx(math.log(2), abs=1e-6)
    assert after < before - 0.1
    found = metrics(whole.folder)
    assert found[30]["validation_rewards/accuracies"] > 0.8
    assert found[30]["rewards/margins"] > 0.3
    assert found[30]["trained_tokens"] > 50
    ledger = whole.result["ledger"]
    assert ledger.tokens_in == ledger.packed + ledger.buffered + sum(ledger.dropped.values())
    assert ledger.packed == whole.result["tokens"]
    page = (whole.folder / "out" / "report.html").read_text()
    assert "rewards/accuracies" in page
    start = torch.load(whole.folder / "init" / "model.bin", weights_only=True)
    assert any(not torch.equal(value, start[name]) for name, value in weights(whole.folder).items())


def test_sequences_have_the_losses_of_their_pairs_in_the_log(whole: Run) -> None:
    [path] = (whole.folder / "out" / "rows").glob("*.jsonl")
    found, steps = metrics(whole.folder), defaultdict[int, list[Any]](list)
    for line in map(json.loads, path.read_text().splitlines()):
        steps[line["step"]] += line["rows"]
    assert list(steps) == [*range(1, 31)]
    for step, rows in steps.items():
        assert {row[4] for row in rows} == {0, 1}
        pairs = sum(row[4] for row in rows)
        assert len(rows) == 3 * pairs
        assert sum(row[3] for row in rows) / pairs == pytest.approx(found[step]["loss"], rel=1e-4)


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_interrupted_run_resumes_with_the_same_numbers(
    tmp_path: Path, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, pairs are compared with the adapters' base."""
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    settings: dict[str, Any] = {
        "adapters": adapters,
        "num_workers": 1,
        "max_steps": 9,
        "resume_from_checkpoint": True,
    }
    expected = train(dpo_config(folders[0], **settings))
    with monkeypatch.context() as interrupted:
        interrupt_step(7, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(dpo_config(folders[1], **settings))
    result = train(dpo_config(folders[1], **settings))
    for name in ("loss", "rewards/margins"):
        assert losses(folders[1], name) == losses(folders[0], name)
    assert result["held_out"] == expected["held_out"]
    ours, theirs = weights(folders[1]), weights(folders[0])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = numbers(folders[0])
    assert found[1] == pytest.approx(math.log(2), abs=1e-6)
    assert found[9] < 0.66
    assert (folders[0] / "out" / "adapter" / "adapter_model.pt").is_file() == adapters


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"adapters": True}, marks=pytest.mark.slow),
        {"loss": {"_component_": PREFERENCE, "form": "ipo", "length_normalized": True}, "num_workers": 1},
    ],
)
def test_two_ranks_train_as_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    one, more = tmp_path / "one", tmp_path / "more"
    settings = {"data.num_lanes": 6, "batch_size": 1, "max_steps": 5}
    alone = train(dpo_config(one, **settings, **changes, gradient_accumulation_steps=6))
    results = run_ranks(train, 2, dpo_config(more, **settings, **changes, gradient_accumulation_steps=3))
    for name in ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies", "log_probs/rejected"):
        assert numbers(more, name) == pytest.approx(numbers(one, name), rel=1e-4, abs=1e-6)
    assert results[0]["held_out"] == results[1]["held_out"]
    assert results[0]["held_out"][-1][1] == pytest.approx(alone["held_out"][-1][1], rel=1e-5)


def test_another_checkpoint_may_be_the_reference(tmp_path: Path) -> None:
    config = dpo_config(tmp_path, max_steps=1, validation=None)
    node = dict(config.checkpointer)
    other = tmp_path / "other"
    other.mkdir()
    torch.manual_seed(3)
    arguments = {key: value for key, value in config.model.items() if key != "_component_"}
    torch.save(llama3(**arguments).state_dict(), other / "model.bin")
    config.ref_checkpointer = node | {"checkpoint_dir": str(other)}
    train(config)
    [values] = metrics(tmp_path).values()
    assert abs(values["loss"] - math.log(2)) > 1e-3
    assert values["rewards/chosen"] != 0


def test_a_loss_without_reference_makes_no_forward_pass_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SimPO: means over the tokens of an answer."""
    monkeypatch.setattr(Reference, "__call__", None)
    loss = {
        "_component_": PREFERENCE,
        "beta": 2.0,
        "margin": 0.5,
        "reference_free": True,
        "length_normalized": True,
    }
    train(dpo_config(tmp_path, max_steps=12, loss=loss, validation=None))
    found = metrics(tmp_path)
    assert found[12]["loss"] < found[1]["loss"] - 0.2
    assert found[1]["log_probs/chosen"] > -4  # a mean of about ln(16)


CHECKPOINTER = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"loss": None},
        "loss is missing; name one that compares pairs, such as loss: {_component_: torchtune.rlhf",
    ),
    (
        {"loss_norm": "sample"},
        "loss_norm=sample is for cross-entropy, and dpo compares pairs; remove the key",
    ),
    ({"z_loss": 1e-4}, "z_loss=0.0001 is for cross-entropy"),
    ({"reference": "base"}, "reference='base' is unknown; choose one of 'model', 'data'"),
    ({"reference": "data"}, "reference=data, and a pair has no ref_logps: one number for each answer"),
    (
        {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}},
        "loss: torchtune.modules.loss.CEWithChunkedOutputLoss compares no pairs; name torchtune.rlhf",
    ),
    (
        {"reference": "data", "ref_checkpointer": CHECKPOINTER},
        "ref_checkpointer is not used: reference=data takes the data's numbers; remove the key",
    ),
    (
        {"adapters": True, "ref_checkpointer": CHECKPOINTER},
        "ref_checkpointer is not used: the frozen base of the adapters is the reference; remove the key",
    ),
    (
        {"data.encoder": {"_component_": "streampack.TextEncoder", "column": "chosen"}},
        "the rows are no preference pairs: TextEncoder makes single samples, .*; name streampack.AnswersEncoder",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda each: str(each)[:60])
def test_configs_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(dpo_config(tmp_path, validation=None, **changes))
