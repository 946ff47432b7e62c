"""Tables in docs/ that are made from the code: keys of a config, components.

``python -m docs.tables`` writes them between their marks; tests/test_docs.py compares them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import streampack
from streampack.training.config import REQUIRED, RunConfig, Validation

DOCS = Path(__file__).resolve().parent
PASSED_BY_RECIPES = {"self", "source", "encoder", "tokenizer", "epochs", "vocab_size", "padding_idx"}
WORDS = {
    "text": ("str", "Name"),
    "whole number": ("int",),
    "number": ("float",),
    "`true` or `false`": ("bool",),
    "mapping": (
        "Node",
        "Validation",
        "Storage",
        "Mapping[str, Any]",
        "Mapping[str, str]",
        "Callable[[Mapping[str, Any]], Any]",
    ),
    "`true` or `false`, number, text or mapping": ("SkipBad",),
    "any": ("Any",),
    "list": ("Iterable[Name]", "Sequence[str]", "list[str]", "Sequence[Mapping[str, Any] | Entry]"),
    "": ("None", "PathLike[str]", "os.PathLike[str]"),
}
TYPES = {annotation: word for word, annotations in WORDS.items() for annotation in annotations}


def documented(docstring: str, section: str) -> dict[str, str]:
    """Return the entries of a Google-style section of a docstring, each as one line.

    >>> documented("Do.\\n\\nArgs:\\n    a: one\\n        thing.\\n\\n    b: two.\\n\\nRaises:\\n    x: y", "Args")
    {'a': 'one thing.', 'b': 'two.'}
    """
    text = inspect.cleandoc(docstring).partition(f"\n{section}:\n")[2]
    entries: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        if begins := re.match(r"    (\w+): (.*)", line):
            name = begins[1]
            entries[name] = begins[2]
        elif line.strip():
            entries[name] += f" {line.strip()}"
    return entries


def plain_type(annotation: str) -> str:
    """Return a type as a reader of YAML knows it.

    >>> plain_type("int | None"), plain_type("Name | Iterable[Name] | None")
    ('whole number', 'text or list')
    """
    whole = TYPES.get(annotation)
    parts = [annotation] if whole is not None else annotation.split(" | ")
    return " or ".join(dict.fromkeys(TYPES[part] for part in parts if TYPES[part]))


def plain_default(value: Any) -> str:
    """Return a default as YAML writes it; nothing for a key that has none."""
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or not isinstance(value, bool | int | float | str):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def keys(callable_: Callable[..., Any], section: str = "Args") -> list[list[str]]:
    """Return a row for each argument: name, type, default and meaning, which the docstring must have."""
    meanings = documented(callable_.__doc__ or "", section)
    rows = []
    for name, parameter in inspect.signature(callable_).parameters.items():
        if section == "Attributes" or name not in PASSED_BY_RECIPES:
            default = parameter.default
            if repr(default) == "<factory>":
                default = inspect.Parameter.empty if name in REQUIRED else None
            meaning = meanings[name].replace("``", "`")
            rows.append([f"`{name}`", plain_type(str(parameter.annotation)), plain_default(default), meaning])
    return rows


HEAD = ["key", "type", "default", "meaning"]
SOURCES = (
    *("JSONLSource", "ParquetSource", "HFSource", "TokenShardSource", "MDSSource"),
    *("TextSource", "ArrowSource", "WebDatasetSource"),
    *("MegatronSource", "DatatroveSource", "FlatTokensSource"),
)
ENCODERS = (
    "ShapeEncoder",
    "TextEncoder",
    "ChatEncoder",
    "AnswersEncoder",
    "MessagesEncoder",
    "TokensEncoder",
)


def components(names: Iterable[str]) -> str:
    """Return one table of several classes, with the name of a class in the row of its first argument.

    Arguments whose docstring only refers to another class are skipped.
    """
    rows = []
    for name in names:
        own = [row for row in keys(getattr(streampack, name)) if not row[-1].startswith("see ")]
        for number, row in enumerate(own):
            rows.append(["" if number else f"**{name}**", *row])
    return table(["streampack.", *HEAD], rows)


def tables() -> dict[tuple[str, str], str]:
    """Return all tables, by page and name."""
    made = {
        "run": table(HEAD, keys(RunConfig, "Attributes")),
        "validation": table(HEAD, keys(Validation, "Attributes")),
        "data": table(HEAD, keys(streampack.IterablePackedDataset)),
        "sources": components(SOURCES),
        "encoders": components(ENCODERS),
        "tokenizer": components(["HFTokenizer"]),
    }
    return {("reference/config.md", name): content for name, content in made.items()}


def put(text: str, name: str, content: str) -> str:
    """Return a page's text with the content between the marks of a table."""
    pattern = re.compile(rf"(<!-- table: {name} -->\n\n).*?(\n*<!-- end -->)", re.DOTALL)
    found = pattern.findall(text)
    assert len(found) == 1, f"the page has {len(found)} marks <!-- table: {name} --> ... <!-- end -->"
    return pattern.sub(lambda match: f"{match[1]}{content}\n\n<!-- end -->", text)


def main() -> None:
    for (page, name), content in tables().items():
        path = DOCS / page
        path.write_text(put(path.read_text(encoding="utf-8"), name, content), encoding="utf-8")


if __name__ == "__main__":
    main()
