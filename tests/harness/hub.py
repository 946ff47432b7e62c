"""A dataset repository of the Hugging Face Hub on loopback: the part of its API that reading needs."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import ExitStack

from tests.harness.web import Reply, Web

LARGE = ".parquet"  # stored by LFS: redirected to another host, by a signed URL


class Hub:
    """Commits and branches. ``web`` serves the Hub's API, ``store`` large files.

    https://huggingface.co/docs/hub/api
    """

    def __init__(self, repo: str = "org/name", *, token: str | None = None) -> None:
        self.repo = repo
        self.token = token  # without it, there is no such repository
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.web, self.store = Web({}), Web({})
        self.web.route = self._route
        self.stack = ExitStack()

    def __enter__(self) -> Hub:
        self.stack.enter_context(self.web)
        self.stack.enter_context(self.store)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @property
    def options(self) -> dict[str, str | None]:
        """Options for `HfFileSystem`."""
        return {"endpoint": self.web.url, "token": self.token}

    @property
    def bytes(self) -> int:
        """Bytes of bodies that both hosts sent."""
        return self.web.bytes + self.store.bytes

    def commit(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Commit files by path to a branch. Returns the commit."""
        commit = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        for content in files.values():
            self.web.files[f"/{oid(content)}"] = self.store.files[f"/{oid(content)}"] = content
        return commit

    def _route(self, path: str, query: dict[str, list[str]], headers: dict[str, str]) -> Reply | str:
        found = re.fullmatch(r"(/api)?/datasets/([^/]+/[^/]+)(?:/(revision|tree|resolve)/(.+))?", path)
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            return Reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if found is None or found[2] != self.repo:
            return Reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        rest = found[4] or "main"
        known = sorted({*self.branches, *self.commits}, key=len, reverse=True)
        revision = next((name for name in known if rest == name or rest.startswith(f"{name}/")), None)
        if revision is None:
            return Reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit = self.branches.get(revision, revision)
        files, name = self.commits[commit], rest[len(revision) + 1 :]
        if found[3] == "resolve":
            return self._resolve(commit, name, files.get(name))
        if found[3] == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            return Reply(200, json.dumps(tree(files, name, recursive=recursive)).encode())
        return Reply(200, json.dumps({"id": self.repo, "sha": commit}).encode())

    def _resolve(self, commit: str, name: str, content: bytes | None) -> Reply | str:
        if content is None:
            return Reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if not name.endswith(LARGE):
            return f"/{oid(content)}"
        place = f"{self.store.url}/{oid(content)}?Signature=canary-signature"
        return Reply(302, b"", {"Location": place, "X-Repo-Commit": commit, "X-Linked-ETag": oid(content)})


def oid(content: bytes) -> str:
    """Return the id of a content."""
    return hashlib.sha256(content).hexdigest()


def tree(files: dict[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, object]]:
    """Return the entries below a folder."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        steps = path[len(prefix) :].split("/")
        for depth in range(1, len(steps)):
            if recursive or depth == 1:
                name = prefix + "/".join(steps[:depth])
                found[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        if recursive or len(steps) == 1:
            entry: dict[str, object] = {"type": "file", "oid": oid(content)[:40], "path": path}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": oid(content), "size": len(content), "pointerSize": 130}
            found[path] = {**entry, "size": len(content)}
    return list(found.values())
