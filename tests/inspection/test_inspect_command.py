"""`streampack inspect`: what it prints, its page, its JSON and its exit status."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from streampack import cli
from tests.harness.hf_tokenizers import byte_level
from tests.harness.html import Parsed, parsed
from tests.harness.inspection import chats
from tests.harness.raising import fail
from tests.harness.tiny import mixed_config


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Shown:
    """The same report as JSON, as printed, and as a page."""

    report: dict[str, Any]
    printed: str
    page: Parsed

    @property
    def texts(self) -> tuple[str, str]:
        return self.printed, self.page.text


def inspect(folder: Path, *words: str) -> Shown:
    json_file, page, printed = folder / "report.json", folder / "report.html", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["inspect", *words, "--json", str(json_file), "--html", str(page)]) == 0
    assert printed.getvalue().endswith(f"\nthe page: {page}\n")
    return Shown(json.loads(json_file.read_text()), printed.getvalue(), parsed(page.read_text()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Shown:
    """Two files of conversations. Some of them cannot be encoded."""
    folder = tmp_path_factory.mktemp("files")
    paths = [str(chats(folder / f"{name}.jsonl", 60, seed=seed)) for seed, name in enumerate("ab")]
    words = [paths[0], "--tokenizer", tokenizer, paths[1], "--max-seq-len", "512", "--all", "--ranks", "2"]
    return inspect(folder, *words)


def test_the_figures_shown_are_those_of_the_report(files: Shown) -> None:
    report, lines = files.report, files.printed.splitlines()
    assert (report["version"], report["coverage"]["rows"], report["coverage"]["exact"]) == (4, 120, True)
    assert report["settings"]["packing"]["max_seq_len"] == 512
    for outcome in report["outcomes"]:
        figures = (f"{100 * outcome['padding']:.2f} %", f"{outcome['tokens']:,.0f}")
        rows = [line for line in lines if line.startswith(f"{outcome['name']} ")]
        assert any(all(figure in row for figure in figures) for row in rows)
        assert all(figure in files.page.text for figure in figures)
    [chosen] = [outcome for outcome in report["outcomes"] if outcome["chosen"]]
    figures = [f"{100 * chosen['padding']:.2f} %", f"{chosen['packs']:,.0f}", f"{chosen['steps']:,.0f}"]
    assert files.page.after(f"{chosen['name']} (yours)", 3) == figures
    words = [advice["title"] for advice in report["advice"]]
    words += [f"{loss['rows']:,}" for loss in report["losses"]]
    words += ["exact_fit", "yours", "split_across_pack"]
    words += ["skip_bad: True", *report["assumed"][1:]]
    assert "shuffle: all rows are mixed" in files.printed
    for word in words:
        assert all(word in " ".join(text.split()) for text in files.texts), word
    assert all(row["place"] in files.page.text for row in report["lengths"]["longest"])
    after = lines[lines.index("The first packs") + 1 :]
    assert all(len(set(line.strip()) & {"█", "▒"}) == 2 for line in after[: len(report["packs"])]), (
        "one a line"
    )


def test_each_sequence_of_a_pack_on_the_page_has_its_row_and_text(files: Shown) -> None:
    packs, page = files.report["packs"], files.page
    sequences = [sequence for pack in packs for sequence in pack["sequences"]]
    assert page.tags["button"] == page.tags["template"] == len(sequences)
    assert set(page.values("data-detail")) <= set(page.values("id"))
    assert page.values("tabindex").count("0") >= len(packs), "a pack is one stop of the tab key"
    for sequence in sequences:
        assert any(sequence["place"] in about for about in page.values("aria-label"))
        for run in sequence["runs"][:2]:
            assert run["text"][:60] in page.text


def test_square_brackets_of_the_data_are_printed_as_they_are(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich would take them for styles, and a slash in them for an error."""
    monkeypatch.chdir(tmp_path)
    Path("f[").mkdir()
    name = "f[/].jsonl"
    Path(name).write_text('{"text": "[/x] [red]text[/red]"}\n{"[/y]": 1}\n')
    words = [glob.escape(name), "--tokenizer", tokenizer, "--max-seq-len", "512"]
    shown = inspect(tmp_path, *words).printed
    assert shown.count(name) >= 2
    assert "[/y]" in shown


REFUSED: dict[tuple[str, ...], tuple[int, str]] = {
    (): (2, "name files, or a config"),
    ("a.jsonl",): (2, "--max-seq-len is missing"),
    ("a.jsonl", "--max-seq-len", "9"): (1, "name the tokenizer of the model (--tokenizer)"),
    ("none.jsonl", "--max-seq-len", "9"): (1, "none.jsonl"),
    ("odd.jsonl", "--max-seq-len", "9"): (
        1,
        "odd.jsonl:1: the row's columns are 'x', which is no known shape of rows",
    ),
    ("alpaca.jsonl", "--max-seq-len", "9"): (
        1,
        "the rows are Alpaca's: name the tokenizer of the model (--tokenizer)",
    ),
    ("a.jsonl", "--max-seq-len", "9", "--ranks", "two"): (2, "argument --ranks: 'two' is no whole number"),
    ("a.jsonl", "--max-seq-len", "9", "--rows", "0"): (
        2,
        "argument --rows: '0' is no whole number from 1 on",
    ),
    ("--config", "quickstart", "--max-seq-len", "9"): (2, "data.max_seq_len=N replaces one"),
    ("quickstart", "--max-seq-len", "9"): (2, "data.max_seq_len=N replaces one"),
    ("a.jsonl", "--nonsense"): (2, "unrecognized arguments: --nonsense"),
    ("a.jsonl", "--all", "--rows", "5"): (2, "--all reads every row; leave --rows out"),
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_inspected(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    chats(Path("a.jsonl"), 3)
    Path("odd.jsonl").write_text('{"x": 1}\n')
    Path("alpaca.jsonl").write_text('{"instruction": "add", "output": "2"}\n')
    status, message = REFUSED[words]
    assert cli.main(["inspect", *words]) == status
    assert message in capsys.readouterr().err


def test_without_rich_it_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["inspect", str(path), "--max-seq-len", "4"]
    assert cli.main(words) == 2
    assert "pip install 'streampack[data]'; or --json -" in capsys.readouterr().err
    assert cli.main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 4


def test_a_name_that_is_not_utf_8_is_shown_escaped_and_a_failure_keeps_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    name = os.fsdecode(b"a\xff.jsonl")
    (tmp_path / "data" / name).write_text('{"input_ids": [1, 2]}\n' * 20)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    page, json_file = tmp_path / "page.html", tmp_path / "report.json"
    words = ["inspect", str(tmp_path / "data"), "--max-seq-len", "4"]
    assert cli.main([*words, "--html", str(page), "--json", str(json_file)]) == 0
    places = [
        each["place"] for pack in json.loads(json_file.read_text())["packs"] for each in pack["sequences"]
    ]
    assert all(name in place for place in places)
    assert places
    assert "a\\udcff.jsonl" in page.read_text()
    stdout.flush()
    assert b"a\\udcff.jsonl" in stdout.buffer.getvalue()
    before = sorted(tmp_path.iterdir()), page.read_text()
    # private: the write breaks off, as on a full disk
    monkeypatch.setattr(
        "streampack.storage.folders.settle", lambda *_: fail(OSError(28, "No space left on device"))
    )
    assert cli.main([*words, "--html", str(page), "--json", str(json_file)]) == 1
    assert (sorted(tmp_path.iterdir()), page.read_text()) == before


def test_a_page_is_written_through_links_and_pipes(tmp_path: Path) -> None:
    """`--html /dev/stdout` replaced the device."""
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n' * 20)
    words = ["inspect", str(tmp_path / "a.jsonl"), "--max-seq-len", "4", "--html"]
    link, page, pipe = (tmp_path / name for name in ("link.html", "page.html", "pipe"))
    link.symlink_to(page)
    assert cli.main([*words, str(link)]) == 0
    assert link.is_symlink()
    assert "</html>" in page.read_text()
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    assert cli.main([*words, str(pipe)]) == 0
    reader.join(10)
    assert pipe.is_fifo()
    assert "</html>" in found[0]


def test_a_config_is_inspected_as_its_run_would_read_it(tmp_path: Path) -> None:
    OmegaConf.save(mixed_config(tmp_path), tmp_path / "my.yaml")
    before = sorted(tmp_path.rglob("*"))
    changes = ["data.buffer_size=8", "data.pad_seqs_to=4"]
    shown = inspect(tmp_path, "--config", str(tmp_path / "my.yaml"), *changes)
    written = {tmp_path / "report.json", tmp_path / "report.html"}
    assert sorted(tmp_path.rglob("*")) == sorted({*before, *written}), "nothing but the report"
    report, settings = shown.report, shown.report["settings"]
    assert settings["shape"]["batch_size"] * settings["shape"]["accumulation"] == 4
    assert settings["packing"]["buffer_size"] == 8
    assert [share["name"] for share in report["sources"]] == ["counting", "words"]
    assert sum(share["fraction"] for share in report["sources"]) == pytest.approx(1)
    assert all("counting" in text for text in shown.texts)
    [chosen] = [outcome for outcome in report["outcomes"] if outcome["chosen"]]
    cost = f"pad_seqs_to=4 costs {100 * chosen['sequence_ends']:.2f} %"
    assert all(cost in " ".join(text.split()) for text in shown.texts)
