"""The log of the loss of every sequence: against sums made by hand, over attempts, and in a run with planted rows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train
from torch._subclasses import FakeTensorMode

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.distributed.world import World
from streampack.losses import label_weights
from streampack.map_style.flatten import join_documents
from streampack.training.row_losses import ROWS_FOLDER, RowLosses, hashes, ranked, read_step, step_losses
from tests.harness.tiny import WORDS, losses, tiny_config

ROWS = [
    {"tokens": [i + 3] * (i % 7 + 1), "labels": [-100] * (i % 3) + [i + 3] * (i % 7 + 1 - i % 3)}
    for i in range(90)
    if i % 7 >= i % 3
]


def log_of(folder: Path, *, log_rows: bool = True) -> RowLosses:
    config: Any = SimpleNamespace(output_dir=str(folder), log_rows=log_rows)
    return RowLosses(config, world=World())


def batches(**settings: Any) -> PackedDataLoader:
    data = IterablePackedDataset(ROWS, max_seq_len=16, num_lanes=1, untrained="keep", **settings)
    return PackedDataLoader(data, batch_size=3)


@pytest.mark.parametrize("norm", ["token", "sample"])
@pytest.mark.parametrize("change", [lambda batch: batch, join_documents])
@pytest.mark.parametrize("settings", [{}, {"split_across_pack": True}, {"pad_seqs_to": 4}])
def test_sums_are_those_of_each_sequence(tmp_path: Path, norm: str, change: Any, settings: Any) -> None:
    if change is join_documents and "pad_seqs_to" in settings:
        pytest.skip("refused")
    log, wanted = log_of(tmp_path), {}
    for step, original in enumerate(batches(**settings), start=1):
        batch = change(original)
        weights = label_weights(batch, loss_norm=norm)
        of_tokens = torch.rand(batch.tokens.shape) * weights
        log.add(batch, of_tokens.float(), weights)
        if step % 2 == 0:
            log.end_step(step)
        rows = wanted.setdefault(step + step % 2, [])
        for pack, fragments in enumerate(batch.fragments):
            at = 0
            for fragment in fragments:
                span = slice(at, at := at + fragment.stop - fragment.start)
                at += fragment.padding
                sums = [each[pack, span].sum().item() for each in (of_tokens, weights, hashes(batch.tokens))]
                rows.append([fragment._replace(trained=None, padding=0), *sums])
    log.end_step(step + step % 2)
    log.write()
    assert len(wanted) > 2
    for number, rows in wanted.items():
        found = read_step(tmp_path / ROWS_FOLDER, number)
        assert [each.fragment for each in found] == [row[0] for row in rows]
        for each, (_, loss, weight, checksum) in zip(found, rows, strict=True):
            assert (each.loss, each.weight) == pytest.approx((loss, weight), rel=1e-4)
            assert each.checksum == checksum
        assert sum(each.share for each in found) == pytest.approx(1)
        assert sum(each.excess for each in found) == pytest.approx(0, abs=1e-9)
        mean = sum(row[1] for row in rows) / sum(row[2] for row in rows)
        assert step_losses(tmp_path / ROWS_FOLDER)[number] == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_losses_may_lie_on_another_device_than_the_batch(tmp_path: Path, device: str) -> None:
    """As in dpo, which moves no batch itself. Fake tensors refuse to mix devices, as CUDA does."""
    log = log_of(tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for batch in batches():
            weights = label_weights(batch, loss_norm="token")
            batch = replace(batch, tokens=batch.tokens.to(device))
            log.add(batch, torch.zeros(weights.shape, device="meta"), weights)
    assert [each.device.type for each in log._batches[0][1]] == ["meta", "cpu", device]


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    log = log_of(tmp_path, log_rows=False)
    for batch in batches():
        log.add(batch, torch.zeros(batch.tokens.shape), label_weights(batch, loss_norm="token"))
        log.end_step(1)
        log.write()
    assert list(tmp_path.iterdir()) == []
    assert log._batches == []
    with pytest.raises(
        ValueError, match=r"rows has no rows; a run keeps them with log_rows: true in its config$"
    ):
        step_losses(tmp_path / ROWS_FOLDER)


def test_the_last_attempt_counts_and_ranks_are_joined(tmp_path: Path) -> None:
    def line(step: int, loss: float) -> str:
        return json.dumps({"step": step, "rows": [[[0, step], 0, 4, loss, 2.0, 1]]}) + "\n"

    folder = tmp_path / ROWS_FOLDER
    folder.mkdir()
    (folder / "attempt_00001_rank_00000.jsonl").write_text(line(1, 2) + line(2, 4) + line(3, 6))
    (folder / "attempt_00001_rank_00001.jsonl").write_text(line(1, 2) + line(2, 4) + '{"step": 3, "ro')
    (folder / "attempt_00002_rank_00000.jsonl").write_text(line(2, 40) + line(3, 60))
    (folder / "notes.txt").write_text("")
    assert step_losses(folder) == {1: 1.0, 2: 20.0, 3: 30.0}
    assert [row.loss for row in read_step(folder, 1)] == [2, 2]
    assert [row.loss for row in read_step(folder, 2)] == [40]
    with pytest.raises(ValueError, match=r"has no rows of step 9; it has steps 1 to 3$"):
        read_step(folder, 9)
    assert log_of(tmp_path).path == folder / "attempt_00003_rank_00000.jsonl"


def test_rows_are_ranked_by_what_they_add_to_the_loss(tmp_path: Path) -> None:
    folder = tmp_path / ROWS_FOLDER
    folder.mkdir()
    rows = [[[0, 0], 0, 90, 90.0, 90, 0], [[0, 1], 0, 10, 60.0, 10, 0], [[0, 2], 0, 2, 14.0, 2, 0]]
    (folder / "attempt_00001_rank_00000.jsonl").write_text(json.dumps({"step": 1, "rows": rows}) + "\n")
    order = {
        by: [row.fragment.row_id[1] for row in ranked(read_step(folder, 1), by=by)]
        for by in ("share", "mean")
    }
    assert order == {"share": [0, 1, 2], "mean": [2, 1, 0]}
    assert [row.fragment.row_id[1] for row in ranked(read_step(folder, 1))] == [1, 2, 0]
    rows.append([[0, 3], 0, 1, float("nan"), 1, 0])
    (folder / "attempt_00001_rank_00000.jsonl").write_text(json.dumps({"step": 1, "rows": rows}) + "\n")
    assert ranked(read_step(folder, 1))[0].fragment.row_id == (0, 3)
    with pytest.raises(ValueError, match="by="):
        ranked([], by="size")


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
        order = [row.fragment.row_id[-1] in planted for row in ranked(read_step(folder, step))]
        found += [place < sum(order) for place, bad in enumerate(order) if bad]
    return found


def test_a_run_keeps_the_rows_of_its_steps(tmp_path: Path) -> None:
    """Rows whose words are out of order are found in the steps that train on them, also after a resume."""
    config = tiny_config(tmp_path, log_rows=True, max_steps=40, checkpoint_every=20, validation=None)
    planted = plant(tmp_path / "rows.jsonl", list(range(0, 400, 40)))
    train(config)
    config.max_steps, config.resume = 60, True
    train(config)
    folder = tmp_path / "out" / ROWS_FOLDER
    assert sorted(path.name for path in folder.iterdir()) == [
        "attempt_00001_rank_00000.jsonl",
        "attempt_00002_rank_00000.jsonl",
    ]
    logged = {step: float(loss) for step, loss in losses(tmp_path).items()}
    assert {step: pytest.approx(loss, rel=1e-3) for step, loss in step_losses(folder).items()} == logged
    assert sorted(logged) == list(range(1, 61))
    found = found_first(folder, planted, range(31, 61))
    assert len(found) >= 5
    assert all(found)


@pytest.mark.slow
def test_of_100_planted_rows_95_are_found_first(tmp_path: Path) -> None:
    settings = {"epochs": 2, "max_steps": None, "checkpoint_every": None, "validation": None}
    config = tiny_config(tmp_path, rows=4000, log_rows=True, **settings)
    planted = plant(tmp_path / "rows.jsonl", random.Random(0).sample(range(4000), 100))
    steps = train(config)["step"]
    found = found_first(tmp_path / "out" / ROWS_FOLDER, planted, range(steps // 2 + 1, steps + 1))
    assert len(found) >= 100
    assert sum(found) >= 0.95 * len(found)
