"""Files that cannot be read: the reasons that are known without reading rows, and a summary of them for messages."""

from __future__ import annotations

from collections.abc import Sequence

GONE = "there is no such file"
EMPTY = "it is empty"
BLANK = "it holds blank lines only"
MAX_NAMED = 10  # files that a summary names

Problem = tuple[str, str]
"""(a file's path without secrets, why the file cannot be read)."""


def gone(error: FileNotFoundError, shown: str) -> str:
    """Return why a file cannot be read for which a storage raised this error: what a server answered, if one did.

    >>> gone(FileNotFoundError("https://host/a: HTTP 410, there is no such file"), "https://host/a")
    'HTTP 410, there is no such file'
    """
    answer = str(error).partition(f"{shown}: ")
    return answer[2] if not answer[0] and answer[2] else GONE


def summarize(problems: Sequence[Problem], *, files: int) -> str:
    """Name the files of a corpus that cannot be read, up to ten of them, each with the reason.

    >>> summarize([("a.jsonl", EMPTY), ("b.jsonl", GONE)], files=40)
    '2 of 40 files cannot be read: a.jsonl: it is empty; b.jsonl: there is no such file'
    >>> summarize([("a.jsonl", EMPTY)], files=1)
    'a.jsonl: it is empty'
    """
    named = "; ".join(f"{shown}: {reason}" for shown, reason in problems[:MAX_NAMED])
    more = f"; and {len(problems) - MAX_NAMED:,} more" if len(problems) > MAX_NAMED else ""
    if files == 1:
        return named
    return f"{len(problems):,} of {files:,} files cannot be read: {named}{more}"
