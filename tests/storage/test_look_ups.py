"""Look-ups of the files of a corpus: beside each, behind URLs with a query, and by one rank for all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streampack import DatatroveSource, FlatTokensSource, MegatronSource
from tests.support.corpus import read_all
from tests.support.foreign_tokens import write_datatrove, write_flat, write_megatron
from tests.support.web import Web

DOCUMENTS = [[i] * (1 + i % 5) for i in range(1, 40)]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    write_megatron(tmp_path, DOCUMENTS, dtype="uint16")
    write_datatrove(tmp_path, DOCUMENTS)
    write_flat(tmp_path / "a.npy", [token for document in DOCUMENTS for token in (*document, 0)])
    with Web({f"/c/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}) as server:
        yield server


def opened(kind: str, web: Web, **settings: Any) -> Any:
    name = {"megatron": "text_document_0", "datatrove": "00000_unshuffled.ds", "flat": "a.npy"}[kind]
    url = f"{web.url}/c/{name}?sig=canary"
    if kind == "flat":
        return FlatTokensSource(url, eos_token_id=0, dtype="uint16", **settings)
    return {"megatron": MegatronSource, "datatrove": DatatroveSource}[kind](url, **settings)


@pytest.mark.parametrize("kind", ["megatron", "datatrove", "flat"])
def test_one_rank_looks_files_up_for_all(web: Web, kind: str) -> None:
    """The others get what it found, pickled, and ask for nothing. The query stays, and is shown to nobody."""
    asked: list[str] = []
    found: list[bytes] = []

    def first(work: Any, *, of: str) -> Any:
        asked.append(of)
        found.append(pickle.dumps(work()))
        return pickle.loads(found[-1])

    expected = read_all(opened(kind, web, once=first))
    assert all("sig=canary" in path for path, _ in web.requests)
    assert "canary" not in "".join(asked)
    requests = len(web.requests)
    left = [pickle.loads(each) for each in found]
    source = opened(kind, web, once=lambda work, *, of: left.pop(0))
    assert len(web.requests) == requests, "nothing was asked for"
    assert not left
    again = read_all(source)
    assert [row["tokens"].tolist() for row in again] == [row["tokens"].tolist() for row in expected]


def test_a_storage_that_refuses_an_index_is_an_error_that_names_it(web: Web) -> None:
    web.fault = lambda path: "403" if path.endswith(".idx") else None
    with pytest.raises(PermissionError, match=r"/c/text_document_0.idx: HTTP 403, access is denied") as error:
        opened("megatron", web)
    assert "canary" not in str(error.value)
