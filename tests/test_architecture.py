"""The architecture: which module may import which, and what is public."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "streampack"

# Imports point up this list only, to what comes earlier in a token's way: a unit (a folder of streampack with all that
# is in it, or a module beside them) imports from the lines above its own. `streampack` is the package's own __init__.
LAYERS = (
    {"types"},
    {"validation"},
    {"fingerprint", "instantiate", "accounting", "catalog"},
    {"storage"},
    {"sources"},
    {"packing"},
    {"streaming"},
    {"distributed"},
    {"loader"},
    {"map_style"},
    {"attention", "losses"},
    {"tokenize", "scoring"},
    {"integrations"},
    {"streampack"},
    {"training"},
    {"inspection"},
    {"tune_cli", "recipes"},
    {"cli"},
    {"__main__"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}

# What `import streampack` must not need: the extras.
EXTRAS = [
    *(
        "torchtune",
        "torchao",
        "torchdata",
        "omegaconf",
        "tqdm",
        "yaml",
        "sentencepiece",
        "tokenizers",
    ),  # tune
    *("transformers", "datasets", "accelerate", "pyarrow"),  # hf
    *("flash_attn", "fsspec", "s3fs", "zstandard", "trl", "grain", "rich", "lm_eval"),
    *("torchtitan", "tyro"),  # the others
]

# Modules of subclasses of an extra's classes; others import them within functions.
SUBCLASSES = {
    "streampack/scoring/pack_cache.py": "transformers' caches",
    "streampack/integrations/lm_eval/__init__.py": "imports model.py",
    "streampack/integrations/lm_eval/__main__.py": "imports model.py",
    "streampack/integrations/lm_eval/model.py": "lm_eval's model for Hugging Face",
    "streampack/integrations/torchtitan/__init__.py": "imports data_loader.py",
    "streampack/integrations/torchtitan/data_loader.py": "torchtitan's loader",
}


def unit_of(path: Path) -> str:
    """The unit that a file belongs to: streampack/sources/jsonl.py -> sources, recipes/pretrain.py -> recipes."""
    place = path.relative_to(ROOT).with_suffix("").parts
    if place[0] != "streampack":
        return place[0]
    return "streampack" if place[1] == "__init__" else place[1]


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a source text, those in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def target_unit(name: str) -> str | None:
    """The unit that an imported name lives in, None for other people's."""
    root, *rest = name.split(".")
    if root in ("streampack_recipes", "streampack_configs", "recipes", "configs", "benchmarks", "tests"):
        return "recipes"  # nothing is above it, so nobody else may
    if root != "streampack":
        return None
    return rest[0] if rest and (rest[0] in LEVEL or (PACKAGE / f"{rest[0]}.py").exists()) else "streampack"


def violations(source: str, *, unit: str, package: str) -> list[str]:
    found = []
    for line, name in imported(source, package):
        target = target_unit(name)
        if target is None or target == unit:
            continue
        if LEVEL.get(target, len(LAYERS)) >= LEVEL.get(unit, -1):
            found.append(f"line {line}: {unit} imports {name}, of {target}")
    return found


def own_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_module_has_a_layer() -> None:
    without = [str(path.relative_to(ROOT)) for path in own_files() if unit_of(path) not in LEVEL]
    assert not without, f"in no layer of LAYERS: {without}"
    assert sum(map(len, LAYERS)) == len(LEVEL), "a unit stands in two layers"


def test_imports_point_downward() -> None:
    found = {}
    for path in own_files():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        found[str(path)] = violations(path.read_text(encoding="utf-8"), unit=unit_of(path), package=package)
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("unit", "package", "source"),
    [
        ("packing", "streampack.packing", "from streampack.streaming.lane import Lane"),
        ("packing", "streampack.packing", "from ..streaming.lane import Lane"),
        ("packing", "streampack.packing", "def f():\n    from streampack import streaming"),
        (  # its own layer
            "accounting",
            "streampack",
            "if TYPE_CHECKING:\n    from streampack.fingerprint import digest",
        ),
        ("streaming", "streampack.streaming", "from streampack import IterablePackedDataset"),
        ("sources", "streampack.sources", "from ..packing.encoders import Encoder"),
        ("tune_cli", "streampack", "import streampack_recipes.full_finetune"),
    ],
)
def test_an_import_upward_is_seen(unit: str, package: str, source: str) -> None:
    assert len(violations(source, unit=unit, package=package)) == 1


@pytest.mark.parametrize(
    ("unit", "package", "source"),
    [
        ("streaming", "streampack.streaming", "from streampack.packing.planner import plan_packs"),
        (
            "sources",
            "streampack.sources",
            "from .base import Source\nfrom streampack.sources.base import Reading",
        ),
        ("recipes", "recipes", "from streampack import training\nimport streampack_recipes.stdlib_corpus"),
        ("packing", "streampack.packing", "import torch, numpy as np"),
    ],
)
def test_an_import_downward_is_free(unit: str, package: str, source: str) -> None:
    assert violations(source, unit=unit, package=package) == []


def test_nobody_imports_the_name_recipes() -> None:
    """torchtune installs a package of that name whose import raises: ours would be found from this folder only.

    Nor relatively: a recipe runs as a file, which has no package.
    """
    for path in own_files():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        names = [name for _, name in imported(path.read_text(encoding="utf-8"), package)]
        assert not [name for name in names if name.split(".")[0] == "recipes"], path


def test_the_core_imports_without_any_extra() -> None:
    core = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
        if unit_of(path) != "training" and str(path.relative_to(ROOT)) not in SUBCLASSES
    ]
    code = f"""
import importlib, sys
for name in {EXTRAS}:
    sys.modules[name] = None  # importing it raises ImportError
for name in {core}:
    importlib.import_module(name)
print("imported")
"""
    assert run_python(code) == "imported\n"


def test_all_is_sorted_and_documented() -> None:
    import streampack

    names = streampack.__all__
    assert names, "nothing is public"
    # The order that ruff keeps: CONSTANTS, Classes, functions.
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(names) == len(set(names))
    undocumented = [name for name in names if not is_documented(name, getattr(streampack, name))]
    assert not undocumented, f"public and without a docstring of their own: {undocumented}"


def test_dir_and_help_show_what_is_public_and_load_no_extra() -> None:
    """Names are looked up in their modules when they are used."""
    code = """
import contextlib, io, pydoc, streampack, sys
print(sorted(set(streampack.__all__) - set(dir(streampack))), "torch" in sys.modules)
text = pydoc.plain(pydoc.render_doc(streampack))
print([name for name in streampack.__all__ if name not in text])
print("class IterablePackedDataset(" in text, "prepare_model_for_packing(model" in text)
print([name for name in ("torchtune", "transformers", "datasets") if name in sys.modules])
"""
    assert run_python(code).splitlines() == ["[] False", "[]", "True True", "[]"]


def test_one_version() -> None:
    from streampack import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "streampack.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


# Requirements of extras that we do not import, and who needs them.
NEEDED_BY = {
    "torchao": "torchtune", "torchdata": "torchtune", "accelerate": "transformers' Trainer", "aiohttp": "fsspec",
    "s3fs": "fsspec", "moto": "a process of its own", "sphinx": "make docs", "myst-parser": "sphinx",
    "furo": "sphinx", "sphinx-copybutton": "sphinx", "flask": "moto", "flask-cors": "moto", "pytest-xdist": "pytest",
    "flash-linear-attention": "transformers' layers", "causal-conv1d": "transformers' layers",
    "ruff": "make lint", "mypy": "make lint", "flash-attn": "streampack.attention.flash, by name",
}  # fmt: skip


def test_no_extra_names_what_nothing_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {re.split(r"[<>=\[]", each)[0] for extra in extras.values() for each in extra}
    folders = ("streampack", "recipes", "tests", "benchmarks", "examples", "stress")
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    seen = {name.split(".")[0] for text in texts for _, name in imported(text, "streampack")}
    seen |= {
        name
        for text in texts
        for name in re.findall(r"(?:import_module|importorskip|find_spec)\(\"(\w+)", text)
    }
    assert {name for name in wanted - set(NEEDED_BY) if name.replace("-", "_") not in seen} == set()


def is_documented(name: str, value: object) -> bool:
    if inspect.isclass(value) or inspect.isroutine(value):
        doc = value.__doc__ or ""
        return bool(doc) and not doc.startswith(f"{name}(")  # what a dataclass writes for itself
    # A constant cannot carry one: a string or a comment stands beside its definition.
    beside = re.compile(rf"^{name}\b[^\n]* = [^\n]*(#|\n\"\"\")", re.MULTILINE)
    return any(beside.search(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))


def test_a_missing_docstring_is_seen() -> None:
    from dataclasses import dataclass

    @dataclass
    class Bare:
        x: int

    def bare() -> None: ...

    assert not is_documented("Bare", Bare)
    assert not is_documented("bare", bare)
    assert not is_documented("NO_SUCH_CONSTANT", 3)
    assert is_documented("unit_of", unit_of)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports in functions count as well: a circle that is broken so is still one for a reader."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {
        name: {target for _, imported_name in imported(path.read_text(encoding="utf-8"), name) for target in
               [module_of(imported_name, modules)] if target and target != name and not is_init(path)}
        for name, path in modules.items()
    }  # fmt: skip
    assert circles(graph) == []


def is_init(path: Path) -> bool:
    return path.name == "__init__.py"


def module_of(name: str, modules: dict[str, Path]) -> str | None:
    """The module that an imported name lies in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that can be reached from themselves."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return seen

    return sorted(node for node in graph if node in reach(node))


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert set(listed) == folders | {"streampack_recipes", "streampack_configs"}


def test_the_transformers_that_is_promised_is_the_one_that_is_tested() -> None:
    """Its internals change with every release: masks, caches, the names of Trainer's methods."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [promised] = [package for package in extras["hf"] if package.startswith("transformers")]
    [tested] = re.findall(r"^transformers==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert promised == f"transformers>={tested}"
