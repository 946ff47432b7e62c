from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streampack import __version__, catalog, cli, tune_cli
from tests.harness.raising import fail

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
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install one recipe, `walk`, and one config, `short`; the working directory is another folder."""
    for folder in ("streampack_recipes", "streampack_configs", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "streampack_recipes" / "walk.py").write_text(RECIPE)
    (tmp_path / "streampack_configs" / "short.yaml").write_text(CONFIG)
    for module in (catalog, cli, tune_cli):
        monkeypatch.setattr(module, "RECIPES", {"walk": ("short",)})
    monkeypatch.setattr(catalog, "folder_of", lambda package: tmp_path / package)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


@pytest.fixture
def tune(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `installed`; undoes what a hand-over to torchtune changes."""
    from torchtune import _recipe_registry

    monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", [*_recipe_registry._ALL_RECIPES])
    monkeypatch.setattr(sys, "argv", ["streampack"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return installed


def streampack(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    code = "import sys; from streampack.cli import main; sys.exit(main())"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def ran() -> dict[str, object]:
    result = json.loads(Path("ran.json").read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("command", ["ls", "validate", "run"])
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in ([command, "--help"], ["help", command], [command, "x", "-h"]):
        assert cli.main(words) == 0
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 1
    assert shown[0].startswith(f"usage: streampack {command} ")
    takes_a_config = command not in ("ls", "cat", "cp")
    assert all(
        (option in shown[0]) == takes_a_config for option in ("--config CONFIG", "--trust NAME", "KEY=VALUE")
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == f"streampack {__version__}\n"


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streampack", "--version"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, f"streampack {__version__}\n"), run.stderr


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
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_ls(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["RECIPE", "CONFIG"],
        ["walk", "short"],
    ]


def test_torchtunes_files_are_listed_printed_and_copied(
    tune: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ls", "--all"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["RECIPE", "CONFIG"], ["walk", "short"]]
    assert "full_finetune_single_device" in [line[0] for line in lines[2:]]
    assert cli.main(["cat", "llama3_2/1B_full_single_device"]) == 0
    assert "torchtune.models.llama3_2" in capsys.readouterr().out
    assert cli.main(["cp", "full_finetune_single_device", "theirs"]) == 0
    assert "recipe_main" in Path("theirs.py").read_text()


def test_cat_keeps_the_comments(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cat", "short"]) == 0
    assert capsys.readouterr().out == CONFIG
    assert cli.main(["cat", "walk"]) == 0
    assert capsys.readouterr().out == RECIPE


def test_cp_overwrites_nothing(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("precious")
    for destination in ("mine", "mine.yaml"):
        assert cli.main(["cp", "short", destination]) == 2
        assert capsys.readouterr().err == (
            "streampack: error: mine.yaml exists; name another destination, or add --force to overwrite it\n"
        )
        assert Path("mine.yaml").read_text() == "precious"
    assert cli.main(["cp", "short", "mine", "--force"]) == 0
    assert Path("mine.yaml").read_text() == CONFIG


def test_cp_into_a_missing_folder(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cp", "short", "new/v1.2"]) == 2
    assert "there is no folder new; add --make-parents to make it" in capsys.readouterr().err
    assert cli.main(["cp", "short", "new/v1.2", "--make-parents"]) == 0
    assert Path("new/v1.2.yaml").read_text() == CONFIG


def test_cp(installed: Path) -> None:
    Path("folder").mkdir()
    for destination, written in (("mine", "mine.yaml"), (".", "short.yaml"), ("folder", "folder/short.yaml")):
        assert cli.main(["cp", "short", destination]) == 0
        assert Path(written).read_text() == CONFIG
    assert cli.main(["cp", "walk", "stroll.py"]) == 0
    assert Path("stroll.py").read_text() == RECIPE


@pytest.mark.parametrize("config", [["--config", "short"], ["--config=short"]])
def test_run_takes_names(tune: Path, config: list[str]) -> None:
    assert cli.main(["run", "walk", *config, "max_steps=2"]) == 0
    recipe, short = tune / "streampack_recipes" / "walk.py", tune / "streampack_configs" / "short.yaml"
    assert ran() == {"argv": [str(recipe), "--config", str(short), "max_steps=2"], "file": str(recipe)}


@pytest.mark.parametrize("place", ["relative", "no extension"])
def test_run_takes_paths(tune: Path, place: str) -> None:
    """Also in a folder called recipes/, where `tune run` finds torchtune's own package of that name instead."""
    Path("recipes").mkdir()
    recipe = Path("recipes/mine.py")
    recipe.write_text(RECIPE)
    Path("mine.yaml").write_text(CONFIG)
    word = {"relative": recipe, "no extension": recipe.with_suffix("")}[place]
    assert cli.main(["run", str(word), "--config", "mine.yaml"]) == 0
    assert ran() == {"argv": [str(recipe.resolve()), "--config", "mine.yaml"], "file": str(recipe.resolve())}


def test_run_hands_torchruns_options_on(tune: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtune._cli import run

    launched = []
    monkeypatch.setattr(run, "run", launched.append)
    words = ["--nproc_per_node", "2", "--max-restarts", "3", "walk", "--config", "short", "a.b=1"]
    assert cli.main(["run", *words]) == 0
    (args,) = launched
    assert (args.nproc_per_node, args.max_restarts, args.standalone) == ("2", 3, True)
    assert args.training_script == str(tune / "streampack_recipes" / "walk.py")
    assert args.training_script_args == ["--config", str(tune / "streampack_configs" / "short.yaml"), "a.b=1"]


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
    words = ["--nproc_per_node", "2", "folder/mine.py", "--config", "mine.yaml", "--trust", "rows_of_mine"]
    run = streampack("run", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rum", "full_finetune"]) == 2
    assert capsys.readouterr().err == (
        "streampack: error: unknown command 'rum': it is none of ls, cat, cp, validate, verify, inspect, "
        "unpack, trace, scan, tokenize, score, export, run; did you mean 'run'?\n"
    )


@pytest.mark.parametrize("word", ["train", "trian"])
def test_a_word_that_is_no_command_but_says_what_one_does(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word, "--config", "quickstart"]) == 2
    assert capsys.readouterr().err.endswith("; to train, write `streampack run RECIPE --config CONFIG`\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["run", "wlak", "--config", "short"],
            "unknown recipe 'wlak': neither a name that `streampack ls` lists nor a Python file or module; "
            "did you mean 'walk'?",
        ),
        (
            ["run", "recipes/gone.py", "--config", "short"],
            "unknown recipe 'recipes/gone.py': neither a name that `streampack ls` lists nor a Python file or module",
        ),
        (
            ["run", "walk", "--config", "shrot"],
            "unknown config 'shrot': neither a name that `streampack ls` lists nor a file; did you mean 'short'?",
        ),
        (["run", "walk"], "recipe walk needs --config with short or the path of a YAML file"),
        (
            ["cp", "shrot", "."],
            "unknown recipe or config 'shrot': `streampack ls --all` lists them; did you mean 'short'?",
        ),
        (
            ["validate", "shrot"],
            "unknown config 'shrot': neither a name that `streampack ls` lists nor a YAML file; did you mean 'short'?",
        ),
        (
            ["validate"],
            "--config is missing: name a config or the path of a YAML file; "
            "`streampack validate --help` shows how it is used",
        ),
        (
            ["verify", "short", "--wrokers", "3"],
            "'--wrokers' is neither an option nor KEY=VALUE; `streampack verify --help` shows how it is used",
        ),
        (
            ["validate", "short", "a.0.b=1", "a=[1"],
            "a: '[1' is not YAML: while parsing a flow sequence",
        ),
        (["ls", "short"], "unrecognized arguments: short; `streampack ls --help` shows how it is used"),
        (
            ["cp", "short"],
            "the following arguments are required: DESTINATION; `streampack cp --help` shows how it is used",
        ),
    ],
)
def test_wrong_words_are_refused(
    tune: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"streampack: error: {error}")
    assert not Path("ran.json").exists()


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["validate", "short"], "streampack.training.validate.validate"),
        (["verify", "short"], "streampack.training.isolation.probe_config"),
        (["inspect", "a.jsonl"], "streampack.inspection.command._report"),
        (["inspect", "--config", "short"], "streampack.inspection.command._report"),
        (["unpack", "short"], "streampack.inspection.unpack_command._print"),
        (["trace", "short"], "streampack.inspection.trace_command._steps"),
        (["scan", "a.jsonl", "--out", "list"], "streampack.sources.scan.scan"),
        (["tokenize", "short", "--out", "tokens"], "streampack.training.tokenize_command.run"),
        (["score", "short", "--out", "a.jsonl"], "streampack.training.score_rows.score_rows"),
        (["export", "step_1", "--config", "short", "--out", "a"], "streampack.training.export.export"),
        (["run", "walk", "--config", "short"], "streampack.distributed.launcher.run_torchrun"),
        (["ls", "--all"], "streampack.cli.hand_over"),
    ],
)
def test_every_command_ends_alike(
    tune: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    place: str,
) -> None:
    """Ctrl-C gives 130, what is wrong with the user's files one line, and a mistake in the code a traceback."""

    def run(error: BaseException) -> int:
        monkeypatch.setattr(place, lambda *_, **__: fail(error))
        return cli.main(words)

    assert run(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "streampack: interrupted\n"
    monkeypatch.setattr(place, lambda *_, **__: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(words)
    if words[0] not in ("run", "ls"):  # which torchtune carries out
        assert run(ValueError("no such row")) == 1
        [line] = capsys.readouterr().err.splitlines()
        config = tune / "streampack_configs" / "short.yaml"
        assert line == f"{config if 'short' in words else 'streampack: error'}: no such row"


def test_without_torchtune(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tune_cli.importlib.util.find_spec
    monkeypatch.setattr(
        tune_cli.importlib.util, "find_spec", lambda name: None if name == "torchtune" else real(name)
    )
    for command, *words in (
        ["run", "walk", "--config", "short"],
        ["cp", "theirs", "."],
        ["validate", "short"],
        ["verify", "--config", "short"],
    ):
        assert cli.main([command, *words]) == 2
        assert capsys.readouterr().err == (
            f"streampack: error: `streampack {command}` needs torchtune, which is not installed: "
            "pip install 'streampack[tune]'\n"
        )


def test_validate_finds_components_of_the_working_directory(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMPACK_TRUST", "")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("rows_over_here.py").write_text("def build(n): ...\n")
    Path("mine.yaml").write_text("profiler: {_component_: rows_over_here.build, n: 3}\n")
    assert cli.main(["validate", "mine.yaml"]) == 1
    assert "--trust rows_over_here" in capsys.readouterr().err
    assert cli.main(["validate", "mine.yaml", "--trust", "rows_over_here"]) == 1
    assert "rows_over_here" not in capsys.readouterr().err
    assert cli.main(["validate", "mine.yaml", "--trust=../x"]) == 2
    assert capsys.readouterr().err == (
        "streampack: error: --trust ../x: this is no name of a package or module, such as my_package.rows\n"
    )


@pytest.mark.parametrize("words", [["--config", "short"], ["--config=short"], ["short"]])
def test_all_commands_take_a_config_alike(
    installed: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = installed / "streampack_configs" / "short.yaml"
    assert cli.main(["validate", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{path}: 7 problem(s)\n"
    assert set(captured.err.splitlines()) == {
        f"missing key {key!r}"
        for key in ("checkpointer", "data", "metric_logger", "model", "optimizer", "output_dir", "tokenizer")
    }
    assert cli.main(["verify", *words]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: missing key 'checkpointer'")
    assert cli.main(["tokenize", *words, "--out", "tokens"]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: data.source is missing")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [1\n", "mine.yaml cannot be read as YAML: "),
        ("- 1\n", "mine.yaml holds a list; a config is a mapping of keys to values"),
    ],
)
def test_validate_needs_a_mapping(
    installed: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    Path("mine.yaml").write_text(text)
    assert cli.main(["validate", "mine.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"streampack: error: {error}")


# The recipes and configs that are really installed.


def test_the_table_lists_all_recipes_and_configs() -> None:
    recipes, configs = catalog.folder_of("streampack_recipes"), catalog.folder_of("streampack_configs")
    runs = set()
    for path in recipes.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
        if "recipe_main" in names:
            runs.add(path.stem)
    assert set(catalog.RECIPES) == runs
    assert {name for names in catalog.RECIPES.values() for name in names} == {
        path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml")
    }
    assert not set(catalog.RECIPES) & {name for names in catalog.RECIPES.values() for name in names}, (
        "one name, two files"
    )


def test_our_names_differ_from_torchtunes() -> None:
    from torchtune._recipe_registry import _ALL_RECIPES

    theirs = {recipe.name for recipe in _ALL_RECIPES} | {
        c.name for recipe in _ALL_RECIPES for c in recipe.configs
    }
    assert not theirs & set(catalog.our_files())


@pytest.mark.parametrize("config", sorted({name for names in catalog.RECIPES.values() for name in names}))
def test_our_configs_are_well_formed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstarts with their files; the others name weights that must be downloaded first."""
    words = [] if config.endswith("quickstart") else ["--no-files"]
    assert cli.main(["validate", "--config", config, *words]) == 0, capsys.readouterr().err
