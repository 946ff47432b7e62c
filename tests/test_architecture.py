"""The architecture: which module may import which, what an import needs, and what is public."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import streampack

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "streampack"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Imports point up this list only, to what comes earlier in a token's way: a unit (a folder of streampack with all that
# is in it, or a module beside them) imports from the lines above its own. `streampack` is the package's own __init__.
LAYERS = (
    "types", "validation", "fingerprint instantiate accounting", "storage", "sources", "packing", "distributed",
    "lanes", "streaming", "loader", "map_style", "attention", "losses", "tokenize scoring", "integrations",
    "streampack",
    "catalog", "training", "inspection", "launch recipes", "cli", "__main__",
)  # fmt: skip
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units.split()}
RECIPES = (
    "streampack_recipes", "streampack_configs", "streampack_examples", "examples", "recipes", "configs", "benchmarks",
    "tests",
)  # fmt: skip

# What `import streampack` must not need: what the extras bring.
EXTRAS = [
    "torchtune", "torchao", "torchdata", "omegaconf", "tqdm", "yaml", "sentencepiece", "tokenizers", "transformers",
    "datasets", "accelerate", "pyarrow", "flash_attn", "fsspec", "s3fs", "zstandard", "trl", "grain", "rich", "lm_eval",
    "torchtitan", "tyro", "PIL",
]  # fmt: skip
# Modules of subclasses of an extra's classes; others import them within functions.
SUBCLASSES = ("map_style/of_torchtune.py", "integrations/lm_eval", "integrations/torchtitan")


def name_of(path: Path) -> str:
    """The dotted name of a module: streampack/sources/__init__.py -> streampack.sources."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(source: str, package: str) -> Iterator[str]:
    """The dotted name of every import in a source text, those in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def unit_of(name: str) -> str | None:
    """The unit that a dotted name lives in, None for other people's."""
    root, *rest = name.split(".")
    if root in RECIPES:
        return "recipes"
    if root != "streampack":
        return None
    return rest[0] if rest and rest[0] in LEVEL else "streampack"


def upward(source: str, *, unit: str, package: str) -> list[str]:
    """The imports of a text that point down the list of layers, or to another unit of the same layer."""
    targets = {name: unit_of(name) for name in imported(source, package)}
    return [name for name, to in targets.items() if to not in (None, unit) and LEVEL[to] >= LEVEL[unit]]


def own_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])


def test_imports_point_to_earlier_layers() -> None:
    for path in own_files():
        place = path.relative_to(ROOT).with_suffix("").parts
        unit = place[0] if place[0] != "streampack" else place[1].replace("__init__", "streampack")
        assert unit in LEVEL, f"{path} is in no layer of LAYERS"
        source, package = path.read_text(encoding="utf-8"), ".".join(place[:-1])
        assert upward(source, unit=unit, package=package) == [], path
        # torchtune installs a package `recipes` whose import raises: ours would be found from this folder only.
        assert "recipes" not in {name.split(".")[0] for name in imported(source, package)}, path


def circles(graph: dict[str, set[str]]) -> set[str]:
    """Nodes on a circle, or between two: what is left after those without targets or sources are removed."""
    left = dict(graph)
    while True:
        targets = set().union(*left.values()) if left else set()
        kept = {node: to & left.keys() for node, to in left.items() if to & left.keys() and node in targets}
        if kept == left:
            return set(left)
        left = kept


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports in functions count as well: a circle that is broken so is still one for a reader."""
    modules = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    graph = {}
    for name, path in modules.items():
        targets = list(imported(path.read_text(encoding="utf-8"), name.rpartition(".")[0]))
        targets += [target.rpartition(".")[0] for target in targets]
        graph[name] = {target for target in targets if target in modules and target != name}
    assert circles(graph) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_core_imports_without_any_extra_and_help_shows_what_is_public() -> None:
    """Names are looked up in their modules when they are used."""
    excluded = ("training", *SUBCLASSES)
    core = [
        name_of(path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(excluded)
    ]
    code = f"""
import importlib, pydoc, sys
sys.modules |= dict.fromkeys({EXTRAS})  # importing one raises ImportError
import streampack
print(sorted(set(streampack.__all__) - set(dir(streampack))), "torch" in sys.modules)
text = pydoc.plain(pydoc.render_doc(streampack))
print([name for name in streampack.__all__ if name not in text])
print("class IterablePackedDataset(" in text, "prepare_model_for_packing(model" in text)
for name in {core}:
    importlib.import_module(name)
"""
    assert run_python(code).splitlines() == ["[] False", "[]", "True True"]


@pytest.mark.parametrize("name", streampack.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    value: Any = getattr(streampack, name)
    assert name in vars(streampack), "an encoder that names it for each row would search for it each time"
    if inspect.isclass(value) or inspect.isroutine(value):
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), "that is what a dataclass writes for itself"
    else:  # a constant cannot carry one: a string or a comment is beside its definition
        beside = re.compile(rf"^{name}\b[^\n]* = [^\n]*(#|\n\"\"\")", re.MULTILINE)
        assert any(beside.search(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))


def test_every_package_is_installed_in_one_version() -> None:
    folders = {name_of(path) for path in PACKAGE.rglob("__init__.py")}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert set(listed) == folders | {"streampack_recipes", "streampack_configs", "streampack_examples"}
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "streampack.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", streampack.__version__)


@pytest.mark.parametrize(
    ("page", "listing"),
    [
        ("CONTRIBUTING.md", r"one folder for each stage: (.*?)\."),
        ("docs/architecture.md", r"\n## Folders\n(.*?)\n\nThe core needs"),
    ],
)
def test_pages_list_the_folders_in_the_order_of_imports(page: str, listing: str) -> None:
    [text] = re.findall(listing, (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    cells = re.findall(r"^\| ([^|]*) \|", text, flags=re.M) or [text]  # of a table, those of the first column
    names = [name.strip("/") for cell in cells for name in re.findall(r"`(\w+/?)`", cell)]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    named = [name for name in names if name in folders]
    assert sorted(named) == sorted(folders)
    assert [LEVEL[name] for name in named] == sorted(LEVEL[name] for name in named)


def test_workflows_run_make_targets_and_nothing_else() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.stem for path in files] == ["nightly", "push", "release"]
    text = "".join(path.read_text() for path in files)
    [nightly] = re.findall(r"target: \[(.*)\]", text)
    run = re.findall(r"run: (\w+) (\S+)", text)
    assert {command for command, _ in run} == {"make"}
    assert {target for _, target in run} - {'"$TARGET"'} | set(nightly.split(", ")) <= targets


def test_a_release_publishes_the_wheel_that_it_tried_and_installs_twine_alone_for_it(tmp_path: Path) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "streampack-9.9.9-py3-none-any.whl").touch()  # as downloaded

    def commands(job: str) -> list[str]:
        """What the job's make targets would run in a fresh clone with the artifact in it."""
        words = [step["run"].split() for step in jobs[job]["steps"] if "run" in step]
        ran = [subprocess.check_output([*each, "-n"], cwd=tmp_path, text=True) for each in words]
        return "".join(ran).replace("\\\n", " ").splitlines()

    def steps(kind: str) -> list[str]:
        """The jobs with a step that uploads or downloads the artifact."""
        uses = [
            (job, step)
            for job, each in jobs.items()
            for step in each["steps"]
            if kind in step.get("uses", "")
        ]
        assert all(step["with"]["name"] == "dist" for _, step in uses)
        return [job for job, _ in uses]

    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    assert (steps("upload-artifact"), steps("download-artifact")) == (["build"], ["try", "publish"])
    builds = re.compile(r"rm -rf .*\bdist\b|-m build")
    assert [job for job in jobs if any(map(builds.search, commands(job)))] == ["build"]
    assert any("$(ls dist/*.whl)[" in line for line in commands("try"))

    assert [job for job in jobs if "id-token" in jobs[job].get("permissions", {})] == ["publish"]
    installed = [
        line.split("pip install", 1)[1].split() for line in commands("publish") if "pip install" in line
    ]
    packages = [
        [word for word in words if word[0] != "-" and word != "constraints.txt"] for words in installed
    ]
    assert packages == [["twine"]]
    assert any("twine upload" in line for line in commands("publish"))


def test_the_transformers_that_is_promised_is_the_one_that_is_tested() -> None:
    """Its internals change with every release: masks, caches, the names of Trainer's methods."""
    extras = PROJECT["project"]["optional-dependencies"]
    [promised] = [package for package in extras["hf"] if package.startswith("transformers")]
    [tested] = re.findall(r"^transformers==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert promised == f"transformers>={tested}"
