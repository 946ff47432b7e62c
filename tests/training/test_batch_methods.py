"""``data.method`` of a config: methods of batching whole epochs, their exact resumes, and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack import IterablePackedDataset, MapSource, Mix, PackedDataLoader
from streampack.training.config import RunConfig
from streampack.training.data import build_loader
from streampack.training.world import World, join_world
from tests.harness.processes import run_ranks
from tests.harness.tiny import losses, numbers, tiny_config

LENGTHS = [7, 3, 8, 1, 5, 2, 6, 4, 8, 3, 2, 7, 1]

pytestmark = pytest.mark.filterwarnings("ignore:method='fixed_length' lets:UserWarning")


def dataset(**settings: Any) -> IterablePackedDataset:
    rows = [{"tokens": [i + 1] * n, "labels": [i + 1] * n} for i, n in enumerate(LENGTHS)]
    return IterablePackedDataset(MapSource(rows), **{"max_seq_len": 8, **settings})


def loader_of(
    data: IterablePackedDataset,
    method: str,
    *,
    packs_per_step: int | None = None,
    world: World | None = None,
    **rest: Any,
) -> Any:
    """Return the loader that a recipe has with this ``data.method``."""
    nodes: dict[str, Any] = {
        name: {} for name in ("tokenizer", "model", "checkpointer", "optimizer", "metric_logger")
    }
    config = RunConfig(output_dir="", max_steps=1, data={"max_seq_len": 8, "method": method}, **nodes)
    config = replace(config, batch_size=1, num_workers=0, packs_per_step=packs_per_step)
    return build_loader(replace(config, **rest), data, device=torch.device("cpu"), world=world or World())


class Imagined(World):
    """A rank without other processes: it gathers its own value from each of them."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    @contextmanager
    def together(self) -> Iterator[None]:
        yield


def seen(batches: Any) -> Counter[int]:
    """Count the tokens of each sample."""
    return Counter(token - 1 for batch in batches for token in batch.tokens.flatten().tolist() if token)


# In the recipe.


@pytest.mark.parametrize("name", ["random_padding", "fixed_length"])
def test_the_recipe_trains_every_sample_once_an_epoch(tmp_path: Path, name: str) -> None:
    settings = {
        "max_steps": None,
        "epochs": 2,
        "batch_size": 4,
        "checkpoint_every": None,
        "data.method": name,
    }
    result = train(tiny_config(tmp_path, rows=60, **settings))
    ledger = result["ledger"]
    assert ledger.tokens_in == ledger.packed == result["tokens"]
    assert ledger.buffered == 0
    assert ledger.samples % 2 == 0
    assert result["held_out"][-1][1] < result["held_out"][0][1] - 0.1
    assert (ledger.packs == ledger.samples) == (name == "random_padding")


def test_a_flattened_mini_batch_trains_as_a_padded_one(tmp_path: Path) -> None:
    """Rows of four samples of up to 32 tokens go through a model for 32."""
    padded, packed = (tmp_path / name for name in ("random_padding", "minibatch_packing"))
    for folder in (padded, packed):
        train(tiny_config(folder, batch_size=4, max_steps=6, **{"data.method": folder.name}))
    assert numbers(packed) == pytest.approx(numbers(padded), abs=1e-5)
    assert list(numbers(packed)) == list(range(1, 7))


def test_a_resumed_run_has_the_same_losses_and_another_is_refused(tmp_path: Path) -> None:
    changes = {"lr_scheduler": None, "num_workers": 2, "rows": 40, "validation": None, "resume": True}

    def run(name: str, max_steps: int, method: str | None = "multipack") -> dict[str, Any]:
        given = changes if method is None else changes | {"data.method": method}
        result: dict[str, Any] = train(tiny_config(tmp_path / name, max_steps=max_steps, **given))
        return result

    run("whole", 12)
    run("parts", 5)
    ledger = run("parts", 12)["ledger"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert ledger.buffered > 0

    with pytest.raises(ValueError, match="is of method='multipack' and this run has method='exact_fit'"):
        run("whole", 13, "exact_fit")
    with pytest.raises(ValueError, match="made with method='multipack', whose batches no stream makes"):
        run("whole", 13, None)
    with (tmp_path / "whole" / "rows.jsonl").open("a") as file:
        file.write('{"text": "cat"}\n')
    with pytest.raises(ValueError, match="made with corpus.files='1 file"):
        run("whole", 13)


def test_where_rows_cut_samples_none_is_too_long(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "data.max_seq_len": 16}
    assert train(tiny_config(tmp_path, **settings, **{"data.method": "fixed_length_posid"}))["step"] == 2
    with pytest.raises(ValueError, match="tokens, max_seq_len is 16"):
        train(tiny_config(tmp_path / "no", **settings, **{"data.method": "multipack"}))


# The loader by itself.


@pytest.mark.parametrize("name", ["random_padding", "minibatch_packing", "multipack", "exact_fit"])
def test_ranks_share_every_step_and_may_become_fewer(name: str) -> None:
    def loader(rank: int, size: int) -> Any:
        return loader_of(dataset(epochs=2), name, packs_per_step=4, world=Imagined(rank=rank, size=size))

    alone = loader(0, 1)
    steps = alone.batches_per_step
    whole, states = [], []
    for batch in alone:
        whole.append(batch)
        states.append(alone.state_dict())
    two = [loader(rank, 2) for rank in range(2)]
    streams = [iter(each) for each in two]
    shared = [[batch for stream in streams for batch in islice(stream, 2)] for _ in range(2)]
    for number, step in enumerate(shared):
        assert seen(step) == seen(whole[number * steps : (number + 1) * steps])
    assert two[1].ledger().numbers() == [0] * len(two[1].ledger().numbers())
    later = loader(0, 1)
    later.load_state_dict(two[0].state_dict())
    assert two[0].state_dict() == two[1].state_dict() | {"ledger": two[0].state_dict()["ledger"]}
    assert [seen([b]) for b in later] == [seen([b]) for b in whole[2 * steps :]]
    assert later.ledger() == alone.ledger()
    more = [loader(rank, 2) for rank in range(2)]
    for each in more:
        each.load_state_dict(states[steps - 1])  # after the first step
    shared = [batch for each in more for batch in each]
    assert seen(shared) == seen(whole[steps:])
    assert more[0].ledger() == alone.ledger()
    assert more[0].state_dict() == alone.state_dict()


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"method": "padding"}, "method='padding' is unknown"),
        ({"split_across_pack": True}, {"method": "multipack"}, "cuts no sample at the end of a row"),
        ({}, {"method": "multipack", "batch_size": 2, "packs_per_step": 3}, "is no multiple of 2"),
        ({"max_seq_len": 6}, {"method": "random_padding"}, "sample 0 has 7 tokens, max_seq_len is 6"),
        ({"max_seqs_per_pack": 2}, {"method": "multipack"}, "fills rows whatever the number of sequences"),
        ({"pad_seqs_to": 4}, {"method": "multipack"}, "lays samples end to end, and pad_seqs_to=4 pads each"),
    ],
)
def test_bad_settings(settings: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(dataset(**settings), **options)
    mix = Mix([{"name": "a", "source": [{"tokens": [1], "labels": [1]}], "weight": 1}])
    with pytest.raises(ValueError, match="a mixture is drawn as it streams"):
        loader_of(IterablePackedDataset(mix, max_seq_len=8), method="multipack")


def test_settings_without_effect_on_a_method_may_change() -> None:
    with pytest.raises(ValueError, match="the state is of a stream and this run has method='multipack'"):
        loader_of(dataset(), method="multipack").load_state_dict(PackedDataLoader(dataset()).state_dict())
    state = loader_of(dataset(strategy="next_fit", shuffle=True), method="multipack").state_dict()
    loader_of(dataset(buffer_size=7), method="multipack").load_state_dict(state)
    with pytest.raises(ValueError, match="made with overlong='error' and this dataset has overlong='drop'"):
        loader_of(dataset(overlong="drop"), method="multipack").load_state_dict(state)


# Several ranks, of which each may see another corpus.


def read_as_a_rank(folder: Path) -> list[int] | str:
    """Read this rank's copy of the corpus; return the tokens of its batches, or its error."""
    with join_world(torch.device("cpu"), timeout=20) as world:
        bad: dict[str, Any] = {"skip_bad": folder / "bad"}
        settings = bad if (folder / "skip").exists() else {}
        data = IterablePackedDataset(folder / f"{world.rank}" / "rows.jsonl", max_seq_len=8, **settings)
        try:
            return [batch.num_tokens for batch in loader_of(data, "multipack", world=world)]
        except (ValueError, RuntimeError) as error:
            return str(error)


def write_copies(folder: Path, *copies: list[str]) -> None:
    for rank, lines in enumerate(copies):
        (folder / f"{rank}").mkdir()
        (folder / f"{rank}" / "rows.jsonl").write_text("\n".join(lines) + "\n")


ROW = '{"tokens": [1, 2], "labels": [1, 2]}'


def test_ranks_that_read_different_samples_are_refused(tmp_path: Path) -> None:
    lines = [f'{{"tokens": {[i + 1] * n}, "labels": {[i + 1] * n}}}' for i, n in enumerate(LENGTHS)]
    write_copies(tmp_path, lines, lines[:-2])
    for outcome in run_ranks(read_as_a_rank, 2, tmp_path):
        assert "rank 1 reads 11 samples of 49 tokens" in outcome
        assert "rank 0 reads 13 samples of 57 tokens" in outcome


def test_every_broken_record_is_listed_once_by_all_ranks(tmp_path: Path) -> None:
    write_copies(tmp_path, *[[ROW, "{broken"] * 3] * 2)
    (tmp_path / "skip").touch()
    assert sum(map(sum, run_ranks(read_as_a_rank, 2, tmp_path))) == 6
    assert len((tmp_path / "bad" / "lane-00000.jsonl").read_text().splitlines()) == 3
