"""Arguments of commands, and the types of their values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from typing_extensions import override

from streampack.catalog import UsageError


class Parser(argparse.ArgumentParser):
    """A parser of one command's words, which raises `UsageError`."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` shows how it is used")


class Word(NamedTuple):
    """An argument of a command, with the names of argparse; one without a ``metavar`` is a flag."""

    name: str
    metavar: str | None
    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    required: bool | None = None
    choices: Sequence[str] | None = None
    nargs: str | None = None
    action: str | None = None

    def add(self, parser: Parser) -> None:
        """Add it to a parser."""
        settings = {
            key: value for key, value in self._asdict().items() if value is not None and key != "name"
        }
        if self.metavar is None:
            settings["action"] = "store_true"
        parser.add_argument(self.name, **settings)


def positive(word: str) -> int:
    """Return a number from 1 on."""
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 on")
    return int(word)


def ranks(word: str) -> list[int]:
    """Return numbers such as ``8,64``."""
    return list(dict.fromkeys(map(positive, word.split(","))))


def shard(word: str) -> tuple[int, int]:
    """Return a shard's number and how many there are: ``0/8``."""
    index, _, count = word.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is no shard; write I/N, such as 0/8")
    return int(index), int(count)


def json_object(word: str) -> dict[str, Any]:
    """Return a mapping that is written as JSON."""
    try:
        found = json.loads(word)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("it is no JSON object; write such as '{\"anon\": true}'")
    return found
