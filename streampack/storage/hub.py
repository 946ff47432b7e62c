"""Repositories of the Hugging Face Hub, read at one commit and by ranges.

`HfFileSystem` alone would read whatever the branch points to now, with the sizes it had before, and retry each read up
to five times below our own retries. https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from streampack.storage.base import redact
from streampack.storage.responses import Answer, Judged, head_of
from streampack.storage.retries import Refused

log = logging.getLogger(__name__)
WAITS = 4  # A request waits to connect to two hosts and for both to answer, each time with a limit.
# A path at a commit: (kind, repository, commit, path in it). The Hub's first models, such as gpt2, have no namespace.
PINNED = re.compile(r"hf://((?:datasets/|spaces/)?)([^/@]+(?:/[^/@]+)?)@([0-9a-f]{40})(?:/(.*))?")


def pinned(fs: Any, paths: Sequence[str], *, timeout: float) -> list[str]:
    """Return the same paths at the commits that their branches or tags point to now; one request for each revision.

    ``hf://datasets/org/name/a.jsonl`` becomes ``hf://datasets/org/name@<40 digits>/a.jsonl``.

    Args:
        fs: an `HfFileSystem`.
        paths: paths of the Hub, with or without a revision.
        timeout: seconds that one request may take.

    Raises:
        Judged: holds a FileNotFoundError for a repository or revision that is not there, and a ValueError for a bucket
            or a path that the installed huggingface_hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=fs.endpoint, token=fs.token)
    commits: dict[tuple[str, str, str], str] = {}
    found = []
    for path in paths:
        if path.startswith("hf://buckets/"):
            raise Judged(
                ValueError(
                    f"{redact(path)}: a bucket has no commits, so its files could change during a run; use a dataset "
                    "repository"
                )
            )
        try:
            where = fs.resolve_path(path)
        except FileNotFoundError:
            what = "there is no such repository or revision, or it needs a token (HF_TOKEN, or token in the options)"
            raise Judged(FileNotFoundError(f"{redact(path)}: {what}")) from None
        except ValueError:
            what = "huggingface_hub refuses the path; name the repository with its namespace (openai-community/gpt2)"
            raise Judged(ValueError(f"{redact(path)}: {what}")) from None
        if PINNED.fullmatch(path):
            found.append(path)
            continue
        repo = (where.repo_type, where.repo_id, where.revision)
        if repo not in commits:
            # `expand` limits the answer to the commit. Otherwise it would list every file of the repository.
            info = api.repo_info(
                where.repo_id,
                revision=where.revision,
                repo_type=where.repo_type,
                timeout=timeout,
                expand=["sha"],
            )
            commits[repo] = info.sha
            log.info("%s@%s is read at commit %s", where.repo_id, where.revision, info.sha)
        kind = "" if where.repo_type == "model" else f"{where.repo_type}s/"
        found.append(f"hf://{kind}{where.repo_id}@{commits[repo]}/{where.path_in_repo}".rstrip("/"))
    return found


def commit_of(path: str) -> str | None:
    """Return the commit in a path of the Hub; None if there is none."""
    found = PINNED.fullmatch(path)
    return found and found[3]


def fetch(fs: Any, path: str, start: int, stop: int, patience: float) -> Answer:
    """Read a range of a file at a commit. The answer has no tag: a commit does not change.

    Raises:
        Judged: holds the error for an answer that is not the range.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    found = PINNED.fullmatch(path)
    assert found is not None, "a manifest holds pinned paths only"
    kind, repo, commit, name = found.groups()
    url = hf_hub_url(repo, name, repo_type=kind[:-2] or None, revision=commit, endpoint=fs.endpoint)
    headers = {
        **build_hf_headers(token=fs.token),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    deadline = time.monotonic() + patience
    # Large files are redirected to another host; the session does not send the token there.
    with get_session().stream("GET", url, headers=headers, timeout=patience / WAITS) as response:
        head = head_of(path, response.status_code, response.headers)
        data = bytearray()
        for chunk in () if head.start is None else response.iter_raw():
            data += chunk
            if len(data) > stop - start:
                raise Judged(Refused(f"{path}: the server sends more than the range that it was asked for"))
            if time.monotonic() > deadline:  # the session's own limit is for each chunk, not for all together
                raise TimeoutError
    return head._replace(data=bytes(data), tag=None)
