"""torchtune's own recipes with our dataset node in place of theirs, and nothing else changed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from streampack import packed_dataset
from tests.harness import stock_recipes as stock

for package in ("torchtune", "sentencepiece", "datasets", "omegaconf"):
    pytest.importorskip(package)

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtune's own

QUICK = "full_finetune_single_device"
SAMPLES = 64


def recipes(of: dict[str, str]) -> list[Any]:
    return [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in of]


def node_of(path: Path) -> dict[str, Any]:
    """Return torchtune's node for rows of questions and answers; questions are trained, too."""
    return {
        "_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": str(path),
        "column_map": {"input": "question", "output": "answer"}, "split": "train", "train_on_input": True,
    }  # fmt: skip


def ours(inner: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"_component_": "streampack.packed_dataset", "packed": True, "dataset": inner, **settings}


def packs_of(node: dict[str, Any], folder: Path) -> Any:
    from torchtune.models.llama2 import llama2_tokenizer

    tokenizer = llama2_tokenizer(str(folder / "tokenizer.model"), max_seq_len=stock.MAX_SEQ_LEN)
    return packed_dataset(tokenizer, **{key: node[key] for key in node if key != "_component_"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    stock.write_model(tmp_path)
    return tmp_path


@pytest.mark.parametrize("recipe", recipes(stock.TEXT))
def test_a_stock_recipe_makes_the_same_steps_of_packs_as_of_samples(recipe: str, folder: Path) -> None:
    """Each step is an epoch, so that the packs of a step hold the same samples, however they are packed."""
    rows = list(stock.rows())[:SAMPLES]
    inner = node_of(stock.write_rows(folder / "rows.json", rows))
    halves = [node_of(stock.write_rows(folder / f"{i}.json", rows[i::2])) for i in range(2)]
    # On several ranks, distillation logs the mean of rank 0's samples, and weighs all ranks' means alike.
    ranks = 1 if recipe == "knowledge_distillation_distributed" else 2

    def losses(out: str, dataset: Any, count: int, *, ranks: int = ranks, **changes: Any) -> list[float]:
        devices = ranks if recipe.endswith("distributed") else 1
        assert count % devices == 0
        config = stock.stock_config(
            recipe, folder, out, dataset=dataset, batch_size=count // devices, **changes
        )
        found = stock.run(recipe, config, ranks=ranks)
        assert len(found) == config["epochs"]
        return found

    ours_of_half = [ours(half) for half in halves]
    packs = sum(len(packs_of(node, folder)) for node in ours_of_half)
    greedy = len(packs_of(ours(inner, parity="torchtune"), folder))
    assert packs < 0.6 * SAMPLES

    alone = losses("alone", inner, SAMPLES)
    packed = losses("ours", ours_of_half, packs, shuffle=True, enable_activation_checkpointing=True)
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    # Other sums of fp32 round differently: to int8 in QAT; and gradients near Adam's epsilon in distillation.
    tolerance = 1e-2 if recipe.startswith(("qat", "knowledge")) else 1e-4
    assert alone[0] - alone[1] > 0.01 * alone[0]
    assert packed[0] - packed[1] == pytest.approx(alone[0] - alone[1], rel=tolerance)
    if ranks == 1:
        on_two_ranks = losses("two", ours_of_half, packs, ranks=2)
        assert on_two_ranks[1] < 0.99 * on_two_ranks[0]

    # Theirs trains the first token of a sample on the sample before.
    parity = losses("parity", ours(inner, parity="torchtune"), greedy, ranks=1)
    theirs = losses("theirs", {**inner, "packed": True}, greedy, ranks=1)
    assert parity == theirs
    assert not math.isclose(theirs[0], alone[0], rel_tol=1e-3)


def test_a_stock_recipe_resumes_at_an_epochs_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = ours(node_of(stock.write_rows(folder / "rows.json", list(stock.rows()))))
    common = {"dataset": node, "batch_size": 8, "shuffle": True, "epochs": 3}
    whole = stock.run(QUICK, stock.stock_config(QUICK, folder, "out", **common))
    assert whole[-1] < 0.7 * whole[0]
    assert re.search(
        r"33 packs of 64 tokens from 66 samples.*, 2\.0 samples a pack; batch_size counts", caplog.text
    )
    [weights] = (folder / "out/epoch_1").glob("*.bin")
    config = stock.stock_config(QUICK, folder, "out", **common, resume_from_checkpoint=True)
    config["checkpointer"]["checkpoint_files"] = [f"epoch_1/{weights.name}"]
    (folder / "out/logs/log.txt").unlink()
    resumed = stock.run(QUICK, config)
    assert len(whole) == 3 * len(resumed) > 6
    assert resumed == whole[-len(resumed) :]


@pytest.mark.parametrize("recipe", recipes(stock.PAIRS))
def test_a_stock_recipe_of_pairs_refuses_packs(recipe: str, folder: Path) -> None:
    rows = []
    for row in stock.rows():
        question = {"role": "user", "content": row["question"]}
        answers = {"chosen": row["answer"], "rejected": "no"}
        rows.append({k: [question, {"role": "assistant", "content": a}] for k, a in answers.items()})
    inner = {
        "_component_": "torchtune.datasets.preference_dataset", "source": "json", "split": "train",
        "data_files": str(stock.write_rows(folder / "pairs.json", rows)),
    }  # fmt: skip
    config = stock.stock_config(recipe, folder, "out", dataset=inner, batch_size=33)
    assert stock.run(recipe, config), "torchtune's own dataset is refused, too"
    refused = (
        "sample 0: the row is a preference pair .* take no packs: .* pack pairs with streampack_recipes/dpo"
    )
    with pytest.raises(Exception, match=refused):
        stock.run(recipe, config | {"dataset": ours(inner)})
