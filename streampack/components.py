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


def build(node: Any, *args: Any, trusted: Collection[str] = (), **kwargs: Any) -> Any:
    """The object that ``node`` describes. Nested nodes are built first; ``args`` and ``kwargs`` go to the outermost.

    Anything without a ``_component_`` is returned as it is, with the nodes inside it built. ``trusted``
    adds package names to those that a dotted path may begin with.

    >>> build({"_component_": "streampack.TokensEncoder", "labels": None}).labels is None
    True

    Raises:
        ValueError: for a path outside the trusted packages, one that leads nowhere, or arguments that do
            not fit.
    """
    if isinstance(node, Mapping):
        inner = {key: build(value, trusted=trusted) for key, value in node.items() if key != COMPONENT}
        if COMPONENT not in node:
            return inner
        path = node[COMPONENT]
        component = resolve(path, trusted=trusted)
        arguments = {**inner, **kwargs}
        try:
            inspect.signature(component).bind(*args, **arguments)
        except TypeError as error:
            raise ValueError(f"{path}: {error}; it was given {sorted(arguments)}") from None
        return component(*args, **arguments)
    if isinstance(node, list | tuple):
        return [build(value, trusted=trusted) for value in node]
    return node


def resolve(path: str, *, trusted: Collection[str] = ()) -> Any:
    """The class or function that a dotted path names.

    Raises:
        ValueError: if its package is not trusted, or there is no such thing.
    """
    allowed = (*TRUSTED, *trusted)
    root, *_ = str(path).split(".")
    if root not in allowed or "." not in str(path):
        raise ValueError(
            f"_component_ {path!r} is outside the trusted packages ({', '.join(allowed)}); "
            "if you trust it, add its package to trusted_packages in the config"
        )
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
            return found
        break
    raise ValueError(f"_component_ {path!r} leads to nothing that can be called; check the spelling")
