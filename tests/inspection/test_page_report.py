from __future__ import annotations

from pathlib import Path

import pytest

from streampack import cli
from streampack.inspection.costs import ModelWork
from streampack.inspection.page_report import report_page
from streampack.inspection.report import SourceShare
from streampack.inspection.shape import RunShape
from streampack.inspection.survey import inspect_dataset
from tests.harness.hf_tokenizers import byte_level
from tests.harness.html import parsed
from tests.harness.inspection import chats, dataset


@pytest.mark.parametrize("model", [None, ModelWork(1e6, 1e3, 12345, "tiny")])
def test_the_page_holds_the_figures(tmp_path: Path, model: ModelWork | None) -> None:
    report = inspect_dataset(
        dataset("chat", tmp_path), rows=100, title="my.yaml", shape=RunShape(model=model)
    )
    shares = [SourceShare("code & docs", 0.5, 10, 100, 90, 0.52, 1.5, 3.0)]
    object.__setattr__(report, "sources", shares)
    found = parsed(report_page(report))
    for outcome in report.outcomes:
        assert f"{outcome.tokens:,.0f}" in found.text
        assert f"{100 * outcome.padding:.2f} %" in found.text
    words = [f"{loss.rows:,}" for loss in report.losses] + [row.place for row in report.lengths.longest]
    words += [advice.yaml for advice in report.advice] + report.assumed
    words += ["streampack inspect: my.yaml", "code & docs", "slowest / mean", "± is a standard error"]
    for each in words:
        assert each in found.text
    assert ("by operations" in found.text) == (model is not None)
    assert len(set(found.values("id"))) == len(found.values("id"))


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats(tmp_path / "a.jsonl", 40)
    byte_level().save_pretrained(tmp_path / "tokenizer")
    page = tmp_path / "report.html"
    words = [str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--max-seq-len", "512"]
    assert cli.main(["inspect", *words, "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"the page: {page}\n")
    assert parsed(page.read_text()).tags["html"] == 1
