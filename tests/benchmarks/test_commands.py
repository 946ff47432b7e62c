"""Commands under benchmarks/ that no other test runs: that they run, and that they measure what they say."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from benchmarks import (
    groups,
    inputs,
    mixers,
    prefill,
    scoring,
    straggling,
    text,
)
from tests.harness.tiny import WordTokenizer

# Python 3.12 warns of every fork beside a thread; torch's own DataLoader does the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.slow
def test_inputs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchtune")
    inputs.main(["--smoke"])
    out = capsys.readouterr().out
    assert len(re.findall(r"^## ", out, re.MULTILINE)) == 4
    assert len(re.findall(r"^\| streampack +\|", out, re.MULTILINE)) == 4
    assert "changed the tokens" not in out


@pytest.mark.slow
def test_text_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("sentencepiece")  # of the corpus
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # what it sets goes away with the test
    text.main(["--smoke"])
    out = capsys.readouterr().out
    assert all(re.search(rf"\| +{mode} \|", out) for mode in text.MODES)


@pytest.mark.slow
def test_straggling_runs(capsys: pytest.CaptureFixture[str]) -> None:
    straggling.main(["--smoke"])
    found = re.search(
        r"^\| 8,192 +\| +2 \| +64 \| +([\d.]+) \| +[\d.]+ \| +([\d.]+) ",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert found is not None
    assert 1 <= float(found[2]) < float(found[1])  # with a window, and as planned


def test_a_share_of_the_text_is_nobody_elses(tmp_path: Path) -> None:
    """All that are compared have the same tokens to make, and each is made once."""
    corpus = text.Corpus.write(tmp_path, ["red cat", "blue", "one two three"], size=300)
    assert 300 <= corpus.path.stat().st_size < 340
    assert corpus.texts[:4] == ["red cat", "blue", "one two three", "red cat"]
    tokenizer = Counting()
    for number in range(2):
        text.encode_share(tokenizer, corpus, 2, number)
    assert sorted(tokenizer.texts) == sorted(corpus.texts)
    wanted = sum(len(tokenizer.encode(some)) for some in corpus.texts)
    assert text.plain(tokenizer, corpus, 2) == wanted
    assert {text.packed(tokenizer, corpus, 2, mode) for mode in text.MODES} == {wanted}


@pytest.mark.slow
def test_groups_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchtune")
    groups.main(["--smoke"])
    assert len(re.findall(r"^\| \d prompts x (?:2|8) answers ", capsys.readouterr().out, re.MULTILINE)) == 6


def test_padded_groups_hold_every_answer_behind_its_prompt() -> None:
    made = groups.make_groups(5, answers=2, prompt=20, answer=10)
    rows = [row[row > 0].tolist() for tokens, _ in groups.padded(made, rows=4) for row in tokens]
    assert rows == [
        each.unshared().tokens[start:stop].tolist() for each in made for start, stop in each.unshared().bounds
    ]


@pytest.mark.slow
def test_mixers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    mixers.main(["--smoke"])
    assert len(re.findall(r"^\| (falcon_h1|lfm2) ", capsys.readouterr().out, re.MULTILINE)) == 2


@pytest.mark.slow
def test_prefill_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    prefill.main(["--smoke"])
    assert len(re.findall(r"^\| (flan|orca|stack) ", capsys.readouterr().out, re.MULTILINE)) == 3


@pytest.mark.slow
def test_scoring_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    scoring.main(["--smoke"])
    found = re.findall(r"^\| \d+ (?:texts|answers).* (\S+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert len(found) == 8
    assert all(float(difference) < 1e-5 for difference in found)


def test_processes_that_fail_are_not_measured() -> None:
    with pytest.raises(RuntimeError, match="a process of the benchmark failed"):
        text.in_processes(fail, 2)


def test_a_cost_has_the_processes_in_it() -> None:
    cost, result = text.measured(lambda: text.in_processes(burn, 2))
    assert result is None
    assert cost.cpu >= 0.18  # the system counts in hundredths
    assert cost.seconds >= 0.1


def fail(number: int) -> None:
    raise SystemExit(number)


def burn(number: int) -> None:
    while time.process_time() < 0.1:
        pass


class Counting(WordTokenizer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        self.texts.append(text)
        made: list[int] = super().encode(text, add_bos=add_bos, add_eos=add_eos)
        return made
