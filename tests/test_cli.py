"""The command `streampack`: its words, its help, its exit status, and the recipes and configs that are installed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import streampack_configs
import streampack_examples
import streampack_recipes

from streampack import __version__, cli
from tests.harness.raising import fail

RECIPES, CONFIGS, EXAMPLES = (
    Path(package.__path__[0]) for package in (streampack_recipes, streampack_configs, streampack_examples)
)
RECIPE = """\
import json, pathlib, sys
def recipe_main():
    pathlib.Path("ran.json").write_text(json.dumps({"argv": sys.argv, "file": __file__}))
if __name__ == "__main__":
    recipe_main()
"""
CONFIG = """\
# What it is for.
max_steps: 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; undoes what a run in this process changes."""
    monkeypatch.setattr(sys, "argv", ["streampack"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


Capture = pytest.CaptureFixture[str]


def out_of(capsys: Capture, *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def error_of(capsys: Capture, *words: str, status: int = 2) -> str:
    assert cli.main(list(words)) == status
    return capsys.readouterr().err


def python(*words: str, cwd: Path) -> tuple[int, str, str]:
    """The exit status and the output of a process of Python."""
    run = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    return run.returncode, run.stdout, run.stderr


def listed(text: str) -> list[list[str]]:
    """The pairs of recipes and configs that `ls` prints, and the examples."""
    head, *lines = [line.split() for line in text.splitlines()]
    assert head == ["RECIPE", "CONFIG"]
    lines.remove(["EXAMPLE"])
    return lines


def test_help_and_version(capsys: Capture) -> None:
    [text] = {out_of(capsys, *words) for words in ([], ["--help"], ["-h"], ["help"])}
    assert all(f"\n  {command} " in text for command in cli.COMMANDS)
    for command in cli.COMMANDS:
        [text] = {
            out_of(capsys, *words) for words in ([command, "--help"], ["help", command], [command, "x", "-h"])
        }
        assert text.startswith(f"usage: streampack {command} ")
        assert f"\n  streampack {command}" in text, "an example"
        assert command not in ("validate", "tokenize") or "--config CONFIG" in text
    assert out_of(capsys, "--version") == f"streampack {__version__}\n"


def test_as_a_module(tmp_path: Path) -> None:
    assert python("-m", "streampack", "--version", cwd=tmp_path) == (0, f"streampack {__version__}\n", "")


def test_help_and_lists_are_light(tmp_path: Path) -> None:
    """Importing torchtune takes 4 to 9 s and torch 1 to 2: a list of names must not."""
    code = """
import contextlib, io, sys
from streampack.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    helps = [[command, "--help"] for command in ("run", "validate", "tokenize", "score", "cp")]
    for words in [], ["--help"], *helps, ["ls"], ["nonsense"], ["validate", "nonsense"], ["cp", "quickstart", "."]:
        main(words)
print([name for name in ("torch", "torchtune", "omegaconf") if name in sys.modules])
"""
    assert python("-c", code, cwd=tmp_path) == (0, "[]\n", "")


# Recipes and configs.


def test_ls_lists_all_recipes_and_configs(capsys: Capture) -> None:
    """A recipe is a file with a ``recipe_main``, its own or an imported one."""
    runs = set()
    for path in RECIPES.glob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        names |= {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        runs |= {path.stem} if "recipe_main" in names else set()
    found = [words for line in listed(out_of(capsys, "ls")) for words in line]
    configs = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")}
    examples = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__", "stdlib_text"}
    assert sorted(found) == sorted([*runs, *configs, *examples]), "one name, one file"


def test_files_are_printed_and_copied_and_nothing_is_overwritten(here: Path, capsys: Capture) -> None:
    recipe, config = (RECIPES / "dpo.py").read_text(), (CONFIGS / "quickstart.yaml").read_text()
    assert out_of(capsys, "cat", "quickstart") == config, "with its comments"
    assert out_of(capsys, "cat", "dpo") == recipe
    Path("folder").mkdir()
    places = {"mine": "mine.yaml", ".": "quickstart.yaml", "folder": "folder/quickstart.yaml"}
    for destination, written in places.items():
        out_of(capsys, "cp", "quickstart", destination)
        assert Path(written).read_text() == config
    out_of(capsys, "cp", "dpo", "stroll.py")
    assert Path("stroll.py").read_text() == recipe
    Path("mine.yaml").write_text("precious")
    for destination in ("mine", "mine.yaml"):
        assert error_of(capsys, "cp", "quickstart", destination) == (
            "streampack: error: mine.yaml exists; name another destination, or add --force to overwrite it\n"
        )
        assert Path("mine.yaml").read_text() == "precious"
    out_of(capsys, "cp", "quickstart", "mine", "--force")
    assert Path("mine.yaml").read_text() == config
    assert "there is no folder new; make it" in error_of(capsys, "cp", "quickstart", "new/v1.2")
    Path("new").mkdir()
    out_of(capsys, "cp", "quickstart", "new/v1.2")
    assert Path("new/v1.2.yaml").read_text() == config


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_our_configs_are_well_formed(path: Path, capsys: Capture) -> None:
    """The quickstarts with their files; the others name weights that must be downloaded first."""
    words = [] if path.stem.endswith("quickstart") else ["--no-files"]
    config = path.relative_to(CONFIGS).with_suffix("").as_posix()
    assert cli.main(["validate", "--config", config, *words]) == 0, capsys.readouterr().err


# Runs.


@pytest.mark.parametrize("word", ["recipes/mine.py", "recipes/mine"])
@pytest.mark.parametrize("config", [["--config", "mine.yaml"], ["--config=mine.yaml"]])
def test_run_takes_paths(here: Path, word: str, config: list[str]) -> None:
    """Also in a folder called recipes/, where `tune run` finds torchtune's own package of that name instead."""
    Path("recipes").mkdir()
    recipe = here / "recipes" / "mine.py"
    recipe.write_text(RECIPE)
    Path("mine.yaml").write_text(CONFIG)
    assert cli.main(["run", word, *config, "max_steps=2"]) == 0
    argv = [str(recipe), "--config", "mine.yaml", "max_steps=2"]
    assert json.loads(Path("ran.json").read_text()) == {"argv": argv, "file": str(recipe)}


def test_run_takes_names_and_hands_torchruns_options_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr("torch.distributed.run.run", launched.append)
    config, words = (
        ["--config", "quickstart"],
        ["--nproc_per_node", "2", "--max-restarts", "3", "dpo", "a.b=1"],
    )
    assert [cli.main(["run", *each]) for each in ([*words, *config], [*config, *words])] == [0, 0]
    for args in launched:
        assert (args.nproc_per_node, args.max_restarts) == ("2", 3)
        assert args.training_script == str(RECIPES / "dpo.py")
        assert args.training_script_args == ["--config", str(CONFIGS / "quickstart.yaml"), "a.b=1"]


@pytest.mark.slow
def test_run_on_two_processes(tmp_path: Path) -> None:
    """Both find a component in the working directory."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows_of_mine.py").write_text("def build(): ...\n")
    (tmp_path / "folder" / "mine.py").write_text(
        "import os; from streampack.instantiate import resolve\n"
        "resolve('rows_of_mine.build'); open('rank' + os.environ['RANK'], 'w').close()\n"
    )
    (tmp_path / "mine.yaml").write_text(CONFIG)
    words = [
        "run",
        "--nproc_per_node",
        "2",
        "folder/mine.py",
        "--config",
        "mine.yaml",
        "--trust",
        "rows_of_mine",
    ]
    status, _, error = python("-m", "streampack", *words, cwd=tmp_path)
    assert status == 0, error
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


# What is refused, and how commands end.

UNKNOWN = "neither a name that `streampack ls` lists nor a"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("rum dpo", "unknown command 'rum': it is none of ls, cat, cp, validate, "),
        ("train --config quickstart", "unknown command 'train': "),
        (
            "run dqo --config quickstart",
            f"unknown recipe 'dqo': {UNKNOWN} Python file; did you mean 'dpo'?",
        ),
        (
            "run recipes/gone.py --config a",
            f"unknown recipe 'recipes/gone.py': {UNKNOWN} Python file",
        ),
        (
            "run dpo --config quickstrat",
            f"unknown config 'quickstrat': {UNKNOWN} YAML file; did you mean 'quickstart'?",
        ),
        ("run dpo", "recipe dpo needs --config with "),
        (
            "cp quickstrat .",
            "unknown recipe, config or example 'quickstrat': `streampack ls` lists them; did you mean",
        ),
        (
            "validate quickstrat",
            f"unknown config 'quickstrat': {UNKNOWN} YAML file; did you mean 'quickstart'?",
        ),
        (
            "validate",
            "--config is missing: name a config or the path of a YAML file",
        ),
        (
            "trace quickstart --wrokers 3",
            "unrecognized arguments: --wrokers",
        ),
        ("validate quickstart a.0.b=1 a=[1", "a: '[1' is not YAML: while parsing a flow sequence"),
        ("validate torn.yaml", "torn.yaml cannot be read as YAML: "),
        ("validate list.yaml", "list.yaml holds a list; a config is a mapping of keys to values"),
        ("ls short", "unrecognized arguments: short; `streampack ls --help` shows how it is used"),
        (
            "cp quickstart",
            "the following arguments are required: DESTINATION; `streampack cp --help` shows how",
        ),
    ],
)
def test_wrong_words_are_refused(here: Path, capsys: Capture, words: str, error: str) -> None:
    for name, text in (("mine", CONFIG), ("torn", "a: [1\n"), ("list", "- 1\n")):
        Path(f"{name}.yaml").write_text(text)
    assert error_of(capsys, *words.split()).startswith(f"streampack: error: {error}")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"a: \xff\xfe\n", "odd.yaml is not UTF-8 (at byte 3)"),
        *(
            (b"model: " + b"[" * depth + b"]" * depth, "odd.yaml is nested deeper than 50 levels")
            for depth in (50, 1000, 30_000)
        ),
    ],
)
@pytest.mark.parametrize("command", ["validate", "inspect", "score --out a.jsonl", "run dpo --config"])
def test_a_config_that_cannot_be_read_is_one_line_with_its_name(
    here: Path, capsys: Capture, command: str, content: bytes, error: str
) -> None:
    """A recipe, too; it reads its config by itself."""
    Path("odd.yaml").write_bytes(content)
    with pytest.raises(SystemExit) if command[:3] == "run" else nullcontext():
        assert cli.main([*command.split(), "odd.yaml"]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert error in said


LOAD = "omegaconf.OmegaConf.load"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        *((f"{command} mine.yaml", LOAD) for command in ("validate", "inspect", "unpack", "trace")),
        ("tokenize mine.yaml --out tokens", LOAD),
        ("score mine.yaml --out a.jsonl", LOAD),
        ("export step_1 --config mine.yaml --out a", LOAD),
        ("run dpo --config mine.yaml", "runpy.run_path"),
        ("run --nproc_per_node 2 dpo --config mine.yaml", "torch.distributed.run.run"),
    ],
)
def test_every_command_ends_alike(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: str, place: str
) -> None:
    """Ctrl-C gives 130, what is wrong with the user's files one line, and a mistake in the code a traceback."""
    Path("mine.yaml").write_text(CONFIG)
    monkeypatch.setattr(place, lambda *_, **__: fail(KeyboardInterrupt()))
    assert error_of(capsys, *words.split(), status=130) == "streampack: interrupted\n"
    monkeypatch.setattr(place, lambda *_, **__: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(words.split())
    if place == LOAD:  # a recipe shows its own errors
        monkeypatch.setattr(place, lambda *_, **__: fail(ValueError("no such row")))
        assert error_of(capsys, *words.split(), status=1) == "streampack: error: no such row\n"


def test_without_torchtune(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torchtune" else real(name, *more)
    )
    for words in ("run dpo --config quickstart", "validate quickstart", "score quickstart --out s.jsonl"):
        assert error_of(capsys, *words.split()) == (
            "streampack: error: this needs torchtune, which is not installed: pip install 'streampack[tune]'\n"
        )


def test_validate_finds_components_of_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("STREAMPACK_TRUST", "")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("rows_over_here.py").write_text("def build(n): ...\n")
    nodes = "{_component_: rows_over_here.build, n: 3}"
    keys = ("tokenizer", "model", "checkpointer", "optimizer", "metric_logger")
    lines = [f"{key}: {nodes}\n" for key in keys]
    first = f"output_dir: out\nmax_steps: 1\ndata: {{source: {nodes}, max_seq_len: 4}}\n"
    Path("mine.yaml").write_text(first + "".join(lines))
    for words in (["validate", "mine.yaml"], ["run", "dpo", "--config", "mine.yaml"]):
        assert "--trust ../x: this is no name" in error_of(capsys, *words, "--trust=../x")
    assert "--trust rows_over_here" in error_of(capsys, "validate", "mine.yaml", status=1)
    words = ["validate", "mine.yaml", "--trust", "rows_over_here"]
    assert "--trust" not in error_of(capsys, *words, status=1)


@pytest.mark.parametrize("words", [["--config", "mine.yaml"], ["--config=mine.yaml"], ["mine.yaml"]])
def test_all_commands_take_a_config_alike(here: Path, capsys: Capture, words: list[str]) -> None:
    Path("mine.yaml").write_text(CONFIG)
    assert cli.main(["validate", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == "mine.yaml: 1 problem(s)\n"
    missing = "missing: checkpointer, data, metric_logger, model, optimizer, output_dir, tokenizer;"
    assert captured.err.startswith(missing)
    said = error_of(capsys, "trace", *words, status=1)
    assert said.startswith("streampack: error: missing: output_dir; the keys")
    assert len(said.splitlines()) == 1, "a log needs no other key"
    said = error_of(capsys, "unpack", *words, status=1)
    assert said.startswith("streampack: error: missing: data, tokenizer; the keys")
    said = error_of(capsys, "tokenize", *words, "--out", "tokens", status=1)
    assert said.startswith("streampack: error: data.source is missing")
