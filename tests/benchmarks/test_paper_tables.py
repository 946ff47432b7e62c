import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.paper import __main__ as command
from benchmarks.paper import data, picture, run, tables, train
from benchmarks.paper.settings import CPU_DATA, FULL, ROWS, SMOKE, TINY, Budget, Row
from streampack.map_style.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = np.array([5, 2, 40, 17, 40, 9])


def naive_nats(tokens: list[int]) -> float:
    """What the docstring of `urns` says, one word at a time."""
    words = [token - data.START - 1 for token in tokens[1:]]
    total = 0.0
    for i, word in enumerate(words):
        before = words[i - 1] + 1 if i else 0
        chance = data.MEMORY * data.language()[before, word] + words[:i].count(word)
        total -= math.log(chance / (data.MEMORY + i))
    return total


def test_the_floor_is_what_the_best_possible_model_needs() -> None:
    samples, nats = data.urns(LENGTHS, seed=3)
    assert [len(sample["tokens"]) for sample in samples] == LENGTHS.tolist()
    assert nats == pytest.approx(sum(naive_nats(sample["tokens"].tolist()) for sample in samples))


def test_samples_are_the_same_for_all_seeds_and_the_global_generators_are_left_alone() -> None:
    before = np.random.get_state()[1].copy(), torch.random.get_rng_state()  # noqa: NPY002
    one, other = (data.corpus_of(replace(SMOKE, seed=seed)) for seed in (0, 1))
    assert json.dumps([s["tokens"].tolist() for s in one.train]) == json.dumps(
        [s["tokens"].tolist() for s in other.train]
    )
    assert len(one.train) == SMOKE.samples
    np.testing.assert_array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.random.get_rng_state())


def test_what_is_held_out_is_not_trained() -> None:
    corpus = data.corpus_of(replace(SMOKE, validation=SMOKE.samples))
    long = [
        {tuple(sample["tokens"]) for sample in samples if len(sample["tokens"]) > 8}
        for samples in (corpus.train, corpus.validation)
    ]
    assert min(map(len, long)) > 20
    assert not long[0] & long[1]


@pytest.mark.slow
def test_docstrings_train_the_answer_and_share_no_sample_with_the_validation() -> None:
    corpus = data.corpus_of(replace(CPU_DATA["docstrings"], samples=60, validation=20))
    texts = [tuple(sample["tokens"]) for sample in corpus.train + corpus.validation]
    assert len(corpus.train) == 60
    assert len(set(texts)) == len(texts) == 80
    assert max(map(len, texts)) <= TINY.max_seq_len
    for sample in corpus.train:
        masked = sample["labels"] == -100
        assert masked[0]
        assert not masked[-1] or len(masked) == TINY.max_seq_len
        np.testing.assert_array_equal(sample["labels"][~masked], sample["tokens"][~masked])


@pytest.mark.parametrize(
    ("row", "settings", "mean", "expected"),
    [
        ("samples/random_padding", TINY, 54, (8, 1, 0.003)),
        ("wide/exact_fit", TINY, 54, (8, 1, 0.003)),
        ("narrow/exact_fit", TINY, 54, (1, 1, 0.003)),
        ("scaled/exact_fit", TINY, 32, (8, 1, 0.012)),  # 16 times as many samples a step
        ("wide/exact_fit", FULL, 435, (4, 16, 6e-4)),
        ("narrow/exact_fit", FULL, 1215, (4, 5, 6e-4)),  # the paper has 4 x 6 for The Stack
    ],
)
def test_what_a_step_is_made_of(row: str, settings, mean: float, expected: tuple) -> None:
    assert Budget.of(ROWS[row], settings, mean=mean) == pytest.approx(expected)


@pytest.fixture(scope="module")
def trained() -> dict[str, dict]:
    """A tiny epoch of a row of every kind."""
    names = ["samples/random_padding", "samples/minibatch_packing", "wide/fixed_length", "narrow/exact_fit"]
    with torch.random.fork_rng():
        return {name: train.measure(ROWS[name], SMOKE, device="cpu") for name in names}


def test_mini_batch_packing_is_padding_without_the_padding(trained: dict[str, dict]) -> None:
    padded, flat = trained["samples/random_padding"], trained["samples/minibatch_packing"]
    assert flat["steps"] == padded["steps"] == SMOKE.samples / SMOKE.batch_size
    assert flat["rows"] == padded["rows"] == SMOKE.samples
    assert flat["padding"] == 0 < padded["padding"]
    for loss in ("train_loss", "validation_loss"):
        assert flat[loss] == pytest.approx(padded[loss], abs=1e-4)


def test_a_row_counts_what_it_trains(trained: dict[str, dict]) -> None:
    corpus = data.corpus_of(SMOKE)
    tokens = sum(len(sample["tokens"]) for sample in corpus.train)
    packs = math.ceil(tokens / SMOKE.max_seq_len)
    for row in trained.values():
        assert row["tokens"] == tokens
        assert row["seconds"] > 0
        assert row["floor"] < row["validation_loss"] < math.log(corpus.vocab_size)
    wide, narrow = trained["wide/fixed_length"], trained["narrow/exact_fit"]
    assert (wide["rows"], wide["steps"]) == (packs, math.ceil(packs / SMOKE.batch_size))
    assert narrow["steps"] > wide["steps"]
    assert wide["padding"] == pytest.approx(
        1 - tokens / (wide["steps"] * SMOKE.batch_size * SMOKE.max_seq_len)
    )


def test_only_fixed_length_lets_the_samples_of_a_row_see_one_another() -> None:
    """Through the very feed of the benchmark: does what stands before a sample in its row change its logits?"""
    corpus = data.corpus_of(SMOKE)
    for method in METHODS:
        with torch.random.fork_rng():
            model, _ = train.build(corpus, SMOKE, lr=1e-3, device="cpu")
        batches = list(train.loader_of(method, corpus.train, SMOKE, Budget(4, 1, 1e-3)))
        batch, row = max(
            ((batch, row) for batch in batches for row in range(len(batch.fragments))),
            key=lambda place: len(place[0].fragments[place[1]]),
        )
        before = batch.fragments[row][0].stop - batch.fragments[row][0].start
        used = sum(f.stop - f.start for f in batch.fragments[row])
        feed = train.feed_of(method, model)
        after = slice(before, used)
        with torch.no_grad():
            logits = torch.cat(list(model(**feed(batch))), 1)[row, after]
            batch.tokens[row, :before] = data.START + 1
            changed = torch.cat(list(model(**feed(batch))), 1)[row, after]
        assert len(logits) or not METHODS[method].packed  # a row of one sample has nothing to leak
        leaks = bool(len(logits)) and not torch.equal(logits, changed)
        assert leaks == (method == "fixed_length"), method


def test_accumulated_batches_are_one_step() -> None:
    corpus = data.corpus_of(SMOKE)

    def weights(budget: Budget) -> torch.Tensor:
        with torch.random.fork_rng():
            model, _ = train.build(corpus, SMOKE, lr=1e-3, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        feed = train.feed_of("minibatch_packing", model)
        batches = train.loader_of("minibatch_packing", corpus.train, SMOKE, budget)
        step = next(train.batched(batches, budget.accumulate))
        assert len(step) == budget.accumulate
        train.train(model, optimizer, feed, step, device="cpu")
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.allclose(weights(Budget(8, 1, 0.1)), weights(Budget(2, 4, 0.1)), atol=1e-5)


def row_of(name: str, loss: float, *, seed: int, seconds: float = 2.0) -> dict:
    counts = {
        "samples": 48,
        "rows": 48,
        "steps": 6,
        "batch_size": 8,
        "accumulate": 1,
        "lr": 0.003,
        "tokens": 976,
    }
    return {
        **counts, "part": "flan", "row": name, "seed": seed, "outcome": "measured", "padding": 0.5, "seconds": seconds,
        "peak_bytes": 3 << 20, "train_loss": 4.0, "validation_loss": loss, "floor": 2.25, "load": 1.5,
        "call": "2026-01-02T03:04:05", "device": "a CPU", "about": "Linux",
    }  # fmt: skip


def rows_of(**losses: float) -> list[dict]:
    """Three seeds of each row, whose losses rise by 0.1 from seed to seed."""
    names = {
        "padding": "samples/random_padding", "flat": "samples/minibatch_packing", "leaky": "wide/fixed_length",
        "kept": "wide/fixed_length_posid", "narrow": "narrow/fixed_length_posid",
    }  # fmt: skip
    return [
        row_of(names[name], loss + seed / 10, seed=seed, seconds=1.0 if name == "flat" else 2.0)
        for seed in range(3)
        for name, loss in losses.items()
    ]


SHOWN = {"padding": 3.0, "flat": 3.05, "leaky": 3.7, "kept": 3.4, "narrow": 3.2}


def verdicts(text: str) -> list[str]:
    return re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)


def test_the_findings_are_shown_by_figures_that_show_them() -> None:
    text = tables.draw({"flan": SMOKE}, rows_of(**SHOWN))
    assert verdicts(text) == ["Shown"] * 3
    assert "at most 0.05000 apart, 0.10000 between seeds) at 2.00 to 2.00 times its token rate" in text
    assert "without position ids ends higher than with them, by +0.300 to +0.300 nats" in text
    assert "No model can have a lower validation loss than 2.250" in text
    assert "load was 1.5" in text


@pytest.mark.parametrize(
    ("change", "which"),
    [({"flat": 3.11}, 0), ({"flat": 2.89}, 0), ({"leaky": 3.39}, 1), ({"narrow": 3.41}, 2)],
)
def test_and_not_by_others(change: dict[str, float], which: int) -> None:
    said = verdicts(tables.draw({"flan": SMOKE}, rows_of(**(SHOWN | change))))
    assert [i for i, verdict in enumerate(said) if verdict == "Not shown"] == [which]


def test_a_table_has_medians_means_and_spreads() -> None:
    rows = [row_of("samples/random_padding", 3 + i, seed=i, seconds=s) for i, s in enumerate((1, 2, 9))]
    line = next(line for line in tables.draw({"flan": SMOKE}, rows).splitlines() if "random_padding" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        *("random_padding", "8 samples", "48", "6", "50.0%", "2.0", "488", "1.00", "3", "4.000 ± 0.000"),
        "4.000 ± 1.000",
    ]


def test_a_row_that_raises_is_a_failure_with_its_reason() -> None:
    job = run.Job(Row("samples", "no_such_method"), SMOKE)
    outcome = run.outcome_of(job, "cpu")["outcome"]
    assert outcome.startswith("failed: ValueError: method='no_such_method' is unknown; choose one of")


@pytest.mark.slow
def test_the_command_measures_once_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--smoke",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--rows",
        "samples/minibatch_packing",
        "--out",
        str(tmp_path),
    ]
    assert command.main(options) == 0
    kept = (tmp_path / "paper.jsonl").read_text()
    row = json.loads(kept)
    assert (row["outcome"], row["seed"], row["settings"]) == ("measured", 0, SMOKE.key())
    assert command.main(options) == 0
    assert (tmp_path / "paper.jsonl").read_text() == kept
    said = capsys.readouterr().out
    assert "1 of 1 rows are in" in said
    assert said.count("| minibatch_packing") == 2


@pytest.mark.parametrize("name", METHODS)
def test_the_picture_shows_every_token_once(name: str) -> None:
    spans = sorted(span for batch in picture.planned(name) for row in batch for span in row)
    assert sum(map(picture.length_of, spans)) == sum(picture.SAMPLES) == 63
    assert {span.index for span in spans} == set(range(12))
    for one, other in pairwise(spans):
        assert one.index != other.index or one.stop == other.start
    shapes, _ = picture.panel(name)
    widths = [int(width) + 1 for width in re.findall(r'width="(\d+)" height="10" fill', shapes)]
    assert sum(widths) == 63 * picture.TOKEN
    assert max(widths) <= picture.PANEL


def test_the_picture_is_the_committed_one() -> None:
    assert (ROOT / "docs" / "guides" / "methods.svg").read_text() == picture.draw()


def test_the_page_shows_the_kept_figures() -> None:
    """A row of docs/guides/methods.md that is in no result was made up, or has been measured again."""
    results = "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("paper-*.md"))
    kept = {tuple(cells_of(line)) for line in results.splitlines() if line.startswith("| ")}
    copied = [
        cells_of(line)
        for line in (ROOT / "docs" / "guides" / "methods.md").read_text().splitlines()
        if "±" in line
    ]
    copied = [cells for cells in copied if cells]
    assert len(copied) >= len(ROWS)
    for cells in copied:
        assert tuple(cells) in kept, cells


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
