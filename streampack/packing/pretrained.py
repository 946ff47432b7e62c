"""Tokenizers, processors and models of transformers, by path: a folder, or a name on the Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HUB_SECONDS = 10
"""The most seconds that the Hub may take to say whether it has a repository."""


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
    except (
        Exception
    ) as error:  # of one of several HTTP libraries, unless it answers or the name cannot be one
        return not isinstance(error, HfHubHTTPError | HFValidationError)
    return False
