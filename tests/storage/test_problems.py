"""Summaries of files that cannot be read, and the words for a file that is gone."""

from __future__ import annotations

from streampack.storage.problems import EMPTY, GONE, gone, summarize


def test_a_long_list_is_cut() -> None:
    problems = [(f"{i}.jsonl", GONE) for i in range(12)]
    message = summarize(problems, files=40)
    assert message.startswith("12 of 40 files cannot be read: 0.jsonl: there is")
    assert message.endswith("; 9.jsonl: there is no such file; and 2 more")
    assert summarize([("a", EMPTY)], files=1) == "a: it is empty"


def test_the_answer_of_a_server_is_kept() -> None:
    url = "http://host/a"
    assert (
        gone(FileNotFoundError(f"{url}: HTTP 404, there is no such file"), url)
        == "HTTP 404, there is no such file"
    )
    assert gone(FileNotFoundError(2, "No such file or directory", "/a"), "/a") == GONE
