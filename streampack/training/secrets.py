"""A config for pages and loggers, without what may be secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OPTIONS = ("options", "storage_options")  # arguments of storages, which may hold secrets


def shown(config: Any) -> Any:
    """Return a config, OmegaConf's, for pages and loggers: without what may be secret.

    Values of the environment stay references. The ``options`` of a storage are hidden, and so are the
    ``storage_options`` that other libraries' components take, such as `datasets.load_dataset`.

    >>> from streampack.training.checks import to_plain
    >>> config = {"data": {"storage": {"options": {"key": "abc"}}, "paths": "${oc.env:HOME}/a"}, "output_dir": "out"}
    >>> to_plain(shown(config))["data"]
    {'storage': {'options': {'key': '(not shown)'}}, 'paths': '${oc.env:HOME}/a'}
    >>> to_plain(shown({"data": {"storage_options": {"key": "abc"}}, "output_dir": "out"}))["data"]
    {'storage_options': {'key': '(not shown)'}}
    """
    from omegaconf import OmegaConf

    config = OmegaConf.create(config)
    found = OmegaConf.create(without_secrets(OmegaConf.to_container(config, resolve=False)))
    found.output_dir = config.output_dir  # where loggers write
    return found


def without_secrets(node: Any, *, hide: bool = False) -> Any:
    """Return plain values with those of `OPTIONS` replaced, and of the environment escaped for OmegaConf."""
    if isinstance(node, Mapping):
        return {key: without_secrets(value, hide=hide or key in OPTIONS) for key, value in node.items()}
    if isinstance(node, list):
        return [without_secrets(value, hide=hide) for value in node]
    if isinstance(node, str) and "${" in node and ":" in node:  # of a resolver, such as oc.env
        node = re.sub(r"\\*\$\{", r"\\${", node)
    return "(not shown)" if hide else node
