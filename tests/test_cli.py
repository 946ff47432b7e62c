"""The command `streampack`: its words, its help, its exit status, and the recipes and configs that are installed."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streampack_configs
import streampack_examples
import streampack_recipes
from omegaconf import OmegaConf

from streampack import __version__, cli
from streampack.catalog import configs, recipe_for  # private: what all doors ask for a name
from tests.harness.raising import fail
from tests.harness.tiny import lora_config, losses

RECIPES, CONFIGS, EXAMPLES = (
    Path(package.__path__[0]) for package in (streampack_recipes, streampack_configs, streampack_examples)
)
RECIPE = """\
import pathlib
from streampack.training.entry import parse
@parse
def recipe_main(config):
    pathlib.Path("ran").write_text(f"{config.get('max_steps')} {__file__}")
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
    """What is said on stderr; a recipe ends its process."""
    try:
        found = cli.main(list(words))
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status
    return capsys.readouterr().err


def python(*words: str, cwd: Path) -> tuple[int, str, str]:
    """The exit status and the output of a process of Python."""
    run = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    return run.returncode, run.stdout, run.stderr


COMMANDS = ["ls", "cp", "validate", "inspect", "unpack", "trace", "tokenize", "score", "export", "run"]


def test_help_and_version(capsys: Capture) -> None:
    [text] = {out_of(capsys, *words) for words in ([], ["--help"], ["-h"])}
    assert re.findall(r"^    (\w+) ", text, flags=re.M) == COMMANDS
    for command in COMMANDS:
        text = out_of(capsys, command, "--help")
        assert text.startswith(f"usage: streampack {command} ")
        assert f"\nstreampack {command}" in text or command == "ls", "an example"
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
    lines = [line.split(maxsplit=1) for line in out_of(capsys, "ls").splitlines() if line]
    examples = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__", "stdlib_text"}
    table, listed = lines[: lines.index(["EXAMPLE"])], lines[lines.index(["EXAMPLE"]) + 1 :]
    assert {name for [name] in listed} == examples
    assert table.pop(0) == ["RECIPE", "CONFIG"]
    stock = {recipe: name for recipe, name in table if "torchtune" in name}
    ours = [name for _, name in table if "torchtune" not in name]
    assert sorted(ours) == sorted(
        path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")
    )
    assert {recipe for recipe, _ in table} == runs
    assert stock == {
        "full_finetune": "47 of torchtune's: *full*, such as gemma/2B_full",
        "lora_finetune": "82 of torchtune's: *lora*, *dora*, such as gemma/2B_lora",
        "dpo": "5 of torchtune's: *dpo*, such as llama2/7B_lora_dpo",
    }


# What `tune run` starts for each stock config, and our recipe that does its work.
STOCK = {
    "full_finetune_": "full_finetune", "qat_distributed": "full_finetune", "lora_finetune_": "lora_finetune",
    "dpo_": "dpo",
}  # fmt: skip


def test_stock_configs_go_by_torchtunes_names() -> None:
    from torchtune._recipe_registry import get_all_recipes

    files, runs = configs(), {}
    for recipe in get_all_recipes():
        found = [ours for part, ours in STOCK.items() if part in recipe.name and "ppo" not in recipe.name]
        runs |= {config.name: found[0] if found else None for config in recipe.configs}
    assert runs.keys() - files == {"llama2/7B_full_early_exit"}, "which torchtune lists and does not ship"
    runs["dev/8B_full_experimental"] = "full_finetune"  # which it ships and does not list
    del runs["llama2/7B_full_early_exit"]
    assert {name: recipe_for(name) for name in runs} == runs
    assert sum(recipe is not None for recipe in runs.values()) == 134
    assert recipe_for("my/8B_full") is None


def test_files_are_copied_and_nothing_is_overwritten(here: Path, capsys: Capture) -> None:
    recipe, config = (RECIPES / "dpo.py").read_text(), (CONFIGS / "quickstart.yaml").read_text()
    Path("folder").mkdir()
    places = {"mine": "mine.yaml", ".": "quickstart.yaml", "folder": "folder/quickstart.yaml"}
    for destination, written in places.items():
        out_of(capsys, "cp", "quickstart", destination)
        assert Path(written).read_text() == config
    out_of(capsys, "cp", "dpo", "stroll.py")
    assert Path("stroll.py").read_text() == recipe
    out_of(capsys, "cp", "qwen2/0.5B_full", "qwen2.5")
    assert Path("qwen2.5.yaml").read_text() == configs()["qwen2/0.5B_full"].read_text()
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


def tune(*words: str) -> None:
    from torchtune._cli.tune import main

    sys.argv = ["tune", *words]
    main()


def streampack(*words: str) -> None:
    sys.exit(cli.main(list(words)))


def by_python(_: str, script: str, *words: str) -> None:
    sys.argv = [script, *words]
    runpy.run_path(str(Path(script).resolve()), run_name="__main__")


DOORS = pytest.mark.parametrize("door", [tune, streampack, by_python])


def ends(status: int | None, start: Callable[..., None], *words: str) -> None:
    with pytest.raises(SystemExit) as end:
        start(*words)
    assert end.value.code == status


@DOORS
@pytest.mark.parametrize("word", ["./quickstart", "quickstart", "llama3_2/1B_full"])
def test_every_door_takes_a_config_by_path_or_name(here: Path, door: Callable[..., None], word: str) -> None:
    """A name comes before a path, as in `tune run`."""
    Path("mine.py").write_text(RECIPE)
    Path("quickstart").write_text("max_steps: 7")
    known = configs()
    expected = OmegaConf.load(known.get(word, word)).get("max_steps")
    assert (expected == 7) is (word not in known)
    ends(None, door, "run", "mine.py", "--config", word)
    assert Path("ran").read_text() == f"{expected} {here / 'mine.py'}"
    ends(None, door, "run", "mine.py", "--config", word, "max_steps=2")
    assert Path("ran").read_text().startswith("2 ")


@pytest.mark.parametrize(
    "recipe", [path.stem for path in RECIPES.glob("*.py") if "recipe_main" in path.read_text()]
)
def test_a_copied_recipe_runs(here: Path, capsys: Capture, recipe: str) -> None:
    out_of(capsys, "cp", recipe, "mine.py")
    ends(2, streampack, "run", "mine.py", "--config", "llama3_2/1B_ful")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(
        "error: unknown config 'llama3_2/1B_ful': no name that `streampack ls` shows, and no file; did"
    )
    assert "did you mean 'llama3_2/1B_full' or " in said


def test_a_copied_recipe_trains(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("STREAMPACK_TRUST", "tests")
    OmegaConf.save(lora_config(here, max_steps=2, validation=None), "my.yaml")
    out_of(capsys, "cp", "lora_finetune", "mine.py")
    ends(None, tune, "run", "mine.py", "--config", "my.yaml")
    assert list(losses(here)) == [1, 2]


@pytest.mark.parametrize("word", ["recipes/mine.py", "recipes/mine"])
def test_run_takes_paths(here: Path, word: str) -> None:
    """Also in a folder called recipes/, where `tune run` finds torchtune's own package of that name instead."""
    Path("recipes").mkdir()
    Path("recipes/mine.py").write_text(RECIPE)
    Path("mine.yaml").write_text(CONFIG)
    ends(None, streampack, "run", word, "--config=mine.yaml")
    assert Path("ran").read_text() == f"3 {here / 'recipes' / 'mine.py'}"


def test_run_hands_torchruns_options_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr("torch.distributed.run.run", launched.append)
    words = ["dpo", "--config", "quickstart", "a.b=1"]
    assert cli.main(["run", "--nproc_per_node", "2", "--max-restarts=3", *words]) == 0
    [args] = launched
    assert (args.nproc_per_node, args.max_restarts) == ("2", 3)
    assert [args.training_script, *args.training_script_args] == [str(RECIPES / "dpo.py"), *words[1:]]


@pytest.mark.slow
def test_run_on_two_processes(tmp_path: Path) -> None:
    """Both find a component in the working directory."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows_of_mine.py").write_text("def build(): ...\n")
    look = "from streampack.instantiate import resolve; resolve('rows_of_mine.build')\n"
    recipe = RECIPE.replace("    path", f"    import os; {look}    path").replace(
        '"ran"', '"rank" + os.environ["RANK"]'
    )
    (tmp_path / "folder" / "mine.py").write_text(recipe)
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

UNKNOWN = "no name that `streampack ls` shows, and no file"
MEANT = "; did you mean 'quickstart' or "


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("rum dpo", "argument COMMAND: invalid choice: 'rum' (choose from 'ls', 'cp', 'validate', "),
        ("run", "name a recipe, and a config: streampack run RECIPE --config CONFIG\n"),
        ("run dqo --config quickstart", f"unknown recipe 'dqo': {UNKNOWN}; did you mean 'dpo'?\n"),
        ("run recipes/gone.py --config a", f"unknown recipe 'recipes/gone.py': {UNKNOWN}\n"),
        ("run dpo --config quickstrat", f"unknown config 'quickstrat': {UNKNOWN}{MEANT}"),
        ("run dpo", "the following arguments are required: --config\n"),
        ("cp quickstrat .", f"unknown recipe, config or example 'quickstrat': {UNKNOWN}{MEANT}"),
        ("validate quickstrat", f"unknown config 'quickstrat': {UNKNOWN}{MEANT}"),
        ("validate .", f"unknown config '.': {UNKNOWN}\n"),
        ("validate", "--config is missing: name a config or the path of a YAML file\n"),
        ("trace quickstart --wrokers 3", "unrecognized arguments: --wrokers 3\n"),
        ("validate quickstart a.0.b=1 a=[1", "a: '[1' is not YAML: while parsing a flow sequence"),
        ("validate torn.yaml", "torn.yaml cannot be read as YAML: while parsing a flow sequence in"),
        ("validate list.yaml", "list.yaml holds a list; a config is a mapping of keys to values\n"),
        ("run dpo --config list.yaml", "list.yaml holds a list; a config is a mapping of keys to values"),
        ("ls short", "unrecognized arguments: short\n"),
        ("cp quickstart", "the following arguments are required: destination\n"),
    ],
)
def test_wrong_words_are_refused(here: Path, capsys: Capture, words: str, error: str) -> None:
    """Errors of argparse after its usage, ours in one line."""
    for name, text in (("mine", CONFIG), ("torn", "a: [1\n"), ("list", "- 1\n")):
        Path(f"{name}.yaml").write_text(text)
    said = error_of(capsys, *words.split())
    assert f"error: {error}" in said
    assert said.startswith("usage: ") or said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"a: \xff\xfe\n", "odd.yaml is not UTF-8 (at byte 3)"),
        *(
            (b"model: " + b"[" * depth + b"]" * depth, "odd.yaml is nested deeper than 50 levels")
            for depth in (50, 30_000)
        ),
    ],
)
@pytest.mark.parametrize("command", ["validate", "inspect --config", "run dpo --config"])
def test_a_config_that_cannot_be_read_is_one_line_with_its_name(
    here: Path, capsys: Capture, command: str, content: bytes, error: str
) -> None:
    """A recipe, too; it reads its config by itself."""
    Path("odd.yaml").write_bytes(content)
    said = error_of(capsys, *command.split(), "odd.yaml")
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
    assert captured.out == "mine.yaml: 2 problem(s)\n"
    missing = "missing: checkpointer, metric_logger, model, optimizer, output_dir, tokenizer; the keys"
    assert captured.err.startswith(missing)
    assert "\ndataset and data are both missing" in captured.err
    said = error_of(capsys, "trace", *words, status=1)
    assert said.startswith("streampack: error: missing: output_dir; the keys")
    assert len(said.splitlines()) == 1, "a log needs no other key"
    said = error_of(capsys, "unpack", *words, status=1)
    assert said.startswith("streampack: error: missing: tokenizer; the keys")
    said = error_of(capsys, "tokenize", *words, "--out", "tokens", status=1)
    assert said.startswith("streampack: error: data.source is missing")
    said = error_of(capsys, "tokenize", *words, "--out", "tokens", "dataset.split=train", status=1)
    assert "and not torchtune's dataset, which this command does not read" in said
