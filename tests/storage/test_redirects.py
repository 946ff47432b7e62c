"""A redirect to another origin takes nothing of the user's, and one that leads to no file is an error at once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from streampack import JSONLSource, VisionEncoder
from streampack.sources import Reading
from tests.harness.files import shards
from tests.harness.stores import Reply, Web, short_waits
from tests.vision.families import processor_of

aiohttp = pytest.importorskip("aiohttp")
pytestmark = pytest.mark.filterwarnings("ignore:.*[aA]uth.*:DeprecationWarning")
SECRET = "s3cret"
TOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "a header": lambda: {"headers": {"X-Token": SECRET}},
    "authorization": lambda: {"headers": {"authorization": SECRET}},
    "a client's header": lambda: {"client_kwargs": {"headers": {"X-Token": SECRET}}},
    "a client's user": lambda: {"client_kwargs": {"auth": aiohttp.BasicAuth("me", SECRET)}},
    "a user": lambda: {"auth": aiohttp.BasicAuth("me", SECRET)},
    "a cookie": lambda: {"cookies": {"session": SECRET}},
    "a client's cookie": lambda: {"client_kwargs": {"cookies": {"session": SECRET}}},
    "a query": lambda: {"params": {"token": SECRET}},
}


@pytest.fixture
def servers() -> Iterator[tuple[Web, Web]]:
    with Web({}) as one, Web({}) as two:
        for web in (one, two):  # a cookie is kept for names, not for numbers
            web.url = web.url.replace("127.0.0.1", "localhost")
        yield one, two


def to(location: str) -> Any:
    return lambda *_: Reply(302, headers={"Location": location})


def told(web: Web) -> list[bool]:
    """Whether each request had something of the user's. Basic authentication is the secret in base64."""
    found = zip(web.requests, web.headers, strict=True)
    return [
        any(secret in f"{path} {headers}" for secret in (SECRET, aiohttp.BasicAuth("me", SECRET).encode()))
        for (path, _), headers in found
    ]


def rows_of(url: str, **options: Any) -> list[Any]:
    source = JSONLSource(url, storage={"options": options, "max_outage": 0.1})
    return [row.data for row in source.read(Reading())]


@pytest.mark.parametrize("what", TOLD)
def test_a_redirect_to_another_origin_takes_nothing_of_the_users(servers: tuple[Web, Web], what: str) -> None:
    one, two = servers
    [(path, content)] = shards("jsonl", 1).items()
    two.files[path] = content
    expected = rows_of(two.url + path)
    two.requests.clear(), two.headers.clear()
    one.route = to(two.url + path)
    assert rows_of(one.url + path, **TOLD[what]()) == expected != []
    assert set(told(one)) == {what != "nothing"}
    assert set(told(two)) == {False}
    assert len(two.requests) > 1, "a look and a read"


def test_a_redirect_within_an_origin_takes_what_is_the_users(servers: tuple[Web, Web]) -> None:
    one, _ = servers
    [(path, content)] = shards("jsonl", 1).items()
    one.files["/there"] = content
    one.route = lambda path, *_: path if path == "/there" else Reply(302, headers={"Location": "/there"})
    assert rows_of(one.url + path, headers={"X-Token": SECRET})
    assert set(told(one)) == {True}
    assert {path for path, _ in one.requests} == {path, "/there"}


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file:///etc/passwd", "redirects to what is no web address"),
        ("http://[", "redirects to what is no web address"),
        ("http:///nowhere", "redirects to what is no web address"),
        ("ONE/again", "redirects in a circle"),
        ("TWO/again", "redirects in a circle"),
        ("", "redirects to nowhere"),
    ],
)
def test_a_redirect_that_leads_to_no_file_is_an_error_at_once(
    servers: tuple[Web, Web], monkeypatch: pytest.MonkeyPatch, location: str, message: str
) -> None:
    one, two = servers
    waits = short_waits(monkeypatch)
    location = location.replace("ONE", one.url).replace("TWO", two.url)
    one.route = to(location)
    two.route = to(one.url)
    with pytest.raises(OSError, match=rf"^{one.url}/a.jsonl: .*the server {message}"):
        rows_of(f"{one.url}/a.jsonl", headers={"X-Token": SECRET})
    assert waits == []


def test_a_redirect_does_not_lead_out_of_a_folder_of_images(servers: tuple[Web, Web]) -> None:
    image = pytest.importorskip("PIL.Image")
    one, two = servers
    image.fromarray(np.full((60, 60, 3), 9, np.uint8)).save(body := io.BytesIO(), "PNG")
    for web in servers:
        web.files |= dict.fromkeys(("/images/real.png", "/other/real.png"), body.getvalue())
    moved = {
        "/images/inside.png": "/images/real.png",
        "/images/out.png": "/other/real.png",
        "/images/up.png": f"{one.url}/images/%2e%2e/other/real.png",
        "/images/sibling.png": f"{one.url}/images2/real.png",
        "/images/far.png": f"{two.url}/images/real.png",
        "/images/twice.png": "/images/far.png",
    }
    one.route = lambda path, *_: Reply(302, headers={"Location": moved[path]}) if path in moved else path

    two.route = lambda path, *_: (
        Reply(302, headers={"Location": "/other/real.png"}) if path.startswith("/images") else path
    )

    def read(path: str, *more: str, **settings: Any) -> Any:
        storage = {"options": {"headers": {"X-Token": SECRET}}, "max_outage": 0}
        folders = [f"{one.url}/images", *more]
        made = VisionEncoder(processor_of("qwen2_vl"), folder=folders, storage=storage, **settings)
        return made({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
                     "images": [path]})  # fmt: skip

    assert read("inside.png")
    for path in moved:
        if "inside" not in path:
            with pytest.raises(ValueError, match="leads out of the folder of images"):
                read(path.removeprefix("/images/"))
    assert not two.requests
    assert set(told(one)) == {True}
    for path in ("far.png", f"{two.url}/images/real.png"):  # the second folder's server redirects, too
        with pytest.raises(ValueError, match="other/real.png leads out of the folder of images"):
            read(path, f"{two.url}/images")
    two.route = lambda path, *_: path
    assert read("far.png", anywhere=True)
    assert read("twice.png", anywhere=True)
    assert set(told(two)) == {False}
