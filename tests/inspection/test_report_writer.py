"""The report that a recipe leaves: at its end, after a signal, an error and a resume, of one rank and of two."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from streampack_recipes.full_finetune import train

from streampack import IterablePackedDataset, collate_packed
from streampack.distributed.world import World
from streampack.inspection import report_writer
from streampack.inspection.report_writer import PACKS, REPORT_FILE, ReportWriter
from streampack.packing.batch import Batch
from streampack.training.config import read_config
from streampack.training.record import METRICS_FILE, read_metrics
from tests.harness.processes import run_ranks
from tests.harness.tiny import interrupt_step, numbers, tiny_config


def page_of(folder: Path) -> str:
    return unescape((folder / "out" / REPORT_FILE).read_text())


def packs_in(page: str) -> list[str]:
    return re.findall(r'aria-label="(step \d+: \d+ sequences, \d+ tokens of padding)"', page)


def test_a_run_writes_its_page_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Batch] = []
    add = ReportWriter.add

    def watched(self: ReportWriter, batch: Batch, *, step: int) -> None:
        seen.append(batch)
        add(self, batch, step=step)

    monkeypatch.setattr(ReportWriter, "add", watched)
    result = train(tiny_config(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["report", str(tmp_path / "out" / REPORT_FILE)]
    page = page_of(tmp_path)
    assert "finished after 12 steps" in page
    assert "varlen, the first choice of attention=auto" in page
    assert f"{result['ledger'].packed:,}" in page
    metrics = read_metrics(tmp_path / "out" / METRICS_FILE)
    for name in ("loss", "validation_loss", "lr"):
        logged = {step: values[name] for step, values in metrics.items() if name in values}
        assert logged == pytest.approx(numbers(tmp_path, name))
    # Its packs are the first that were trained.
    trained = [
        f"step {number // 2 + 1}: {len(fragments)} sequences, "
        f"{32 - sum(f.stop - f.start for f in fragments)} tokens of padding"
        for number, batch in enumerate(seen)
        for fragments in batch.fragments
    ]
    assert packs_in(page) == trained[:PACKS]
    assert re.search(r"\d+ trained: \S*rows\.jsonl:\d+\"", page)


def test_two_ranks_write_one_page(tmp_path: Path) -> None:
    run_ranks(train, 2, tiny_config(tmp_path, max_steps=3, batch_size=1, validation=None))
    assert [path.name for path in (tmp_path / "out").glob("*.html")] == [REPORT_FILE]
    page = page_of(tmp_path)
    assert "for 2 consumers" in page
    assert "Attention cost of the slowest rank" in page
    assert len((tmp_path / "out" / METRICS_FILE).read_text().splitlines()) == 3


def test_an_interrupted_run_has_a_page_which_its_resume_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as interrupted:
        interrupt_step(6, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(tmp_path, validation=None))
    page = page_of(tmp_path)
    assert "interrupted by a signal" in page
    assert "samples read" in page  # the ledger that was logged last
    at_signal = max(read_metrics(tmp_path / "out" / METRICS_FILE))
    train(tiny_config(tmp_path, validation=None, resume=True))
    page = page_of(tmp_path)
    assert "finished after 12 steps" in page
    assert "so far" in page
    assert sorted(read_metrics(tmp_path / "out" / METRICS_FILE)) == list(range(1, 13))
    lines = (tmp_path / "out" / METRICS_FILE).read_text().splitlines()
    assert len(lines) == 12, f"steps up to {at_signal} were logged before, and none may be there twice"


def test_a_step_that_fails_leaves_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of <memory>")

    interrupt_step(3, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="out of <memory>"):
        train(tiny_config(tmp_path, validation=None))
    assert "failed: RuntimeError: out of <memory>" in page_of(tmp_path)
    assert "<memory>" not in (tmp_path / "out" / REPORT_FILE).read_text()


@pytest.mark.parametrize("method", ["random_padding", "minibatch_packing"])
def test_a_method_has_a_page_too(tmp_path: Path, method: str) -> None:
    data = {**tiny_config(tmp_path).data, "method": method}
    del data["buffer_size"]
    train(tiny_config(tmp_path, data=data, max_steps=2, validation=None, batch_size=2, packs_per_step=2))
    page = page_of(tmp_path)
    assert f"method={method}" in page
    assert packs_in(page)[0].startswith("step 1: ")


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(report_writer, "write_page", full)
    with pytest.warns(UserWarning, match=r"report.html could not be written: OSError: No space left"):
        train(tiny_config(tmp_path, max_steps=2, validation=None))
    assert (tmp_path / "out" / "finished.json").is_file()


def test_other_ranks_keep_nothing(tmp_path: Path) -> None:
    data = IterablePackedDataset([{"tokens": [1, 2], "labels": [1, 2]}], max_seq_len=4)
    config = read_config(tiny_config(tmp_path))
    writer = ReportWriter(
        config, written={}, lanes=data.lane_config, in_effect={}, world=World(rank=1, size=2)
    )
    writer.add(collate_packed(list(data)), step=1)
    with pytest.raises(KeyError), writer.on_error():
        raise KeyError
    assert writer._packs == []
    assert not writer.path.exists()
