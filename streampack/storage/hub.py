"""Repositories of the Hugging Face Hub, read at one commit, as files of a web server: https://huggingface.co/docs/hub/api.

`HfFileSystem` alone would read what the branch points to now, with the sizes it had before, prefetch, and retry each
read up to five times within our own retries.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from streampack.storage.base import redact
from streampack.storage.retries import Refused

log = logging.getLogger(__name__)
# A path at a commit: (kind, repository, commit, path in it). The Hub's first models, such as gpt2, have no namespace.
PINNED = re.compile(r"hf://((?:datasets/|spaces/)?)([^/@]+(?:/[^/@]+)?)@([0-9a-f]{40})(?:/(.*))?")
Safely = Callable[[str, Callable[[], Any]], Any]
"""``(path, call)`` returns the result of a call of a library; its errors are replaced by ours."""


def pinned(fs: Any, paths: Sequence[str], *, timeout: float, safely: Safely) -> list[str]:
    """Return the same paths at the commits that their branches or tags point to now; one request for each revision.

    ``hf://datasets/org/name/a.jsonl`` becomes ``hf://datasets/org/name@<40 digits>/a.jsonl``. ``safely`` calls the
    library, with ``timeout`` seconds a request.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=fs.endpoint, token=fs.token)
    commits: dict[tuple[str, str, str], str] = {}
    found = []
    for path in paths:
        if path.startswith("hf://buckets/"):
            raise ValueError(
                f"{redact(path)}: a bucket has no commits, so its files could change during a run; use a dataset "
                "repository"
            )
        try:
            where = safely(path, lambda path=path: fs.resolve_path(path))  # type: ignore[misc]
        except (FileNotFoundError, PermissionError):
            what = "there is no such repository or revision, or it needs a token (HF_TOKEN, or token in the options)"
            raise FileNotFoundError(f"{redact(path)}: {what}") from None
        except Refused:
            what = "huggingface_hub refuses the path; name the repository with its namespace (openai-community/gpt2)"
            raise ValueError(f"{redact(path)}: {what}") from None
        if PINNED.fullmatch(path):
            found.append(path)
            continue
        repo = (where.repo_type, where.repo_id, where.revision)
        if repo not in commits:
            # `expand` limits the answer to the commit. Otherwise it would list every file of the repository.
            about = {"repo_type": repo[0], "revision": repo[2], "timeout": timeout, "expand": ["sha"]}
            info = safely(path, lambda: api.repo_info(repo[1], **about))  # noqa: B023 - called at once
            commits[repo] = info.sha
            log.info("%s@%s is read at commit %s", where.repo_id, where.revision, info.sha)
        kind = "" if where.repo_type == "model" else f"{where.repo_type}s/"
        found.append(f"hf://{kind}{where.repo_id}@{commits[repo]}/{where.path_in_repo}".rstrip("/"))
    return found


def commit_of(path: str) -> str | None:
    """Return the commit in a path of the Hub; None if there is none."""
    found = PINNED.fullmatch(path)
    return found and found[3]


def web_address(fs: Any, path: str) -> str:
    """Return the address of a file at a commit. Large files are redirected to another host, by a signed URL."""
    from huggingface_hub import hf_hub_url

    found = PINNED.fullmatch(path)
    assert found is not None, "only pinned paths are read"
    kind, repo, commit, name = found.groups()
    return str(hf_hub_url(repo, name, repo_type=kind[:-2] or None, revision=commit, endpoint=fs.endpoint))


def http_options(fs: Any) -> dict[str, Any]:
    """Return the options of fsspec's HTTP file system for the Hub. The token is not sent on to other hosts."""
    from huggingface_hub.utils import build_hf_headers

    return {"headers": build_hf_headers(token=fs.token)}
