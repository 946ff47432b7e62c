from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import IGNORE_INDEX, IterablePackedDataset, Mix, PackedDataLoader
from streampack.distributed.world import World
from streampack.losses import LOSS_NORMS, label_weights, token_losses
from streampack.training.sources import SourceMeter, source_ids
from streampack.training.validate import validate
from tests.support.tiny import WORDS, losses, tiny_config

CPU = torch.device("cpu")
VOCABULARY = 12


def mix() -> Mix:
    """Tokens 1 to 3 are of source a, 4 to 6 of b, 7 to 9 of c."""
    entries: list[dict[str, Any]] = []
    for i, name in enumerate("abc"):
        rows = [
            {
                "tokens": [3 * i + 1 + k % 3 for k in range(n)],
                "labels": [IGNORE_INDEX, *([3 * i + 2] * (n - 1))],
            }
            for n in range(1, 12)
        ]
        entries.append({"name": name, "source": rows, "weight": i + 1})
    return Mix([entries[0], {"name": "in", "weight": 1, "source": Mix(entries[1:])}])


def loader(source: Any) -> PackedDataLoader:
    data = IterablePackedDataset(source, max_seq_len=8, overlong="split", num_lanes=2, shuffle=True)
    return PackedDataLoader(data, batch_size=3)


@pytest.mark.parametrize("loss_norm", LOSS_NORMS)
def test_the_loss_is_shared_out_over_the_sources(loss_norm: str) -> None:
    """The sources' losses, by the tokens themselves; and added up, the whole."""
    batches = loader(mix())
    meter = SourceMeter(batches, World(), CPU)
    generator = torch.Generator().manual_seed(0)
    wanted, counts, trained = torch.zeros(3).double(), torch.zeros(3).double(), torch.zeros(3).double()
    for batch in batches:
        ids = source_ids(batch, mix())
        real = batch.tokens > 0
        assert torch.equal(ids[real], (batch.tokens[real] - 1) // 3)
        assert not ids[~real].any()
        weights = label_weights(batch, loss_norm=loss_norm)
        logits = torch.randn(*batch.tokens.shape, VOCABULARY, generator=generator, requires_grad=True)
        each = token_losses(logits, batch.labels, weights=weights)
        meter.add(batch, each, weights)
        for pack, row in enumerate(batch.labels.tolist()):
            for i, label in enumerate(row[1:]):
                if label != IGNORE_INDEX:
                    source, weight = (label - 1) // 3, float(weights[pack, i + 1])
                    loss = torch.nn.functional.cross_entropy(logits[pack, i], torch.tensor(label))
                    wanted[source] += weight * loss.item()
                    counts[source] += weight
                    trained[source] += 1
    metrics = meter.metrics()
    for i, name in enumerate(("a", "in/b", "in/c")):
        assert metrics[f"source_{name}_loss"] == pytest.approx(float(wanted[i] / counts[i]))
        assert metrics[f"source_{name}_trained"] == trained[i]
        assert metrics[f"source_{name}_share"] == pytest.approx(float(trained[i] / trained.sum()))
        assert metrics[f"source_{name}_packed"] == metrics[f"source_{name}_tokens_in"]
        assert metrics[f"source_{name}_epochs"] >= 1
    assert len(metrics) == 18
    assert not [name for name in meter.metrics() if name.endswith("loss")], "nothing since the last report"


def test_without_a_mixture_there_is_nothing_to_say() -> None:
    batches = loader([{"tokens": [1, 2, 3], "labels": [1, 2, 3]}] * 9)
    meter = SourceMeter(batches, World(), CPU)
    for batch in batches:
        meter.add(batch, torch.zeros(3, 8), torch.ones(3, 8))
    assert meter.metrics() == {}


def mixed_config(folder: Path, **changes: Any) -> Any:
    """The tiny run, on two sources of one tokenizer; a share of each is held out."""
    config = tiny_config(folder, log_every=1, **changes)
    sources = []
    for i, (name, weight) in enumerate((("counting", 3), ("words", 1))):
        path = folder / f"{name}.jsonl"
        texts = (" ".join(WORDS[(k + i * j) % 8] for j in range(1 + k % (9 + 9 * i))) for k in range(400))
        path.write_text("".join(json.dumps({"line": text}) + "\n" for text in texts))
        sources.append(
            {
                "name": name,
                "source": {"_component_": "streampack.JSONLSource", "paths": str(path)},
                "encoder": {"_component_": "streampack.TextEncoder", "column": "line"},
                "weight": weight,
            }
        )
    config.data.source = {"_component_": "streampack.Mix", "sources": sources, "stop": "never"}
    return config


@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune", "pretrain"])
def test_a_recipe_logs_every_source(tmp_path: Path, recipe: str) -> None:
    from importlib import import_module

    if recipe == "lora_finetune":
        from tests.recipes.test_lora_finetune import lora_config

        config = lora_config(tmp_path)
        config.data = mixed_config(tmp_path).data
        config.log_every = 1
    else:
        config = mixed_config(tmp_path)
    assert validate(config) == []
    import_module(f"streampack_recipes.{recipe}").train(config)
    text = (tmp_path / "out" / "logs" / "log.txt").read_text()
    assert set(re.findall(r"source_(\w+)_loss", text)) == {"counting", "words"}
    steps = losses(tmp_path)
    each = {name: losses(tmp_path, f"source_{name}_loss") for name in ("counting", "words")}
    shares = {name: losses(tmp_path, f"source_{name}_trained") for name in each}
    before = {"counting": 0.0, "words": 0.0}
    for (
        step,
        loss,
    ) in steps.items():  # the loss is the mean of the sources', by what each trained in this step
        now = {name: float(shares[name][step]) for name in each}
        gained = {name: now[name] - before[name] for name in each}
        total = sum(gained[name] * float(each[name].get(step, 0)) for name in each)
        assert total / sum(gained.values()) == pytest.approx(float(loss), rel=1e-3)
        before = now
    share = float(losses(tmp_path, "source_counting_share")[max(steps)])
    assert share == pytest.approx(0.75, abs=0.05)
