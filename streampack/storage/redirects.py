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


def guarded(options: Mapping[str, Any], check: Check | None, *, elsewhere: bool) -> dict[str, Any]:
    """Return options with which redirects are checked, and one to another origin raises `Elsewhere`.

    aiohttp would follow it with all headers but ``Authorization``, and with what its session has for every host. The
    options for ``elsewhere`` are without what could be a secret, so its redirects are only checked.

    >>> options = {"headers": {"X-Token": "secret"}, "client_kwargs": {"auth": "me", "trust_env": True}}
    >>> list(guarded(options, None, elsewhere=True)["client_kwargs"])
    ['trust_env', 'trace_configs']
    """
    from aiohttp import TraceConfig

    async def look(session: Any, context: Any, params: Any) -> None:
        url = str(target := _target(params))
        if check is not None:
            check(url)
        if not elsewhere and target.origin() != params.url.origin():
            params.response.release()
            raise Elsewhere(url)

    trace = TraceConfig()
    trace.on_request_redirect.append(look)

    def told(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if not (elsewhere and name in PRIVATE)}

    client = told(options.get("client_kwargs") or {})
    traces = [*client.get("trace_configs", ()), trace]
    return {**told(options), "client_kwargs": {**client, "trace_configs": traces}}


def elsewhere(error: BaseException) -> Elsewhere | None:
    """Return the redirect that ended a request, if one did; fsspec gives some errors another class."""
    return next((each for each in (error, error.__cause__) if isinstance(each, Elsewhere)), None)


def _target(params: Any) -> Any:
    """Return the address to which an answer redirects; raise `Refused` if it is none of the web."""
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
