"""Plain English: the words to avoid, counted by folder; a folder's limit may only fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.plain_words import AVOID, count, files, find

ROOT = Path(__file__).resolve().parents[1]
PAGES = "README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md Makefile"

# How many such words are left; a folder that is not listed may have none.
LIMITS = {
    "benchmarks": 12,
    "docs": 2,
}


def places() -> list[Path]:
    """The folders of the package one by one, its own modules, and all else that users read."""
    package = ROOT / "streampack"
    beside = [
        ROOT / name
        for name in (*PAGES.split(), "docs", "recipes", "examples", "configs", "benchmarks", "stress")
    ]
    return [*(path.parent for path in package.glob("*/__init__.py")), *package.glob("*.py"), *beside]


@pytest.mark.parametrize("place", places(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_to_avoid_become_fewer(place: Path) -> None:
    found = count(place)
    limit = LIMITS.get(str(place.relative_to(ROOT)), 0)
    assert files(place)
    assert found.total() <= limit, dict(found)


def test_a_word_is_found_across_lines_and_in_names() -> None:
    text = '"""The run goes\n    on."""\n# of\n# which\nleft_out = 1\nif x is given, look ahead behind a URL'
    assert list(find(text)) == [(1, "goes on"), (3, "of which"), (5, "leaves out")]
    assert list(find("It stands for what stands here, behind the standard.")) == [
        (1, "stands"),
        (1, "behind"),
    ]
    for word, (pattern, instead) in AVOID.items():
        assert instead, (word, pattern)
