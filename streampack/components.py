"""Building objects from ``_component_`` nodes of a YAML config, nested ones included.

torchtune's ``config.instantiate`` builds one node and hands nested ones over as plain dicts. This builds
the whole tree, and only from packages that are trusted: a config is data, and data must not be able to
call ``os.system``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

COMPONENT = "_component_"
TRUSTED = ("streampack", "streampack_recipes", "torchtune", "torch", "torchao", "transformers")


def build(
    node: Any, *args: Any, trusted: Collection[str] = (), inject: Mapping[str, Any] | None = None
) -> Any:
    """The object that ``node`` describes; nested nodes are built first, ``args`` go to the outermost.

    Anything without a ``_component_`` is returned as it is, with the nodes inside it built. ``trusted``
    adds package names to those that a dotted path may begin with. ``inject`` offers values by parameter
    name (``tokenizer``, ``optimizer``) to whatever asks for them and was not given them by the config.

    >>> build({"_component_": "streampack.TokensEncoder", "labels": None}).labels is None
    True

    Raises:
        ValueError: for a path outside the trusted packages, one that leads nowhere, or arguments that do
            not fit.
    """
    if isinstance(node, Mapping):
        inner = {
            key: build(value, trusted=trusted, inject=inject)
            for key, value in node.items()
            if key != COMPONENT
        }
        if COMPONENT not in node:
            return inner
        path = node[COMPONENT]
        component = resolve(path, trusted=trusted)
        signature = inspect.signature(component)
        asked = list(signature.parameters)[len(args) :]
        arguments = {name: value for name, value in (inject or {}).items() if name in asked} | inner
        try:
            signature.bind(*args, **arguments)
        except TypeError as error:
            raise ValueError(f"{path}: {error}; it was given {sorted(arguments)}") from None
        return component(*args, **arguments)
    if isinstance(node, list | tuple):
        return [build(value, trusted=trusted, inject=inject) for value in node]
    return node


def resolve(path: str, *, trusted: Collection[str] = ()) -> Any:
    """The class or function that a dotted path names.

    Raises:
        ValueError: if its package is not trusted, or there is no such thing.
    """
    allowed = (*TRUSTED, *trusted)
    outside = ValueError(
        f"_component_ {path!r} is outside the trusted packages ({', '.join(allowed)}); "
        "if you trust it, add its package to trusted_packages in the config"
    )
    if str(path).split(".")[0] not in allowed:
        raise outside
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:depth])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and not f"{name}.".startswith(f"{error.name}."):
                raise ImportError(
                    f"_component_ {path!r} needs {error.name}, which is not installed"
                ) from error
            continue
        for attribute in parts[depth:]:
            found = getattr(found, attribute, None)
            if found is None:
                break
        if callable(found):
            # A trusted module holds what it imported, too: streampack.cli.os.system is still os.system.
            home = getattr(found, "func", found).__module__ or ""
            if home.split(".")[0] not in allowed:
                raise outside
            return found
        break
    raise ValueError(f"_component_ {path!r} leads to nothing that can be called; check the spelling")
