"""The page of a run: true to what was trained and logged, harmless and small, and there however the run ends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streampack_recipes.full_finetune import train

from streampack import IterablePackedDataset, Mix, collate_packed, prepare_trainer_for_packing
from streampack.inspection.report_writer import PACKS, REPORT_FILE, ReportWriter
from streampack.inspection.trainer_report import write_trainer_report
from streampack.training.checks import read_config
from streampack.training.progress import METRICS_FILE, read_metrics, write_metrics
from streampack.training.world import World
from tests.harness import hf_trainers
from tests.harness.html import EVIL, Parsed, parsed
from tests.harness.runs import Run, whole_run
from tests.harness.tiny import interrupt_step, numbers, tiny_config


def page_of(folder: Path) -> Parsed:
    return parsed((folder / "out" / REPORT_FILE).read_text())


def drawn(page: Parsed) -> list[tuple[int, list[int]]]:
    """The step of each pack on a page, and the lengths of its sequences."""
    found: list[tuple[int, list[int]]] = []
    for about in page.values("aria-label"):
        if pack := re.match(r"step (\d+): \d+ sequences", about):
            found.append((int(pack[1]), []))
        elif sequence := re.match(r"sequence \d+, (\d+) tokens", about):
            found[-1][1].append(int(sequence[1]))
    return found


# What a recipe leaves.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return whole_run(tmp_path_factory)


def test_a_run_writes_its_page_and_says_where(whole: Run) -> None:
    assert whole.said.splitlines()[-1].split() == ["report", str(whole.folder / "out" / REPORT_FILE)]
    page = page_of(whole.folder)
    for words in ("finished after 12 steps", "varlen, float32 on cpu", "max_steps: 12"):
        assert words in page.text
    ledger = whole.result["ledger"]
    assert page.after("packed", 1) == [f"{ledger.packed:,}"]
    metrics = read_metrics(whole.folder / "out" / METRICS_FILE)
    for name in ("loss", "validation_loss", "lr"):
        logged = {step: values[name] for step, values in metrics.items() if name in values}
        assert logged == pytest.approx(numbers(whole.folder, name))
    assert [step for step, _ in drawn(page)] == [1, 1, 1, 1]
    assert any(re.search(r"trained: \S*rows\.jsonl:\d+$", about) for about in page.values("aria-label"))


def test_an_interrupted_run_has_a_page_which_its_resume_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as interrupted:
        interrupt_step(6, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(tmp_path, validation=None))
    text = page_of(tmp_path).text
    assert "interrupted by a signal" in text
    assert "samples read" in text, "the ledger that was logged last"
    train(tiny_config(tmp_path, validation=None, resume_from_checkpoint=True))
    text = page_of(tmp_path).text
    assert "finished after 12 steps" in text
    assert "so far" in text
    assert sorted(read_metrics(tmp_path / "out" / METRICS_FILE)) == list(range(1, 13))
    assert len((tmp_path / "out" / METRICS_FILE).read_text().splitlines()) == 12, "none twice"


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=2, validation=None)
    (tmp_path / "out" / REPORT_FILE).mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"report.html could not be written: IsADirectoryError"):
        train(config)
    assert (tmp_path / "out" / "finished.json").is_file()


# What the page says, without a training.


class Texts:
    """Encodes rows as 5 masked tokens and 15 trained ones, and decodes them as two texts."""

    def __init__(self, masked: str, trained: str) -> None:
        self.texts = masked, trained

    def __call__(self, row: Mapping[str, Any], /) -> dict[str, Any]:
        return {"input_ids": [1] * 5 + [2] * 15, "labels": [-100] * 5 + [2] * 15}

    def decode(self, tokens: list[int]) -> str:
        return self.texts[tokens[0] - 1]


METRICS: dict[int, dict[str, Any]] = {
    0: {"validation_loss": 4.5},
    1: {"loss": 4.0, "padding": 0.1, "cost_imbalance": 1.5},
    2: {"loss": 3.0, "padding": 0.2},
}


def written(
    folder: Path,
    metrics: Mapping[int, Mapping[str, Any]] = METRICS,
    *,
    source: Any = None,
    masked: str = "what?",
    trained: str = "an answer",
    error: BaseException | None = None,
    rank: int = 0,
    max_seq_len: int = 48,
    note: str = "",
) -> Path:
    """Write the page of a run of two packs a step whose numbers are these, and return its path."""
    config = tiny_config(folder)
    (folder / "out").mkdir(exist_ok=True)
    path = folder / "out" / METRICS_FILE
    path.unlink(missing_ok=True)
    for step, values in metrics.items():
        write_metrics(path, values, step=step)
    source = [{"n": n} for n in range(40)] if source is None else source
    data = IterablePackedDataset(source, encoder=Texts(masked, trained), max_seq_len=max_seq_len, num_lanes=1)  # type: ignore[arg-type]
    packs = list(data)
    world = World(rank=rank, size=rank + 1)
    writer = ReportWriter(
        read_config(config),
        written={"note": note},
        lanes=data.lane_config,
        in_effect={EVIL: "varlen"},
        world=world,
    )
    for step in (1, 2):
        writer.add(collate_packed(packs[2 * step - 2 : 2 * step]), step=step)
    if error is None:
        writer.write(step=2, ledger=data.ledger())
    else:
        with pytest.raises(type(error)), writer.on_error():
            raise error
    return folder / "out" / REPORT_FILE


def test_the_page_says_what_was_logged_and_where_the_tokens_went(tmp_path: Path) -> None:
    page = parsed(written(tmp_path).read_text())
    assert "finished after 2 steps" in page.cells
    assert page.after("loss", 6) == ["4", "3", "3", "2", "4", "1"]
    assert page.after("padding", 6) == ["0.1", "0.2", "0.1", "1", "0.2", "2"]
    assert page.after("packed", 2) == ["800", "100.00 %"]
    assert drawn(page) == [(1, [20, 20]), (1, [20, 20]), (2, [20, 20]), (2, [20, 20])]
    assert [page.cells.count(text) for text in ("what?", "an answer")] == [8, 8]
    assert page.values("points") == ["66.0,12.0 402.0,176.0", "66.0,176.0 402.0,12.0"]


def test_every_text_is_escaped(tmp_path: Path) -> None:
    names = [EVIL.replace("/", str(number)) for number in range(2)]  # without a slash
    entries = [{"name": name, "source": [{"n": n} for n in range(9)], "weight": 1} for name in names]
    last = {"fraction": 0.75, "trained": 30, "epochs": 2}
    metrics = {1: {"loss": 2.0} | {f"source_{names[0]}_{what}": value for what, value in last.items()}}
    ledger = IterablePackedDataset([{"n": 1}], max_seq_len=8).ledger().as_dict()
    metrics[1] |= {f"ledger_{name}": value for name, value in ledger.items()}
    path = written(
        tmp_path, metrics, source=Mix(entries), masked=EVIL, trained=EVIL, error=RuntimeError(EVIL), note=EVIL,
    )  # fmt: skip
    page = parsed(path.read_text())
    assert f"failed: RuntimeError: {EVIL}" in page.cells
    assert page.after(names[0], 3) == ["75.00 %", "30", "2"]
    # In effect, settings, the error, and two texts of each of eight sequences.
    assert page.text.count(EVIL) >= 1 + 1 + 1 + 2 * 8


def test_a_loss_that_is_not_finite_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    metrics = {1: {"loss": 2.0}, 2: {"loss": math.nan}, 3: {"loss": math.inf}, 4: {"loss": 1.0}}
    page = parsed(written(tmp_path, metrics).read_text())
    assert "Not a finite number: 2 value(s) of loss, the first at step 2." in page.text
    assert not [place for place in page.values("points") if "nan" in place.lower() or "inf" in place.lower()]
    never = parsed(written(tmp_path, {1: {"loss": math.nan}}).read_text())
    assert never.after("loss", 3) == ["nan", "nan", "-"]
    assert "Not a finite number" not in parsed(written(tmp_path).read_text()).text


def test_the_page_of_a_long_run_keeps_every_spike_and_is_bounded(tmp_path: Path) -> None:
    def page_with(spike: int) -> Parsed:
        metrics = {step: dict.fromkeys(("loss", "lr"), 2 + step % 7 / 10) for step in range(1, 6_001)}
        metrics[spike]["loss"] = 9.0
        path = written(
            tmp_path, metrics, source=[{"n": 1}] * 2_000, masked="<&" * 5000, trained="x" * 5000,
            max_seq_len=10_000, note="x: <\n" * 50_000,
        )  # fmt: skip
        assert len(path.read_bytes()) < 3_000_000
        return parsed(path.read_text())

    page = page_with(3_361)
    assert page.after("loss", 6)[4:] == ["9", "3,361"]
    assert page.values("points") != page_with(3_561).values("points"), "a spike is drawn where it was"
    assert [len(lengths) for _, lengths in drawn(page)] == [300] * 4, "the rest is one block"


def test_a_run_that_logged_nothing_has_a_page_and_other_ranks_write_none(tmp_path: Path) -> None:
    assert "Nothing was logged" in parsed(written(tmp_path / "first", {}).read_text()).text
    assert not written(tmp_path / "second", rank=1, error=KeyError()).exists()


# Of transformers' Trainer.


def packs(**changes: Any) -> IterablePackedDataset:
    settings = {"max_seq_len": 64, "strategy": "next_fit", "shuffle": True, "epochs": None, "num_lanes": 3}
    return IterablePackedDataset(hf_trainers.samples(), **settings | changes)


@pytest.mark.parametrize("changes", [{"balance_window": 4}, {"epochs": 1}], ids=str)
def test_the_page_of_a_trainer_has_its_log_the_ledger_and_the_first_packs(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = hf_trainers.trainer_of(
        tmp_path, max_steps=5, per_device_train_batch_size=1, gradient_accumulation_steps=2
    )
    prepare_trainer_for_packing(trainer, train_dataset=packs(**changes), eval_dataset=packs(epochs=1))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    assert write_trainer_report(trainer) == tmp_path / REPORT_FILE
    page = parsed((tmp_path / REPORT_FILE).read_text())
    losses = hf_trainers.losses(trainer)
    assert list(losses) == [1, 2, 3, 4, 5]
    assert page.after("loss", 2) == [f"{losses[1]:,.4g}", f"{losses[5]:,.4g}"]
    assert page.after("eval_loss", 2) == [f"{evaluated:,.4g}", f"{evaluated:,.4g}"]
    # A second stream of the same packs is the oracle: ten packs were trained, two a step.
    first = list(islice(packs(**changes).stream(), 10))
    held = np.array([sum(pack.seq_lens) for pack in first])
    assert page.after("packed", 1) == [f"{held.sum():,}"]
    padding = 1 - held.reshape(5, 2).sum(1).cumsum() / (128 * np.arange(1, 6))  # of the run so far
    assert [float(each) for each in page.after("padding", 2)] == pytest.approx(padding[[0, 4]], abs=1e-3)
    made_again = [
        (1 + slot // 2, list(pack.seq_lens))
        for slot, pack in enumerate(first)
        if "balance_window" not in changes or pack.lane == 0  # only lane 0 plans a window
    ][:PACKS]
    assert drawn(page)[: len(made_again)] == made_again
    assert len(drawn(page)) == PACKS


def test_a_trainer_that_trained_no_packs_is_refused(tmp_path: Path) -> None:
    trainer = hf_trainers.trainer_of(tmp_path, train_dataset=packs())
    with pytest.raises(ValueError, match="call prepare_trainer_for_packing"):
        write_trainer_report(trainer)
    prepare_trainer_for_packing(trainer)
    with pytest.raises(ValueError, match="has trained no packs to the end"):
        write_trainer_report(trainer)
