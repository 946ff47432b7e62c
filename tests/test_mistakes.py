"""The likeliest mistakes of a newcomer: each message says what happened, the limit, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from streampack.training.errors import message_of
from tests.support.mistakes import MISTAKES, Mistake


def said(mistake: Mistake, folder: Path) -> str:
    """Make a mistake in a folder, and return the message, with names relative to that folder."""
    try:
        text = mistake.make(folder)
    except Exception as error:
        text = message_of(error)
    assert isinstance(text, str), f"nothing was said, and {text!r} was returned"
    return text.replace(f"{folder}/", "").replace(str(folder), "my_folder")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_named_with_its_cure(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said(mistake, tmp_path) == mistake.message


def test_there_are_thirty_mistakes_and_no_two_are_alike() -> None:
    assert len({mistake.title for mistake in MISTAKES}) == len(MISTAKES) >= 30
    assert len({mistake.message for mistake in MISTAKES}) == len(MISTAKES)
