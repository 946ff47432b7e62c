"""How a recipe is called: its config from a file and ``KEY=VALUE`` words, and its errors.

An error of ours is one line; all others have a traceback, as all have with ``--traceback``.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from streampack.catalog import UsageError, add_config_words, configs, file_of
from streampack.instantiate import COMPONENT
from streampack.training.checkpoint import CheckpointError
from streampack.training.run_folder import Interrupted
from streampack.validation import did_you_mean, raised_here

MISTAKES = (OmegaConfBaseException, yaml.YAMLError, CheckpointError)
"""Errors shown by their message only, as those are that `raised_here` finds."""
MOST_NESTED = 50
"""Levels of the deepest config."""
TEXT_KEY = "max_filename"
"""A key of torchtune's checkpointers whose value stays text, because its leading zeros count."""


def parse(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Decorate a recipe's entry point, to call it with the config of ``--config CONFIG KEY=VALUE ...``.

    Like torchtune's ``config.parse``, which takes no names, and fails on entries of lists and on values with a ``=``.
    For errors see `shown_errors`.
    """

    @functools.wraps(recipe_main)
    def entry() -> Any:
        parser = argparse.ArgumentParser(description=recipe_main.__doc__, allow_abbrev=False)
        add_config_words(parser, required=True)
        parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
        options, rest = parser.parse_known_args()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no UTF-8
        with shown_errors(tracebacks=options.traceback):
            sys.exit(recipe_main(read_named(options.config, [*options.overrides, *rest])))

    return entry


def read_named(name: str, overrides: Iterable[str]) -> DictConfig:
    """Return the content of a config, which is named by a path, by our name or by torchtune's, with overrides.

    Raises:
        UsageError: for an unknown name, for a bad override, and for a file that is no YAML mapping, is not UTF-8, or is
            nested deeper than any config: a parser in C would end the process on it, without an error.
    """
    path = file_of("config", name, configs())
    try:
        with path.open(encoding="utf-8") as file:
            depth = 0
            for event in yaml.parse(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > MOST_NESTED:
                    raise UsageError(f"{path} is nested deeper than {MOST_NESTED} levels; a config needs few")
        content = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (at byte {error.start}); save it as UTF-8") from None
    except (yaml.YAMLError, OSError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, DictConfig):
        raise UsageError(f"{path} holds a list; a config is a mapping of keys to values")
    return with_overrides(content, overrides)


@contextmanager
def shown_errors(*, tracebacks: bool = False) -> Iterator[None]:
    """End the process on an error in the block: one line and an exit status.

    The status is that of a signal, see `Interrupted`, 2 for a wrong command line, otherwise 1. An error that is not the
    user's keeps its traceback; with ``tracebacks`` all do.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        # Python would end with the status of a SIGINT, whatever the signal was.
        if tracebacks:
            traceback.print_exc()
        else:
            print(str(error) or "interrupted", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(error.status if isinstance(error, Interrupted) else 130)
    except Exception as error:
        if tracebacks or not (isinstance(error, MISTAKES) or raised_here(error)):
            get_error_handler().record_exception(error)
            raise
        rank = int(os.environ.get("RANK", 0))
        text = f"error{f' (rank {rank})' * (rank > 0)}: {message_of(error)} (--traceback shows where)"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(2 if isinstance(error, UsageError) else 1)


def message_of(error: BaseException) -> str:
    """Return an error's message for users, with its one-line notes.

    >>> message_of(FileNotFoundError(2, "No such file or directory", "my.yaml"))
    'No such file or directory: my.yaml'
    """
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    elif isinstance(error, OmegaConfBaseException):
        text = str(error).partition("\n")[0]
    elif isinstance(error, yaml.YAMLError):
        text = " ".join(str(error).split())
    else:
        text = str(error) or type(error).__name__
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return " ".join([text, *notes])


def with_overrides(config: Any, words: Iterable[str]) -> DictConfig:
    """Return a copy of a config with overrides: ``KEY=VALUE`` sets a key, ``~KEY`` removes it.

    >>> config = OmegaConf.create({"sources": [{"weight": 1}, {"weight": 2}], "lr": 0.1})
    >>> OmegaConf.to_container(with_overrides(config, ["sources.1.weight=3", "~lr"]))
    {'sources': [{'weight': 1}, {'weight': 3}]}

    A value is YAML. ``model=torchtune.models.llama2.llama2`` names the component of the node ``model``.
    """
    merged: DictConfig = OmegaConf.create(config).copy()
    for word in words:
        key, equals, value = word.partition("=")
        if not key.strip("~") or key.startswith("-") or (not equals and not key.startswith("~")):
            raise UsageError(f"{word!r} is no override; write KEY=VALUE, or ~KEY to remove one")
        if key.startswith("~"):
            _remove(merged, key[1:])
        else:
            _set(merged, key, value)
    return merged


def _set(config: Any, key: str, value: str) -> None:
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except Exception as error:  # the YAML parser raises errors of its own
        raise UsageError(f"{key}: {value!r} is not YAML: {' '.join(str(error).split())}") from None
    parsed = None if value == "None" else value if TEXT_KEY in key else values["value"]  # type: ignore[call-overload, index]
    node = OmegaConf.to_container(config, resolve=False).get(key)  # type: ignore[union-attr]
    if isinstance(parsed, str) and isinstance(node, dict) and COMPONENT in node:
        key = f"{key}.{COMPONENT}"
    try:
        OmegaConf.update(config, key, parsed, force_add=True)
    except (OmegaConfBaseException, TypeError) as error:  # a list has no such entry
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{key}: {reason}; an entry of a list is named by its number, from 0") from None


def _remove(config: Any, key: str) -> None:
    above, _, last = key.rpartition(".")
    node = OmegaConf.select(config, above) if above else config
    if isinstance(node, ListConfig) and last.isdecimal() and int(last) < len(node):
        del node[int(last)]
    elif isinstance(node, DictConfig) and last in node:
        del node[last]
    else:
        known = map(str, node) if isinstance(node, DictConfig) else ()
        raise UsageError(f"~{key}: there is no such key to remove{did_you_mean(last, known)}")
