from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streampack import cli

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
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A house of one recipe, `walk`, and one config, `short`, with another folder as the working directory."""
    for folder in ("streampack_recipes", "streampack_configs", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "streampack_recipes" / "walk.py").write_text(RECIPE)
    (tmp_path / "streampack_configs" / "short.yaml").write_text(CONFIG)
    monkeypatch.setattr(cli, "RECIPES", {"walk": ("short",)})
    monkeypatch.setattr(cli, "_folder", lambda package: tmp_path / package)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


@pytest.fixture
def tune(house: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same house, with what a hand-over to torchtune changes put back afterwards."""
    from torchtune import _recipe_registry

    monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", [*_recipe_registry._ALL_RECIPES])
    monkeypatch.setattr(sys, "argv", ["streampack"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return house


def streampack(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as installed, in a process of its own, from a folder of its own."""
    code = "import sys; from streampack.cli import main; sys.exit(main())"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def ran() -> dict[str, object]:
    result = json.loads(Path("ran.json").read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["run", "--help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in cli.COMMANDS)


def test_help_and_lists_are_light(tmp_path: Path) -> None:
    """Importing torchtune takes 4 to 9 s and torch 1 to 2: a list of names must not."""
    code = """
import contextlib, io, sys
from streampack.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for words in [], ["--help"], ["run", "--help"], ["ls"], ["nonsense"], ["validate", "nonsense"]:
        main(words)
print([name for name in ("torch", "torchtune", "omegaconf") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_ls(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["RECIPE", "CONFIG"],
        ["walk", "short"],
    ]


def test_ls_all_puts_ours_before_torchtunes(tune: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "--all"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["RECIPE", "CONFIG"], ["walk", "short"]]
    assert "full_finetune_single_device" in [line[0] for line in lines[2:]]


def test_cat_keeps_the_comments(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cat", "short"]) == 0
    assert capsys.readouterr().out == CONFIG
    assert cli.main(["cat", "walk"]) == 0
    assert capsys.readouterr().out == RECIPE


def test_cat_of_torchtunes(tune: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cat", "llama3_2/1B_full_single_device"]) == 0
    assert "torchtune.models.llama3_2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("destination", "written"),
    [("mine", "mine.yaml"), ("mine.yaml", "mine.yaml"), (".", "short.yaml"), ("folder", "folder/short.yaml")],
)
def test_cp_config(tune: Path, destination: str, written: str) -> None:
    Path("folder").mkdir()
    assert cli.main(["cp", "short", destination]) == 0
    assert Path(written).read_text() == CONFIG


def test_cp_recipe(tune: Path) -> None:
    assert cli.main(["cp", "walk", "stroll.py"]) == 0
    assert Path("stroll.py").read_text() == RECIPE


@pytest.mark.parametrize("config", [["--config", "short"], ["--config=short"]])
def test_run_takes_names(tune: Path, config: list[str]) -> None:
    assert cli.main(["run", "walk", *config, "max_steps=2"]) == 0
    recipe, short = tune / "streampack_recipes" / "walk.py", tune / "streampack_configs" / "short.yaml"
    assert ran() == {"argv": [str(recipe), "--config", str(short), "max_steps=2"], "file": str(recipe)}


@pytest.mark.parametrize("place", ["relative", "absolute", "no extension"])
def test_run_takes_paths(tune: Path, place: str) -> None:
    """Also in a folder called recipes/, where `tune run` finds torchtune's own package of that name instead."""
    Path("recipes").mkdir()
    recipe = Path("recipes/mine.py")
    recipe.write_text(RECIPE)
    Path("mine.yaml").write_text(CONFIG)
    word = {"relative": recipe, "absolute": recipe.resolve(), "no extension": recipe.with_suffix("")}[place]
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


def test_run_on_two_processes(tmp_path: Path) -> None:
    """With a component of the working directory, which each of them finds."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows_of_mine.py").write_text("def build(): ...\n")
    (tmp_path / "folder" / "mine.py").write_text(
        "import os; from streampack.components import resolve\n"
        "resolve('rows_of_mine.build'); open('rank' + os.environ['RANK'], 'w').close()\n"
    )
    (tmp_path / "mine.yaml").write_text(CONFIG)
    words = ["--nproc_per_node", "2", "folder/mine.py", "--config", "mine.yaml", "--trust", "rows_of_mine"]
    run = streampack("run", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


def test_torchao_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('import torchtune\nprint("ran")\n')
    (tmp_path / "mine.yaml").write_text(CONFIG)
    run = streampack("run", "mine.py", "--config", "mine.yaml", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "ran\n"), run.stderr
    assert "cpp extensions" not in run.stderr


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rum", "full_finetune"]) == 2
    assert capsys.readouterr().err == (
        "streampack: error: unknown command 'rum': it is none of ls, cat, cp, validate, verify, tokenize, run; "
        "did you mean 'run'?\n"
    )


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
        (["run", "walk", "--config"], "recipe walk needs --config with short or the path of a YAML file"),
        (
            ["cp", "shrot", "."],
            "unknown recipe or config 'shrot': `streampack ls --all` lists them; did you mean 'short'?",
        ),
        (
            ["validate", "shrot"],
            "unknown config 'shrot': neither a name that `streampack ls` lists nor a YAML file; did you mean 'short'?",
        ),
        (["validate"], "validate takes one config, a name or a path; got none"),
        (
            ["validate", "short", "max_steps=1"],
            "validate takes one config, a name or a path; got short max_steps=1",
        ),
    ],
)
def test_unknown_names(tune: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"streampack: error: {error}\n"
    assert not Path("ran.json").exists()


def test_torchtunes_own_errors_speak_of_streampack(tune: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run"])
    error = capsys.readouterr().err
    assert error.startswith("usage: streampack run [TORCHRUN-OPTIONS] <recipe>")
    assert "tune run" not in error.replace("streampack run", "")


def test_without_torchtune(
    house: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "torchtune" else real(name)
    )
    for command, *words in (
        ["run", "walk", "--config", "short"],
        ["cp", "short", "."],
        ["validate", "short"],
        ["verify", "--config", "short"],
    ):
        assert cli.main([command, *words]) == 2
        assert capsys.readouterr().err == (
            f"streampack: error: `streampack {command}` needs torchtune, which is not installed: "
            "pip install 'streampack[tune]'\n"
        )


def validate(text: str) -> int:
    Path("mine.yaml").write_text(text)
    return cli.main(["validate", "mine.yaml"])


def test_validate_finds_components_of_the_working_directory(
    house: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMPACK_TRUST", "")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("rows_of_mine.py").write_text("def build(n): ...\n")
    config = "profiler: {_component_: rows_of_mine.build, n: 3}\n"
    assert validate(config) == 1
    assert "--trust rows_of_mine" in capsys.readouterr().err
    assert cli.main(["validate", "mine.yaml", "--trust", "rows_of_mine"]) == 0
    assert cli.main(["validate", "mine.yaml", "--trust=../x"]) == 2
    assert capsys.readouterr().err == (
        "streampack: error: --trust ../x: this is no name of a package or module, such as my_package.rows\n"
    )


def test_validate_takes_names_and_paths(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "short"]) == 0
    assert capsys.readouterr().out == f"{house / 'streampack_configs' / 'short.yaml'} is well-formed\n"
    assert validate("optimizer:\n  _component_: torch.optim.AdamW\n  lr: 1e-3\n") == 0


@pytest.mark.parametrize(
    "text",
    [
        "optimizer:\n  _component_: torch.optim.AdamV\n",
        "optimizer:\n  _component_: torch.optim.AdamW\n  learning_rate: 1e-3\n",
        "dataset:\n  inner:\n    _component_: torch.optim.AdamW\n    learning_rate: 1e-3\n",
        "dataset:\n  - _component_: torch.optim.AdamW\n    learning_rate: 1e-3\n",
        "optimizer:\n  _component_: os.system\n  command: ls\n",
    ],
    ids=["no such component", "no such argument", "nested", "in a list", "not a trusted root"],
)
def test_validate_finds_problems(house: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert validate(text) == 1
    captured = capsys.readouterr()
    assert captured.out == "mine.yaml: 1 problem(s)\n"
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [1\n", "mine.yaml cannot be read as YAML: "),
        ("- 1\n", "mine.yaml holds a list; a config is a mapping of keys to values"),
        ("3\n", "mine.yaml cannot be read as YAML: "),
    ],
)
def test_validate_wants_a_mapping(
    house: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    assert validate(text) == 2
    assert capsys.readouterr().err.startswith(f"streampack: error: {error}")


# From here on: the recipes and configs that are really installed.


def test_the_table_is_the_folders() -> None:
    recipes, configs = cli._folder("streampack_recipes"), cli._folder("streampack_configs")
    runs = set()
    for path in recipes.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if "recipe_main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]:
            runs.add(path.stem)
    assert set(cli.RECIPES) == runs
    assert {name for names in cli.RECIPES.values() for name in names} == {
        path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml")
    }
    assert not set(cli.RECIPES) & {name for names in cli.RECIPES.values() for name in names}, (
        "one name, two files"
    )


def test_no_name_is_torchtunes() -> None:
    from torchtune._recipe_registry import _ALL_RECIPES

    theirs = {recipe.name for recipe in _ALL_RECIPES} | {
        c.name for recipe in _ALL_RECIPES for c in recipe.configs
    }
    assert not theirs & set(cli.our_files())


@pytest.mark.parametrize("config", sorted({name for names in cli.RECIPES.values() for name in names}))
def test_our_configs_are_well_formed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", config]) == 0, capsys.readouterr().err
