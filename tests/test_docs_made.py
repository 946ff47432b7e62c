"""What docs/ has from the code is what the code says now: tables, pictures, the page of the API, and it builds."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import streampack
from docs.drawings import FOLDER, PICTURES, SAMPLES, planned
from docs.tables import DOCS, documented, put, tables
from streampack.training.config import RunConfig
from streampack.training.hints import DATA_KEYS, TORCHTUNE_KEYS, TRAINER_KEYS

ROOT = Path(__file__).resolve().parents[1]
AGAIN = "`make docs` writes it anew"


@pytest.mark.parametrize("place", tables(), ids=" ".join)
def test_a_table_is_what_the_code_says(place: tuple[str, str]) -> None:
    page, name = place
    text = (DOCS / page).read_text(encoding="utf-8")
    assert put(text, name, tables()[place]) == text, AGAIN


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_code_draws(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PICTURES[name](), AGAIN


def test_the_words_beside_the_pictures_are_true() -> None:
    text = (DOCS / "guides" / "how_packing_works.md").read_text(encoding="utf-8")
    assert len(SAMPLES) == 20
    assert f"{min(SAMPLES)} to {max(SAMPLES)} tokens" in text
    counts = [len(planned(strategy)) for strategy in ("next_fit", "first_fit", "best_fit", "exact_fit")]
    assert counts == [11, 9, 9, 8]
    assert "next_fit, eleven, of first_fit and best_fit, nine each" in text


def test_every_key_of_a_run_is_described() -> None:
    assert list(documented(RunConfig.__doc__ or "", "Attributes")) == [
        each.name for each in fields(RunConfig)
    ]


def test_hints_are_for_keys_that_a_config_does_not_have() -> None:
    known = {each.name for each in fields(RunConfig)}
    assert not known & {*TORCHTUNE_KEYS, *TRAINER_KEYS}
    assert not {"strategy", "max_seq_len", "shuffle"} & set(DATA_KEYS)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\.\. auto\w+:: streampack\.(\w+)$", text, re.MULTILINE)) == sorted(
        streampack.__all__
    )


def test_the_pages_build_without_a_warning_or_a_request(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-b",
        "html",
        "-c",
        "docs",
        "-W",
        "-n",
        "-d",
        tmp_path / "trees",
    ]
    run = subprocess.run(
        [*command, ROOT, tmp_path / "html"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    loaded = re.compile(
        r'<(?:script|img|iframe|source)[^>]*src="(https?:)?//|<link[^>]*href="(https?:)?//|@import|url\((https?:)?//'
    )
    for page in (tmp_path / "html").rglob("*"):
        if page.suffix in (".html", ".css"):
            assert not loaded.search(page.read_text(encoding="utf-8")), page
