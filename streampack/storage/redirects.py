"""Redirects of web servers: another origin is told nothing of the user's, and some places are not gone to at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampack.storage.retries import Refused

PRIVATE = ("headers", "auth", "cookies", "params", "cookie_jar", "middlewares")
"""Options of fsspec's file system, and of its client, that one origin is told and no other."""

Check = Callable[[str], None]
"""``(url)`` raises `Refused` if a redirect may not lead there."""


class Elsewhere(Exception):
    """The error that ends a request whose answer leads to another origin, at ``url``."""

    def __init__(self, url: str) -> None:
        super().__init__("a redirect to another origin")
        self.url = url


def watched(options: Mapping[str, Any], check: Check | None) -> dict[str, Any]:
    """Return options with which a redirect to another origin raises `Elsewhere`.

    aiohttp would follow it with all headers but ``Authorization``, and with what its session has for every host.
    """
    from aiohttp import TraceConfig

    async def look(session: Any, context: Any, params: Any) -> None:
        url = str(target := _target(params))
        if check is not None:
            check(url)
        if target.origin() != params.url.origin():
            params.response.release()
            raise Elsewhere(url)

    trace = TraceConfig()
    trace.on_request_redirect.append(look)
    client = dict(options.get("client_kwargs") or {})
    return {
        **options,
        "client_kwargs": {**client, "trace_configs": [*client.get("trace_configs", ()), trace]},
    }


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for other origins, such as those of a proxy.

    >>> without_secrets({"headers": {"X-Token": "secret"}, "client_kwargs": {"auth": "me", "trust_env": True}})
    {'client_kwargs': {'trust_env': True}}
    """
    kept = {name: value for name, value in options.items() if name not in PRIVATE}
    if client := kept.get("client_kwargs"):
        kept["client_kwargs"] = {name: value for name, value in client.items() if name not in PRIVATE}
    return kept


def elsewhere(error: BaseException) -> Elsewhere | None:
    """Return the redirect that ended a request, if one did; fsspec gives some errors another class."""
    return next((each for each in (error, error.__cause__) if isinstance(each, Elsewhere)), None)


def _target(params: Any) -> Any:
    """Return the address to which an answer redirects.

    Raises:
        Refused: if it is none of the web.
    """
    from yarl import URL

    if not (location := params.response.headers.get("Location")):
        raise Refused("the server redirects to nowhere; correct the URL")
    try:
        target = URL(location)
        target = target if target.scheme else params.url.join(target)
        if target.scheme in ("http", "https") and target.host:
            return target
    except ValueError:
        pass
    raise Refused("the server redirects to what is no web address; correct the URL")
