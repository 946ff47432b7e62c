"""Check the ``_component_`` nodes of a config against the signatures of their components; nothing is called."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from streampack.instantiate import COMPONENT, refuse_code, resolve
from streampack.validation import unknown_arguments

# What a value of a YAML file may be for each plain type.
PLAIN_TYPES = {bool: (bool,), int: (int,), float: (int, float), str: (str, Path)}


def config_node_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of all nodes of a config.

    A node that another key repeats by interpolation (``model: ${model}``) is checked once, under its own key.
    """
    nodes = [node for node in values.values() if isinstance(node, Mapping)]
    for key, node in values.items():
        yield from node_problems(node, key, elsewhere=nodes)


def node_problems(node: Any, where: str, *, elsewhere: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
    """Yield the problems of a node and of those in it: components, and names and types of their arguments.

    Args:
        node: the value of the dotted key ``where``.
        where: the key with which every problem begins.
        elsewhere: nodes that are skipped when they occur within this one.
    """
    if isinstance(node, list):
        for number, item in enumerate(node):
            if item not in elsewhere:
                yield from node_problems(item, f"{where}.{number}", elsewhere=elsewhere)
    if not isinstance(node, Mapping):
        return
    arguments = {key: value for key, value in node.items() if key != COMPONENT}
    try:
        refuse_code(arguments)
        if COMPONENT in node:
            component = resolve(node[COMPONENT])
            # Missing arguments are no problem: the recipe adds tokenizers, optimizers, ...
            for problem in unknown_arguments(component, arguments):
                yield f"{where}: {node[COMPONENT]}: {problem}"
            for key, value in type_problems(component, arguments):
                yield f"{where}.{key}: {value}"
    except (ValueError, ImportError) as error:
        yield f"{where}: {error}"
    for key, value in arguments.items():
        if value not in elsewhere:
            yield from node_problems(value, f"{where}.{key}", elsewhere=elsewhere)


def type_problems(
    component: Any, arguments: Mapping[str, Any], *, name: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for values that do not fit a component's annotations; ``name`` is for the message.

    >>> def f(lr: float, layers: list[str] | None = None): ...
    >>> list(type_problems(f, {"lr": "abc", "layers": ["q"]}))
    [('lr', "'abc' is a str; f takes float")]
    """
    component = getattr(component, "func", component)
    function = component.__init__ if inspect.isclass(component) else component
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # annotations that cannot be resolved say nothing
        return
    for key, value in arguments.items():
        if key in hints and not fits(value, hints[key]):
            wanted = getattr(hints[key], "__name__", "") if isinstance(hints[key], type) else ""
            wanted = wanted or str(hints[key]).replace("typing.", "")
            given = (
                "the value" if key in ("storage", "storage_options") else repr(value)
            )  # which may be a secret
            yield key, f"{given} is a {type(value).__name__}; {name or component.__qualname__} takes {wanted}"


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value of a YAML file can be of a type; True where that cannot be decided."""
    if value is None or (isinstance(value, Mapping) and COMPONENT in value):
        return True  # None fits every type, because many arguments that may be None are not annotated so
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return False
    if origin in (Union, types.UnionType):
        # A YAML file cannot hold a tensor, so in a union such as ``float | Tensor`` only the plain types count.
        if any(each in PLAIN_TYPES for each in args) and not isinstance(value, Mapping):
            args = tuple(
                each
                for each in args
                if each in (*PLAIN_TYPES, Any, list, dict) or get_origin(each) is not None
            )
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return value in args
    if hint in PLAIN_TYPES:
        return isinstance(value, PLAIN_TYPES[hint]) and (hint is bool or not isinstance(value, bool))
    container = origin or hint
    if container in (list, tuple) or (origin is not None and _is_subclass(origin, Sequence)):
        inner = [each for each in args if each is not Ellipsis] or [Any]
        return isinstance(value, list) and all(any(fits(item, each) for each in inner) for item in value)
    if container is dict or (origin is not None and _is_subclass(origin, Mapping)):
        return isinstance(value, Mapping)
    return True


def _is_subclass(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)
