"""The rows of a step: the log of the loss of every sequence, and the packs of a past step, which are made again."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.instantiate import build
from streampack.losses import label_weights
from streampack.training.checks import read_config
from streampack.training.data import build_datasets, join_documents

# private: `streampack unpack --step` prints these packs, cut to the width of a screen.
from streampack.training.row_losses import ROWS_FOLDER, RowLosses, packs_of_step, read_step
from streampack.training.run import Step
from streampack.training.run_folder import Interrupted
from streampack.training.world import World
from tests.harness.raising import fail
from tests.harness.runs import Run
from tests.harness.tiny import WORDS, losses, mixed_config, tiny_config

ROWS = [
    {"tokens": [i + 3] * (i % 7 + 1), "labels": [-100] * (i % 3) + [i + 3] * (i % 7 + 1 - i % 3)}
    for i in range(90)
    if i % 7 >= i % 3
]


def log_of(folder: Path, *, resumed: int | None = None) -> RowLosses:
    config: Any = SimpleNamespace(output_dir=str(folder), log_rows=True)
    return RowLosses(config, world=World(), resumed=resumed)


def loss_of(folder: Path, step: int) -> float:
    rows = read_step(folder, step)
    return sum(row.loss for row in rows) / sum(row.weight for row in rows)


def batches(**settings: Any) -> PackedDataLoader:
    data = IterablePackedDataset(ROWS, max_seq_len=16, num_lanes=1, untrained="keep", **settings)
    return PackedDataLoader(data, batch_size=3)


@pytest.mark.parametrize("norm", ["token", "sample"])
@pytest.mark.parametrize(("settings", "joined"), [
    ({}, False), ({}, True), ({"split_across_pack": True}, False), ({"split_across_pack": True}, True),
    ({"pad_seqs_to": 4}, False),
])  # fmt: skip
def test_sums_are_those_of_each_sequence(tmp_path: Path, norm: str, settings: Any, joined: bool) -> None:
    log, wanted = log_of(tmp_path), {}
    for step, original in enumerate(batches(**settings), start=1):
        batch = join_documents(original) if joined else original
        weights = label_weights(batch, loss_norm=norm)
        of_tokens = torch.rand(batch.tokens.shape) * weights
        log.add(batch, of_tokens.float(), weights, step=step + step % 2)
        rows = wanted.setdefault(step + step % 2, [])
        for pack, fragments in enumerate(batch.fragments):
            at = 0
            for fragment in fragments:
                span = slice(at, at := at + fragment.stop - fragment.start)
                at += fragment.padding
                sums = [each[pack, span].sum().item() for each in (of_tokens, weights, batch.tokens)]
                rows.append([fragment._replace(trained=None, padding=0), *sums])
    log.write()
    assert len(wanted) > 2
    for number, rows in wanted.items():
        found = read_step(tmp_path / ROWS_FOLDER, number)
        by_fragment = {row[0]: row[1:] for row in rows}
        assert len(by_fragment) == len(rows) == len(found)
        for each in found:
            loss, weight, token_sum = by_fragment[each.fragment]
            assert (each.loss, each.weight) == pytest.approx((loss, weight), rel=1e-4)
            assert each.token_sum == token_sum
        assert sum(each.excess for each in found) == pytest.approx(0, abs=1e-9)
        mean = sum(row[1] for row in rows) / sum(row[2] for row in rows)
        assert loss_of(tmp_path / ROWS_FOLDER, number) == pytest.approx(mean, rel=1e-4)


def test_ranks_are_joined_and_steps_made_again_take_the_place_of_the_former(tmp_path: Path) -> None:
    """Also where fewer ranks resume."""

    def line(step: int, loss: float) -> str:
        return json.dumps({"step": step, "rows": [[[0, step], 0, 4, loss, 2.0, 1]]}) + "\n"

    folder = tmp_path / ROWS_FOLDER
    folder.mkdir()
    (folder / "rank_00000.jsonl").write_text(line(1, 2) + line(2, 4) + line(3, 6))
    (folder / "rank_00001.jsonl").write_text(line(1, 2) + line(2, 4) + '{"step": 3, "ro')
    (folder / "notes.txt").write_text("")
    assert [loss_of(folder, step) for step in (1, 2, 3)] == [1, 2, 3]
    log = log_of(tmp_path, resumed=1)
    with pytest.raises(ValueError, match=r"has no rows of step 2; it has steps 1 to 1$"):
        read_step(folder, 2)
    batch = next(iter(batches()))
    log.add(batch, torch.ones(batch.tokens.shape), torch.ones(batch.tokens.shape), step=2)
    log.write()
    assert [row.loss for row in read_step(folder, 1)] == [2, 2]
    assert [loss_of(folder, step) for step in (1, 2)] == [1, 1]
    with pytest.raises(ValueError, match=r"has no rows of step 9; it has steps 1 to 2$"):
        read_step(folder, 9)
    log_of(tmp_path)
    with pytest.raises(ValueError, match="has no rows of step 1; a run keeps them with log_rows"):
        read_step(folder, 1)


def test_rows_are_ranked_by_what_they_add_to_the_loss(tmp_path: Path) -> None:
    folder = tmp_path / ROWS_FOLDER
    folder.mkdir()
    rows = [[[0, 0], 0, 90, 90.0, 90, 0], [[0, 1], 0, 10, 60.0, 10, 0], [[0, 2], 0, 2, 14.0, 2, 0]]
    (folder / "rank_00000.jsonl").write_text(json.dumps({"step": 1, "rows": rows}) + "\n")
    assert [row.fragment.row_id[1] for row in read_step(folder, 1)] == [1, 2, 0]
    for loss in (math.nan, math.inf):
        lines = {"step": 1, "rows": [*rows, [[0, 3], 0, 1, loss, 1, 0], [[0, 4], 0, 1, 0.5, 1, 0]]}
        (folder / "rank_00000.jsonl").write_text(json.dumps(lines) + "\n")
        assert [row.fragment.row_id[1] for row in read_step(folder, 1)] == [3, 2, 1, 0, 4], "by the mean"


def plant(path: Path, numbers: list[int]) -> set[int]:
    """Give rows of a JSONL file words out of order, and return where these rows begin in it."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    drawn = random.Random(0)
    for number in numbers:
        rows[number]["text"] = " ".join(drawn.choices(WORDS, k=drawn.randint(6, 19)))
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    starts = [0, *accumulate(map(len, lines))]
    return {starts[number] for number in numbers}


def found_first(folder: Path, planted: set[int], steps: range) -> list[bool]:
    """Return for each planted row of these steps whether no other row comes before it."""
    found = []
    for step in steps:
        order = [row.fragment.row_id[-1] in planted for row in read_step(folder, step)]
        found += [place < sum(order) for place, bad in enumerate(order) if bad]
    return found


def test_a_run_keeps_the_rows_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose words are out of order are found in the steps that train on them, also after an interrupt."""
    settings = {"log_rows": True, "log_every_n_steps": 3, "save_every_n_steps": 20, "validation": None}
    config, steps, scale = tiny_config(tmp_path, max_steps=60, **settings), count(1), Step.scale_gradients
    planted = plant(tmp_path / "rows.jsonl", list(range(0, 400, 40)))

    def interrupted(step: Step) -> None:
        scale(step) if next(steps) <= 40 else fail(KeyboardInterrupt())

    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="resumes from step 40"):
        patched.setattr(Step, "scale_gradients", interrupted)
        train(config)
    config.resume_from_checkpoint = True
    train(config)
    folder = tmp_path / "out" / ROWS_FOLDER
    logged = {step: float(loss) for step, loss in losses(tmp_path).items()}
    for step, loss in logged.items():
        assert loss_of(folder, step) == pytest.approx(loss, rel=1e-3)
    assert sorted(logged) == list(range(3, 61, 3))
    found = found_first(folder, planted, range(31, 61))
    assert len(found) >= 5
    assert all(found)


# The packs of a past step.


def dataset_of(config: Any) -> IterablePackedDataset:
    cfg = read_config(config)
    return build_datasets(cfg, tokenizer=build(cfg.tokenizer), vocab_size=16, world=World()).train


def logged(folder: Path, step: int) -> Counter[Any]:
    return Counter((row.fragment[:3], row.token_sum) for row in read_step(folder / "out" / ROWS_FOLDER, step))


def made_again(config: Any, folder: Path, step: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for pack in packs_of_step(dataset_of(config), folder / "out" / "checkpoints", step):
        at = 0
        for fragment, length in zip(pack.fragments, pack.seq_lens, strict=True):
            found[fragment[:3], int(pack.tokens[at : at + length].sum())] += 1
            at += length
    return found


def test_the_packs_of_each_step_of_a_run_are_made_again(
    whole: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume may have changed how many packs a step has, and says so."""
    settings = {"log_rows": True, "keep_last_n_checkpoints": 9}  # as the run has them
    config = tiny_config(
        whole.copy_to(tmp_path),
        max_steps=18,
        resume_from_checkpoint=True,
        gradient_accumulation_steps=4,
        **settings,
    )
    assert train(config)["step"] == 18
    assert "a step has 8 packs from here on; up to step 12 it had 4, as batch_size and" in caplog.text
    for step in range(1, 19):
        assert made_again(config, tmp_path, step) == logged(tmp_path, step), step


@pytest.mark.parametrize(("make", "changes"), [
    (tiny_config, {"data.split_across_pack": True, "data.balance_window": 4}),
    (tiny_config, {"epochs": 3, "max_steps": None}), (mixed_config, {}),
])  # fmt: skip
def test_the_packs_of_other_runs_are_made_again(tmp_path: Path, make: Any, changes: dict[str, Any]) -> None:
    """Also of steps between checkpoints, if some are gone, and after the last one."""
    settings = {
        "rows": 120,
        "gradient_accumulation_steps": 3,
        "save_every_n_steps": 5,
        "keep_last_n_checkpoints": 2,
    }
    config = make(tmp_path, log_rows=True, validation=None, **settings, **changes)
    last = train(config)["step"]
    assert last > 10
    for step in (1, 5, 6, 9, 10, last):
        assert made_again(config, tmp_path, step) == logged(tmp_path, step), step
    if config.epochs is not None:
        with pytest.raises(
            ValueError, match=rf"^the data end before step {last + 9}, which was never trained$"
        ):
            made_again(config, tmp_path, last + 9)


def test_what_cannot_be_made_again_is_refused(tmp_path: Path, whole: Run) -> None:
    with pytest.raises(ValueError, match=r"checkpoints holds no checkpoint of a run"):
        made_again(tiny_config(tmp_path), tmp_path, 3)
    config = tiny_config(whole.folder)
    with pytest.raises(ValueError, match=r"^step 0 cannot be: steps are counted from 1$"):
        made_again(config, whole.folder, 0)
    config.data.buffer_size = 17
    with pytest.raises(ValueError, match="buffer_size"):
        made_again(config, whole.folder, 3)
    second = tiny_config(tmp_path, max_steps=13, save_every_n_steps=1, resume_from=str(whole.checkpoint(12)))
    train(second)
    with pytest.raises(
        ValueError, match=r"^the run began at step 12, after another run, .* no checkpoint before step"
    ):
        made_again(second, tmp_path, 13)
