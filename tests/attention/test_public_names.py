"""transformers' next release may change what is private: one file of ours uses it, all others public names only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from torch import nn

import streampack

transformers = pytest.importorskip("transformers")

PRIVATE = Path("attention", "pretrained.py")
FOLDER = Path(streampack.__file__).parent


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield file.relative_to(FOLDER), node


def test_names_that_are_imported_are_public_and_there() -> None:
    imported = {
        (node.module, name.name)
        for _, node in nodes()
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for name in node.names
    }
    assert ("transformers", "AttentionInterface") in imported
    assert not [pair for pair in imported if any(part.startswith("_") for part in ".".join(pair).split("."))]
    assert not [(module, name) for module, name in imported if not hasattr(import_module(module), name)]


def test_private_attributes_of_models_are_used_in_one_file_which_says_why() -> None:
    known = {
        name
        for kind in (
            transformers.PreTrainedModel,
            transformers.PreTrainedConfig,
            transformers.GenerationMixin,
        )
        for name in dir(kind)
        if name.startswith("_") and not name.startswith("__") and not hasattr(nn.Module, name)
    }
    used: dict[Path, set[str]] = {}
    for file, node in nodes():
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if isinstance(node, ast.Attribute) and node.attr in known and not own:
            used.setdefault(file, set()).add(node.attr)
    assert used.keys() == {PRIVATE}
    explained = ast.get_docstring(ast.parse((FOLDER / PRIVATE).read_text(encoding="utf-8"))) or ""
    assert {name for name in used[PRIVATE] if f"{name}``" not in explained} == set()
