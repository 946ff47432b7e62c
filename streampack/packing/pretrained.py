"""Tokenizers, processors and models of transformers, by path: a folder, or a name on the Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

HUB_SECONDS = 10
"""The most seconds that the Hub may take to say whether it has a repository."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""The variable by which users and processes say whether the tokenizers library may use threads."""


def load_pretrained(
    kind: Any,
    path: str | os.PathLike[str],
    *,
    what: str,
    file: str,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Return ``kind.from_pretrained(path)``; no code of a repository is run.

    Args:
        kind: a class of transformers, such as ``AutoTokenizer``.
        path: a folder, or a name on the Hub. Without the Hub, its cache is used.
        what: for the error, what it is.
        file: for the error, a file that its folder must have.
        settings: more arguments of ``from_pretrained``.

    Raises:
        ValueError: if there is none.
    """
    name = str(Path(path).expanduser())
    try:
        return kind.from_pretrained(
            name, trust_remote_code=False, local_files_only=_only_cached(name), **(settings or {})
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no {what} at {name!r}; give a folder with its {file}, or a name on the Hub: {str(error).splitlines()[0]}"
        ) from error


def _only_cached(name: str) -> bool:
    """Return whether a name is no folder and the Hub does not answer, so that only the cache can have it.

    transformers asks for each file six times, for 23 s, before it looks there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if Path(name).is_dir():
        return False
    try:
        HfApi().repo_info(name, timeout=HUB_SECONDS, expand=["sha"])
    except Exception as error:
        # Of one of several HTTP libraries, unless the Hub answers or the name cannot be one.
        return not isinstance(error, HfHubHTTPError | HFValidationError)
    return False


@cache
def tokenize_in_one_thread_after_forks() -> None:
    """Let processes that are forked from this one tokenize in one thread.

    Threads of the tokenizers library are no longer there after a fork: it would warn in each forked process, and wait
    for them for ever if ``TOKENIZERS_PARALLELISM`` is true.
    """
    given = list[str | None]()

    def before() -> None:
        given.append(os.environ.get(PARALLELISM))
        os.environ[PARALLELISM] = "false"

    def after() -> None:
        if (value := given.pop()) is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = value

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=before, after_in_parent=after)
