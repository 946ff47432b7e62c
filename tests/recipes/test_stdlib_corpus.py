"""The corpus that every machine has: rows and tokenizer are reproducible, lossless, and never half written."""

import doctest
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from streampack_recipes import stdlib_corpus

PATCHED_RUN = """
import os, runpy, signal
replace, calls = os.replace, []
def killed(source, target):
    calls.append(target)
    if len(calls) == {kill_at}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def pairs():
    return list(stdlib_corpus.docstring_pairs())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return stdlib_corpus.prepare(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def tokenizer(prepared):
    llama2 = pytest.importorskip("torchtune.models.llama2")
    return llama2.llama2_tokenizer(str(prepared.tokenizer), prompt_template=None)


def start(cache: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "STREAMPACK_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def same_files(one: stdlib_corpus.Paths, two: stdlib_corpus.Paths) -> bool:
    return all(
        getattr(one, name).read_bytes() == getattr(two, name).read_bytes()
        for name in ("pairs", "sources", "tokenizer")
    )


# ---- rows


def test_pairs_are_questions_with_answers(pairs):
    assert len(pairs) >= 5_000
    for pair in pairs:
        assert set(pair) == {"input", "output"}
        assert pair["input"].startswith("What does `")
        assert pair["input"].endswith("` do?")
        assert pair["output"]
        assert pair["output"] == pair["output"].strip()
    answers = {pair["input"]: pair["output"] for pair in pairs}
    assert answers["What does `heapq.merge` do?"].startswith(
        "Merge multiple sorted inputs into a single sorted output."
    )
    assert "What does `json` do?" in answers, "a package is named without its __init__"
    assert "What does `argparse.ArgumentParser` do?" in answers
    assert "What does `collections.Counter.most_common` do?" in answers


def test_no_question_or_answer_comes_twice(pairs):
    assert len({pair["input"] for pair in pairs}) == len({pair["output"] for pair in pairs}) == len(pairs)


def test_pairs_are_the_same_on_every_run(pairs):
    assert list(stdlib_corpus.docstring_pairs()) == pairs


def test_lengths_are_skewed_like_instruction_data(pairs, tokenizer):
    lengths = sorted(len(tokenizer.encode(pair["output"])) for pair in pairs)
    median, p99 = lengths[len(lengths) // 2], lengths[len(lengths) * 99 // 100]
    assert 20 < median < 80
    assert p99 > 8 * median
    assert 300_000 < sum(lengths) < 1_000_000


def test_the_examples_run():
    results = doctest.testmod(stdlib_corpus)
    assert results.attempted >= 4
    assert not results.failed


def test_source_files_leave_tests_and_other_peoples_packages_out():
    files = list(stdlib_corpus.source_files())
    paths = [file["path"] for file in files]
    assert len(paths) == len(set(paths))
    assert "json/decoder.py" in paths
    assert not [
        path for path in paths if {"test", "tests", "site-packages", "dist-packages"} & set(path.split("/"))
    ]
    assert not any(path.startswith("/") or "\\" in path for path in paths)
    assert sum(len(file["text"]) for file in files) > 5_000_000


def test_the_library_is_read_and_never_imported():
    absent = "__hello__"  # importing it is harmless, and nothing else does
    code = f"import sys; sys.path.insert(0, {str(Path(stdlib_corpus.__file__).parent)!r}); import stdlib_corpus; "
    code += f"list(stdlib_corpus.docstring_pairs()); sys.exit({absent!r} in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_definitions_are_found_wherever_they_stand(monkeypatch):
    text = '''"""Top."""
try:
    class A:
        """  An A.

        More."""
        async def b(self):
            """B."""
            def c():
                """C."""
except ImportError:
    def d(): "D."
if True:
    def d(): "another D"
    def e(): "D."
    def f(): "   "
    def g(): 17
'''
    monkeypatch.setattr(
        stdlib_corpus, "source_files", lambda: iter([{"path": "p/q/__init__.py", "text": text}])
    )
    assert [(pair["input"][11:-5], pair["output"]) for pair in stdlib_corpus.docstring_pairs()] == [
        ("p.q", "Top."),
        ("p.q.A", "An A.\n\nMore."),
        ("p.q.A.b", "B."),
        ("p.q.A.b.c", "C."),
        ("p.q.d", "D."),
    ]


def test_files_that_are_not_python_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text('"""Good."""')
    (tmp_path / "latin.py").write_bytes('# coding: latin-1\n"""Où."""'.encode("latin-1"))
    (tmp_path / "bad_bytes.py").write_bytes(b'"""\xff"""')
    (tmp_path / "bad_syntax.py").write_text("print 'hello'")
    (tmp_path / "_sysconfigdata_x.py").write_text('"""Generated."""')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "fixture.py").write_text('"""A fixture."""')
    monkeypatch.setattr(
        stdlib_corpus, "sysconfig", types.SimpleNamespace(get_path=lambda name: str(tmp_path))
    )
    assert [pair["output"] for pair in stdlib_corpus.docstring_pairs()] == ["Good.", "Où."]


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        stdlib_corpus, "sysconfig", types.SimpleNamespace(get_path=lambda name: str(tmp_path))
    )
    with pytest.raises(
        FileNotFoundError, match=r"no \.py files under .*comes without the sources.*use one from"
    ):
        list(stdlib_corpus.docstring_pairs())


# ---- tokenizer


def test_tokenizer_has_the_ids_that_torchtune_expects(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.vocab_size == stdlib_corpus.VOCAB_SIZE


@pytest.mark.parametrize(
    "text",
    [
        "Return the sum.",
        "def f(x):\n    if x:\n\treturn {'a': [1, 2.5e-3]}\n\n\n    # two  spaces, trailing \n",
        "  leading and trailing  ",
        "\n\nlines\r\n",
        "naïve Straße ﬁ ½ 日本語 Ελληνικά 🎉👩\u200d💻 e\u0301",
        "<s> </s> <unk> <0x0A> [INST]",
        "\x00\x07\x1b[0m\u2028\ufeff",
        "",
    ],
)
def test_tokenizer_gives_back_every_text(tokenizer, text):
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert not {0, 1, 2} & set(tokens[1:-1]), "text never becomes padding, a start or an end"
    assert tokenizer.decode(tokens) == text


def test_tokenizer_gives_back_the_corpus(tokenizer, pairs):
    for text in [pair["output"] for pair in pairs[::20]] + [
        file["text"] for file in stdlib_corpus.source_files()
    ][::20]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_messages_keep_question_and_answer_apart(prepared, pairs):
    llama2 = pytest.importorskip("torchtune.models.llama2")
    from torchtune.data import InputOutputToMessages

    tokenizer = llama2.llama2_tokenizer(str(prepared.tokenizer), prompt_template={"user": ["", "\n"]})
    to_messages = InputOutputToMessages(train_on_input=False)
    for pair in pairs[::50]:
        encoded = tokenizer(to_messages(dict(pair)))
        answer = [
            token for token, masked in zip(encoded["tokens"], encoded["mask"], strict=True) if not masked
        ]
        assert tokenizer.decode(answer) == pair["output"]
        assert answer[-1] == tokenizer.eos_id
        assert tokenizer.decode(encoded["tokens"]) == f"{pair['input']}\n{pair['output']}"


# ---- cache


def test_prepared_files_hold_the_pairs(prepared, pairs):
    lines = prepared.pairs.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == pairs
    assert lines[-1] == ""
    sources = prepared.sources.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in sources[:-1]] == list(stdlib_corpus.source_files())
    assert {path.name for path in prepared.folder.iterdir()} == {
        "pairs.jsonl",
        "sources.jsonl",
        "tokenizer.model",
    }


def test_a_second_call_reuses_what_is_there(prepared, monkeypatch, capsys):
    monkeypatch.setattr(stdlib_corpus, "docstring_pairs", None)
    monkeypatch.setattr(stdlib_corpus, "_train_tokenizer", None)
    assert stdlib_corpus.prepare(prepared.folder.parent) == prepared
    monkeypatch.setenv("STREAMPACK_CACHE", str(prepared.folder.parent))
    assert stdlib_corpus.prepare() == prepared
    assert capsys.readouterr().err == ""


def test_other_content_goes_to_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(
        stdlib_corpus, "sysconfig", types.SimpleNamespace(get_path=lambda name: str(tmp_path))
    )
    (tmp_path / "one.py").write_text('"""One."""')
    before = stdlib_corpus._fingerprint()
    (tmp_path / "one.py").write_text('"""Two."""')
    assert stdlib_corpus._fingerprint() != before


def test_processes_may_prepare_at_once(prepared, tmp_path):
    runs = [start(tmp_path, stdlib_corpus.__file__) for _ in range(2)]
    for run in runs:
        out, err = run.communicate()
        assert run.returncode == 0, err
        paths = stdlib_corpus.Paths(
            Path(out.strip()), *(Path(out.strip(), path.name) for path in prepared[1:])
        )
        assert paths.folder.parent == tmp_path
        assert same_files(paths, prepared), "deterministic, to the byte"
    assert len(list(paths.folder.iterdir())) == 3, "nothing temporary stays"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("kill_at", [1, 2, 3])
def test_a_killed_process_leaves_no_half_file(prepared, tmp_path, kill_at):
    run = start(tmp_path, "-c", PATCHED_RUN.format(kill_at=kill_at, script=stdlib_corpus.__file__))
    run.communicate()
    assert run.returncode == -signal.SIGKILL, "it did die on the way"
    (folder,) = tmp_path.iterdir()
    finished = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert finished == set(["pairs.jsonl", "sources.jsonl", "tokenizer.model"][: kill_at - 1])
    assert same_files(stdlib_corpus.prepare(tmp_path), prepared)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(stdlib_corpus, "docstring_pairs", lambda: iter([{"input": "q", "output": "a"}]))
    with pytest.raises(OSError, match="disk full"):
        stdlib_corpus.prepare(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
