"""The corpus from the standard library: rows and tokenizer are reproducible, lossless, and never half written."""

from __future__ import annotations

import doctest
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest
from streampack_recipes import stdlib_corpus

NAMES = ["pairs.jsonl", "preferences.jsonl", "sources.jsonl", "tokenizer.model"]

# Runs the script on another library than the interpreter's, and kills it at the given call of os.replace.
RUN = """
import os, runpy, signal, sys, sysconfig
sysconfig.get_path = lambda name: {library!r}
replace, calls = os.replace, []
def killed(source, target):
    calls.append(target)
    if len(calls) == {kill_at}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
runpy.run_path({script!r}, run_name="__main__")
sys.exit("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def prepared() -> Any:
    """The whole library's corpus, from the cache where configs look for it too."""
    return stdlib_corpus.prepare()


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some modules of the library: enough text for a tokenizer of 2,048 tokens."""
    folder, root = tmp_path_factory.mktemp("library"), Path(sysconfig.get_path("stdlib"))
    for name in ("collections", "json", "unittest"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("argparse", "ast", "datetime", "functools", "inspect", "typing"):
        shutil.copy(root / f"{name}.py", folder)
    return folder


def use_library(folder, monkeypatch):
    monkeypatch.setattr(stdlib_corpus, "sysconfig", types.SimpleNamespace(get_path=lambda name: str(folder)))


@pytest.fixture
def small(library, monkeypatch):
    use_library(library, monkeypatch)


def start(cache, library, kill_at=0):
    code = RUN.format(library=str(library), kill_at=kill_at, script=stdlib_corpus.__file__)
    env = {**os.environ, "STREAMPACK_CACHE": str(cache)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Rows.


def test_doctests() -> None:
    results = doctest.testmod(stdlib_corpus)
    assert results.attempted >= 4
    assert not results.failed


def test_pairs_are_questions_with_answers(prepared: Any) -> None:
    pairs = rows_of(prepared.pairs)
    assert len(pairs) >= 5_000
    assert len({pair["input"] for pair in pairs}) == len({pair["output"] for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert set(pair) == {"input", "output"}
        assert pair["input"].startswith("What does `")
        assert pair["input"].endswith("` do?")
        assert pair["output"] == pair["output"].strip() != ""
    answers = {pair["input"]: pair["output"] for pair in pairs}
    assert answers["What does `heapq.merge` do?"].startswith(
        "Merge multiple sorted inputs into a single sorted"
    )
    assert "What does `json` do?" in answers, "a package is named without its __init__"
    assert "What does `collections.Counter.most_common` do?" in answers


# Tokenizer.


@pytest.mark.parametrize("text", [
    "def f(x):\n    if x:\n\treturn {'a': [1, 2.5e-3]}\n\n\n    # two  spaces, trailing \n",
    "naïve Straße ﬁ ½ 日本語 Ελληνικά 🎉👩\u200d💻 e\u0301",
    "<s> </s> <unk> <0x0A> [INST]",
    "\x00\x07\x1b[0m\u2028\ufeff",
])  # fmt: skip
def test_the_tokenizer_has_torchtunes_ids_and_decodes_what_it_encoded(prepared: Any, text: str) -> None:
    llama2 = pytest.importorskip("torchtune.models.llama2")
    tokenizer = llama2.llama2_tokenizer(str(prepared.tokenizer), prompt_template=None)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.vocab_size == stdlib_corpus.VOCAB_SIZE
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (tokens[0], tokens[-1]) == (1, 2)
    assert not {0, 1, 2} & set(tokens[1:-1]), "text never becomes padding, a start or an end"
    assert tokenizer.decode(tokens) == text


# Files.


@pytest.mark.usefixtures("small")
def test_prepared_files_hold_the_rows_and_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = stdlib_corpus.prepare(tmp_path)
    assert rows_of(paths.pairs) == list(stdlib_corpus.docstring_pairs())
    assert rows_of(paths.sources) == list(stdlib_corpus.source_files())
    assert rows_of(paths.preferences) == list(stdlib_corpus.preference_pairs())
    assert sorted(content(paths.folder)) == NAMES
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in paths.folder.iterdir()}
    monkeypatch.setenv("STREAMPACK_CACHE", str(tmp_path))
    assert stdlib_corpus.prepare() == paths
    assert capsys.readouterr().err == ""
    assert {path: path.stat().st_mtime_ns for path in paths.folder.iterdir()} == before


@pytest.mark.slow
def test_processes_may_prepare_at_once(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = shutil.copytree(library, tmp_path / "mine")
    use_library(mine, monkeypatch)
    expected = stdlib_corpus.prepare(tmp_path / "expected").folder
    runs = [start(tmp_path / "shared", mine) for _ in range(2)]
    said = [run.communicate() for run in runs]  # before looking: the slower one still has files of its own
    for run, (out, err) in zip(runs, said, strict=True):
        assert run.returncode == 0, err
        assert Path(out.strip()).parent == tmp_path / "shared"
        assert content(Path(out.strip())) == content(expected), "deterministic, and nothing temporary stays"


def test_a_killed_process_leaves_no_half_file(small, library, tmp_path):
    run = start(tmp_path, library, kill_at=2)
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    finished = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    assert finished == NAMES[:1]
    stdlib_corpus.prepare(tmp_path)
    assert set(NAMES) <= set(content(folder))
