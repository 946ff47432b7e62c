"""Plain English: no text of the package or its pages has a word of the list to avoid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.plain_words import files, find

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile"]
FOLDERS = ["streampack", "docs", "recipes", "examples", "configs", "benchmarks", "stress"]


@pytest.mark.parametrize("place", [*PAGES, *FOLDERS])
def test_no_word_to_avoid(place: str) -> None:
    read = files(ROOT / place)
    assert read
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in read
        for line, word in find(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_a_word_is_found_across_lines_and_in_names() -> None:
    text = '"""The run goes\n    on."""\n# of\n# which\nleft_out = 1\nif x is given, look ahead behind a URL'
    assert list(find(text)) == [(1, "goes on"), (3, "of which"), (5, "leaves out")]
    assert list(find("It stands for what stands here, behind the standard.")) == [
        (1, "stands"),
        (1, "behind"),
    ]
