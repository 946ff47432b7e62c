"""Read a config from a file and from ``KEY=VALUE`` on the command line, also for entries of lists."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from streampack.instantiate import COMPONENT, trust
from streampack.training.errors import TRACEBACK, shown_errors
from streampack.validation import did_you_mean

TEXT_KEY = "max_filename"
"""A key of torchtune's checkpointers whose value stays text, because its leading zeros count."""


def parse(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Decorate a recipe's entry point, to call it with the config of ``--config FILE KEY=VALUE ...``.

    Like torchtune's ``config.parse``, which fails on entries of lists and on values with a ``=``. A user's mistake is
    shown in one line, see `shown_errors`; ``--traceback`` shows where it was raised.
    """

    @functools.wraps(recipe_main)
    def entry() -> Any:
        parser = argparse.ArgumentParser(description=recipe_main.__doc__, allow_abbrev=False)
        parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file")
        parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replaces a value of the file")
        parser.add_argument(
            "--trust", action="append", default=[], metavar="NAME", help="a package it may name"
        )
        parser.add_argument(
            "--traceback", action="store_true", help=f"show where an error was raised; or set {TRACEBACK}=1"
        )
        options, rest = parser.parse_known_args()
        with shown_errors(tracebacks=options.traceback):
            trust(options.trust)
            with Path(options.config).open(encoding="utf-8") as file:
                written = OmegaConf.load(file)
            sys.exit(recipe_main(with_overrides(written, [*options.overrides, *rest])))

    return entry


def with_overrides(config: Any, words: Iterable[str]) -> Any:
    """Return a copy of a config with overrides: ``KEY=VALUE`` sets a key, ``~KEY`` removes it.

    >>> config = OmegaConf.create({"sources": [{"weight": 1}, {"weight": 2}], "lr": 0.1})
    >>> OmegaConf.to_container(with_overrides(config, ["sources.1.weight=3", "~lr"]))
    {'sources': [{'weight': 1}, {'weight': 3}]}

    A value is YAML. ``model=torchtune.models.llama2.llama2`` names the component of the node ``model``.

    Raises:
        ValueError: for a word that is no override, or an entry that a list does not have.
    """
    merged = OmegaConf.create(config).copy()
    for word in words:
        key, equals, value = word.partition("=")
        if not key.strip("~") or key.startswith("-") or (not equals and not key.startswith("~")):
            raise ValueError(f"{word!r} is no override; write KEY=VALUE, or ~KEY to remove one")
        if key.startswith("~"):
            _remove(merged, key[1:])
        else:
            _set(merged, key, value)
    return merged


def _set(config: Any, key: str, value: str) -> None:
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except Exception as error:  # the YAML parser raises errors of its own
        raise ValueError(f"{key}: {value!r} is not YAML: {' '.join(str(error).split())}") from None
    parsed = None if value == "None" else value if TEXT_KEY in key else values["value"]  # type: ignore[call-overload, index]
    node = OmegaConf.to_container(config, resolve=False).get(key)  # type: ignore[union-attr]
    if isinstance(parsed, str) and isinstance(node, dict) and COMPONENT in node:
        key = f"{key}.{COMPONENT}"
    try:
        OmegaConf.update(config, key, parsed, force_add=True)
    except (OmegaConfBaseException, TypeError) as error:  # a list has no such entry
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{key}: {reason}; an entry of a list is named by its number, from 0") from None


def _remove(config: Any, key: str) -> None:
    above, _, last = key.rpartition(".")
    node = OmegaConf.select(config, above) if above else config
    if isinstance(node, ListConfig) and last.isdecimal() and int(last) < len(node):
        del node[int(last)]
    elif isinstance(node, DictConfig) and last in node:
        del node[last]
    else:
        known = map(str, node) if isinstance(node, DictConfig) else ()
        raise ValueError(f"~{key}: there is no such key to remove{did_you_mean(last, known)}")
