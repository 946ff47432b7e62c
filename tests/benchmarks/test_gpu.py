"""`make gpu`: that its rows compare like with like, that it goes on where it stopped, and that it says what it saw."""

import doctest
import json
import sys
import time
from dataclasses import asdict, replace
from importlib import import_module
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import machine, tables, wheels
from benchmarks.gpu import row as one_row
from benchmarks.gpu.batches import BATCHES, samples_of, steps_of
from benchmarks.gpu.journal import Journal, key_of
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.model import MODELS, Shape, utilization
from benchmarks.gpu.run import count, gpu_tests, run, run_row, run_tests
from benchmarks.gpu.settings import CPU_PARTS, CPU_ROWS, GPU_PARTS, GPU_ROWS, ROWS, TESTS, Settings
from streampack.attention import dense_mask

PART = "flan-256"
FILE = "tests/test_kernels.py"  # stands for those that have tests marked gpu
TINY = CPU_PARTS[PART]
STACK = replace(
    TINY, lengths="stack", max_seq_len=512, most_places=700
)  # many that were cut off; steps in parts
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "about": "140 GiB"}


# ---- batches


def rows_of_tokens(kind, step):
    """The places of every row of a step's batches, and the lengths of its segments, padding's included."""
    for batch in step.passes:
        if kind == "stock":
            yield from ((pack["tokens"], pack["labels"], pack["seq_lens"].tolist()) for pack in batch)
        else:
            for row, labels, lengths in zip(batch.tokens, batch.labels, batch.seq_lens.tolist(), strict=True):
                yield row, labels, [length for length in lengths if length]


def sequences(kind, steps):
    """The real sequences of all steps, as tuples of tokens. No sample holds a 0, and all padding is 0."""
    for step in steps:
        for row, _, lengths in rows_of_tokens(kind, step):
            yield from (tuple(s.tolist()) for s in row.split(lengths) if s[0] != 0)


@pytest.mark.parametrize("settings", [TINY, STACK], ids=["flan", "stack"])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_sample_comes_once(kind, settings):
    samples = samples_of(settings)
    steps = steps_of(kind, samples, settings)
    found = list(sequences(kind, steps))
    there = [tuple(sample["tokens"].tolist()) for sample in samples]
    if kind == "wrapped":  # cut anywhere, but nothing lost and nothing moved
        assert [*chain(*found)] == [*chain(*there)]
    else:
        assert sorted(found) == sorted(there)
    assert sum(step.tokens for step in steps) == sum(map(len, there))
    assert len(steps) > settings.steps - 1  # enough to time


@pytest.mark.parametrize("settings", [TINY, STACK], ids=["flan", "stack"])
@pytest.mark.parametrize("kind", BATCHES)
def test_a_step_says_what_it_holds(kind, settings):
    """Counted place by place and pair by pair."""
    for step in steps_of(kind, samples_of(settings), settings):
        tokens = places = pairs = trained = 0
        for row, labels, lengths in rows_of_tokens(kind, step):
            real = row != 0
            segments = [len(row)] if kind == "wrapped" else lengths
            sees = dense_mask(torch.tensor([segments]), max_seq_len=len(row))[0]
            tokens += int(real.sum())
            places += len(row)
            pairs += int((sees & real[:, None] & real[None, :]).sum())
            trained += int((labels[1:] != -100).sum())
        assert (step.tokens, step.places, step.pairs, step.trained) == (tokens, places, pairs, trained)


@pytest.mark.parametrize("kind", ["padded", "grouped", "flattened"])
def test_passes_keep_to_the_limit(kind):
    steps = steps_of(kind, samples_of(STACK), STACK)
    places = [
        sum(len(row) for row, _, _ in rows_of_tokens(kind, step._replace(passes=[batch])))
        for step in steps
        for batch in step.passes
    ]
    assert max(places) <= STACK.most_places
    assert len(places) > len(steps)  # else nothing was tried
    whole = replace(STACK, most_places=10**6)
    assert all(len(step.passes) == 1 for step in steps_of(kind, samples_of(whole), whole))


def test_mini_batches_arrive_in_order_and_are_padded_to_their_longest():
    samples = samples_of(TINY)
    settings = replace(TINY, most_places=10**6)
    padded, flat = (steps_of(kind, samples, settings) for kind in ("padded", "flattened"))
    assert len(padded) == len(flat) == TINY.steps + 1
    arrived = [sample["tokens"].tolist() for sample in samples]
    per_step = len(arrived) // len(padded)
    for number, (rows, row) in enumerate(zip(padded, flat, strict=True)):
        expected = arrived[number * per_step : (number + 1) * per_step]
        (rows,), (row,) = rows.passes, row.passes
        longest = max(map(len, expected))
        assert rows.tokens.tolist() == [sample + [0] * (longest - len(sample)) for sample in expected]
        assert row.tokens.tolist() == [[*chain(*expected)]]
        assert row.input_pos.tolist() == [[i for sample in expected for i in range(len(sample))]]


def test_grouping_pads_less():
    settings = replace(TINY, most_places=10**6, steps=12)
    padded, grouped, packed = (
        sum(step.places for step in steps_of(kind, samples_of(settings), settings))
        for kind in ("padded", "grouped", "packed")
    )
    assert padded > 1.2 * grouped
    assert padded > 1.2 * packed


# ---- FLOPs


def test_flops_by_hand():
    shape = Shape(vocab_size=10, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=4, intermediate_dim=3)
    # q and output 4 x 4, k and v 4 x 2, three of 4 x 3, output 4 x 10
    assert shape.matmul_weights == 2 * 16 + 2 * 8 + 3 * 12 + 40 == 124
    # 5 tokens, see 1 + 2 + 3 + 4 + 5 = 15: of 2 heads with 2 channels, 2 for the score and 2 for the sum, times 3
    flops = shape.train_flops(tokens=5, pairs=15)
    assert flops == 6 * 124 * 5 + 3 * 15 * 2 * 2 * (2 + 2) == 4440
    assert utilization(shape, tokens=5, pairs=15, seconds=2.0, device="NVIDIA H200") == 4440 / 2 / 989e12
    assert utilization(shape, tokens=5, pairs=15, seconds=2.0, device="a toaster") is None


def test_flops_are_those_that_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shape = Shape(vocab_size=50, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=48)
    with torch.random.fork_rng():
        model = shape.build(device="cpu", dtype="fp32", seed=0)
    counter = FlopCounterMode(display=False)
    with (
        counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # which multiplies whole squares: 16 x 16 pairs in each of 2 rows
        torch.cat(model(torch.ones(2, 16, dtype=torch.int64)), 1).sum().backward()
    assert counter.get_total_flops() == shape.train_flops(tokens=32, pairs=2 * 16 * 16)


def test_the_model_is_llama_3_2_1b():
    from torchtune.models.llama3_2 import llama3_2_1b

    def shapes(model):
        return {name: value.shape for name, value in model.state_dict().items()}

    with torch.random.fork_rng():
        ours = MODELS["1b"].build(device="meta", dtype="bf16", seed=0)
    with torch.device("meta"):
        theirs = llama3_2_1b()
    assert shapes(ours) == shapes(theirs)
    assert next(ours.parameters()).dtype == torch.bfloat16
    norms = sum(value.numel() for name, value in theirs.named_parameters() if name.endswith("scale"))
    assert MODELS["1b"].matmul_weights == sum(value.numel() for value in theirs.parameters()) - norms


# ---- the command: what runs, what is kept


def result(**changes):
    return {
        "outcome": "measured", "steps": 4, "passes": 4, "tokens": 4000, "padding": 0.25, "seconds": 2.0,
        "step_median": 0.5, "step_p10_p90": [0.4, 0.75], "peak_bytes": 3 * 2**30, "mfu": 0.125, "compiled": 3,
        "compiled_late": 0, "loss": 10.4,
    } | changes  # fmt: skip


class Rows:
    """Stands in for the processes of rows and tests: remembers which were run, and gives what was set."""

    def __init__(self, monkeypatch):
        self.ran = []
        self.outcomes = {}
        monkeypatch.setattr(command, "run_row", self.run_row)
        monkeypatch.setattr(command, "run_tests", self.run_tests)
        monkeypatch.setattr(command, "gpu_tests", lambda: [FILE, "tests/test_more.py"])
        monkeypatch.setattr(command, "ask", lambda device: MACHINE)

    def run_row(self, name, settings, *, device, limit):
        self.ran.append(name)
        return self.outcomes.get(name, result())

    def run_tests(self, file, *, limit):
        self.ran.append(file)
        return {"outcome": "measured", "passed": 3, "failed": 0, "skipped": 1, "failures": [], "seconds": 9.0}


@pytest.fixture
def rows(monkeypatch):
    return Rows(monkeypatch)


def test_tests_run_first_and_a_later_call_runs_nothing_again(rows, tmp_path, capsys):
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert rows.ran == [FILE, *CPU_ROWS]
    assert command.main(arguments) == 0
    assert rows.ran == [FILE, *CPU_ROWS]
    assert (tmp_path / "gpu-nvidia-h200.md").read_text() in capsys.readouterr().out


def test_a_later_call_goes_on_with_what_is_open(rows, tmp_path):
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    command.main([*arguments, "--parts", PART, "--rows", "varlen", "padding"])
    assert rows.ran == ["padding", "varlen"]
    assert command.main(arguments) == 0
    assert rows.ran[2:] == [FILE, *(row for row in CPU_ROWS if row not in ("padding", "varlen"))]


def test_a_row_that_fails_stops_no_other_and_runs_again_when_asked(rows, tmp_path):
    rows.outcomes = {
        "padding": {"outcome": "out of memory"},
        "varlen": {"outcome": "failed: ended with exit code -9"},
    }
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART]
    assert command.main(arguments) == 1
    assert rows.ran == list(CPU_ROWS)
    assert command.main(arguments) == 1  # settled, and still a failure
    assert rows.ran == list(CPU_ROWS)
    rows.outcomes = {}
    assert command.main([*arguments, "--retry", "--minutes", "0"]) == 1  # no time to mend it
    assert command.main([*arguments, "--retry"]) == 0
    assert rows.ran == [*CPU_ROWS, "varlen"]  # out of memory is a result


def test_fresh_starts_over_and_leaves_other_devices_alone(rows, tmp_path, monkeypatch):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART, "--rows", "padding"]
    command.main(arguments)
    monkeypatch.setattr(command, "ask", lambda device: MACHINE | {"device": "NVIDIA A100"})
    command.main(arguments)
    command.main([*arguments, "--fresh"])
    assert rows.ran == ["padding"] * 3
    monkeypatch.setattr(command, "ask", lambda device: MACHINE)
    command.main(arguments)
    assert rows.ran == ["padding"] * 3


def test_on_a_gpu_every_file_of_tests_runs_and_every_part(rows, tmp_path):
    assert command.main(["--out", str(tmp_path)]) == 0
    assert rows.ran == [FILE, "tests/test_more.py", *GPU_ROWS * 6]


def test_tests_run_again_when_the_code_has_changed(rows, tmp_path, monkeypatch):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", TESTS]
    command.main(arguments)
    command.main(arguments)
    assert rows.ran == [FILE]
    monkeypatch.setattr(command, "code_digest", lambda: "changed")
    command.main(arguments)
    assert rows.ran == [FILE, FILE]


def test_other_settings_are_other_rows(rows, tmp_path, monkeypatch):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART, "--rows", "padding"]
    command.main(arguments)
    monkeypatch.setattr(command, "parts_of", lambda device: {PART: replace(TINY, seed=1)})
    command.main(arguments)
    assert rows.ran == ["padding"] * 2


def test_rows_and_table_are_there_when_the_call_is_ended(rows, tmp_path, monkeypatch):
    def run_row(name, settings, *, device, limit):
        if name == "ceiling":
            raise KeyboardInterrupt
        return result()

    monkeypatch.setattr(command, "run_row", run_row)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    table = (tmp_path / "gpu-nvidia-h200.md").read_text()
    assert ROWS["varlen"].label in table
    assert ROWS["ceiling"].label not in table
    assert len(Journal(tmp_path / "gpu.jsonl").rows) == 2


def test_without_time_rows_stay_open(rows, tmp_path, capsys):
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    assert command.main([*arguments, "--minutes", "0"]) == 0
    assert rows.ran == []
    assert f"{1 + len(CPU_ROWS)} of {1 + len(CPU_ROWS)} rows are open" in capsys.readouterr().out


def test_a_row_ended_by_its_own_limit_has_failed_and_one_ended_by_the_parts_is_open(rows, monkeypatch):
    limits = []
    monkeypatch.setattr(command, "run_row", lambda *_, device, limit: limits.append(limit))
    job = command.Job(PART, TINY, "padding")
    done = command.run_job(job, device="cpu", seconds=command.ROW_SECONDS + 1)
    assert done == {"outcome": f"failed: still ran after {command.ROW_SECONDS} s"}
    assert command.run_job(job, device="cpu", seconds=command.ROW_SECONDS - 1) is None
    assert limits == [command.ROW_SECONDS, command.ROW_SECONDS - 1]


def test_each_part_has_time_of_its_own(rows, monkeypatch):
    """And all stay under ten minutes: a part ends when its time is up, the next one begins."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def run_row(name, settings, *, device, limit):
        now[0] += min(200, limit)
        return result() if limit >= 200 else None

    monkeypatch.setattr(command, "run_row", run_row)
    jobs = [command.Job(part, TINY, row) for part in ("a", "b") for row in ("1", "2", "3", "4")]
    kept = []
    left = command.work(jobs, device="cpu", ends=1e9, keep=lambda job, done: kept.append(job[::2]))
    assert kept == [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]
    assert [job[::2] for job in left] == [("a", "3"), ("a", "4"), ("b", "3"), ("b", "4")]
    assert now[0] <= 2 * 600


def test_an_unknown_part_or_row_is_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--parts", "flan-4096"])
    assert "--parts: flan-4096 unknown; choose of tests, flan-256" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--rows", "dense"])  # needs no GPU
    assert "--rows: dense unknown; choose of padding, varlen" in capsys.readouterr().err


def test_every_row_and_part_is_known():
    assert {*GPU_ROWS, *CPU_ROWS} == set(ROWS)
    assert list(GPU_PARTS)[:2] == [TESTS, "flan-4096"]
    assert len({settings.key() for settings in GPU_PARTS.values() if settings}) == 6
    for settings in filter(None, GPU_PARTS.values()):
        assert settings == Settings(**json.loads(json.dumps(asdict(settings))))


# ---- the journal


def line(row, **changes):
    return {
        "part": PART,
        "settings": "abc",
        "row": row,
        "call": "2026-11-20T09:00:00",
        **MACHINE,
        **result(**changes),
    }


def test_rows_outlive_the_process_and_the_last_one_counts(tmp_path):
    journal = Journal(tmp_path / "new" / "gpu.jsonl")
    for row in (line("padding"), line("varlen"), line("padding", tokens=5000)):
        journal.add(row)
    again = Journal(journal.path)
    assert again.rows == journal.rows
    assert [row["tokens"] for row in again.rows.values()] == [5000, 4000]
    again.forget({key_of(line("padding"))})
    assert [row["row"] for row in Journal(journal.path).rows.values()] == ["varlen"]


def test_a_torn_last_line_is_measured_again(tmp_path):
    journal = Journal(tmp_path / "gpu.jsonl")
    journal.add(line("padding"))
    with journal.path.open("a") as file:
        file.write(json.dumps(line("varlen"))[:40])
    journal = Journal(journal.path)
    assert [row["row"] for row in journal.rows.values()] == ["padding"]
    journal.add(line("ceiling"))
    assert [row["row"] for row in Journal(journal.path).rows.values()] == ["padding", "ceiling"]


# ---- the processes


def test_end_to_end(tmp_path, capsys):
    """Two rows in processes of their own, and a second call that starts none."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART, "--rows", "padding", "varlen"]
    assert command.main(arguments) == 0
    written = (tmp_path / "gpu.jsonl").read_bytes()
    padding, varlen = map(json.loads, written.splitlines())
    assert [padding["row"], varlen["row"]] == ["padding", "varlen"]
    for row in (padding, varlen):
        assert row["outcome"] == "measured"
        assert row["steps"] >= TINY.steps - 1
        assert row["seconds"] > 0
        assert row["compiled"] == 0
        assert 10 < row["loss"] < 11  # ln(32,000) is 10.4
    assert padding["padding"] > 0.2 > varlen["padding"]
    begun = time.monotonic()
    assert command.main(arguments) == 0
    assert time.monotonic() - begun < 60
    assert (tmp_path / "gpu.jsonl").read_bytes() == written
    assert "| packed, varlen" in capsys.readouterr().out


def test_a_row_that_breaks_says_why():
    done = run_row("padding", replace(TINY, model="2b"), device="cpu", limit=120)
    assert done == {"outcome": "failed: KeyError: '2b'"}


def test_tests_marked_gpu_are_found_and_counted():
    file = "tests/attention/test_packed_equals_alone.py"
    assert file in gpu_tests()
    assert str(Path(__file__).relative_to(ROOT)) not in gpu_tests()
    done = run_tests(file, limit=120)
    assert done["outcome"] == "measured"
    assert done["failed"] == 0
    assert done["passed"] + done["skipped"] > 0
    assert done["skipped" if not torch.cuda.is_available() else "passed"] > 0
    assert run_tests("tests/no_such_file.py", limit=120)["outcome"].startswith(
        "failed: pytest ended with exit code 4"
    )


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (ValueError("one\ntwo"), "failed: ValueError: one"),
        (ImportError("no such thing"), "failed: ImportError: no such thing"),
    ],
)
def test_what_becomes_of_an_error(error, outcome, monkeypatch, capsys):
    def measure(*_, device):
        raise error

    monkeypatch.setattr(one_row, "measure", measure)
    monkeypatch.setattr(
        sys, "argv", ["row", json.dumps({"row": "padding", "device": "cpu", "settings": asdict(TINY)})]
    )
    one_row.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"outcome": outcome}


def test_without_flash_attn_its_row_says_so(monkeypatch):
    monkeypatch.setattr(one_row, "find_spec", lambda name: None)
    done = one_row.measure("flash", TINY, device="cpu")
    assert done == {"outcome": "not installed (flash_attn or flash_attn_interface)"}


def test_a_process_that_dies_without_a_word(monkeypatch):
    from benchmarks.gpu import run as processes

    monkeypatch.setattr(processes, "run", lambda *_, limit: (-9, ""))
    assert run_row("padding", TINY, device="cpu", limit=9) == {"outcome": "failed: ended with exit code -9"}


def test_at_the_limit_its_children_end_too(tmp_path):
    started = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(started)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    assert run(["-c", code], limit=3) == (None, "")
    child = int(started.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_without_a_gpu_it_says_what_to_do():
    with pytest.raises(SystemExit, match="sees no CUDA device; run it where there is one, or set DEVICE=cpu"):
        machine.ask("cuda")


# ---- tables


def test_a_table_says_what_was_and_was_not_measured():
    done = [
        line("padding", passes=7),
        line("varlen", seconds=1.0, compiled=4, compiled_late=1),
        line("ceiling", seconds=0.8, mfu=None, peak_bytes=None),
        line("flash") | {"outcome": "not installed (flash_attn)"},
    ]
    text = tables.draw({TESTS: None, PART: TINY}, done)
    body = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")
    ]
    assert body[0] == list(tables.HEADER)
    none = ["-"] * (len(tables.HEADER) - 1)
    assert body[2:] == [
        ["padding to the longest", "2,000", "1.00", "40.0%", "500", "400 to 750", "3.0", "12.5%", "3", "25.00%"],
        ["packed, varlen", "4,000", "2.00", "80.0%", "500", "400 to 750", "3.0", "12.5%", "4 (1 late)", "25.00%"],
        ["packed, flash: not installed (flash_attn)", *none],
        ["ceiling: no boundaries", "5,000", "2.50", "100.0%", "500", "400 to 750", "-", "-", "3", "25.00%"],
    ]  # fmt: skip
    assert text.startswith("# Training on NVIDIA H200\n\n2026-11-20 · NVIDIA H200 · 140 GiB")
    assert "padding to the longest: 7 passes for 4 steps." in text
    assert "calls" not in text
    assert "activation checkpointing on, layers compiled off" in text


def test_without_padding_or_ceiling_there_are_no_ratios():
    text = tables.draw({PART: TINY}, [line("varlen")])
    assert "| packed, varlen |      2,000 |         - |          - |" in text


def test_rows_of_several_calls_are_said_to_be():
    done = [line("padding"), line("varlen") | {"call": "2026-11-21T09:00:00"}]
    text = tables.draw({PART: TINY}, done)
    assert "The rows come from 2 calls" in text
    assert "2026-11-20 to 2026-11-21" in text


def test_the_tests_stand_in_their_own_section():
    seen = count(
        '<testsuites><testsuite><testcase classname="tests.test_a" name="test_b"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error/></testcase><testcase name="e"/>'
        "</testsuite></testsuites>"
    )
    assert (seen["passed"], seen["failed"], seen["skipped"]) == (1, 2, 1)
    assert command.failed(seen)
    row = {"part": TESTS, "settings": "", "row": FILE, "call": "2026-11-20T09:00:00", **MACHINE, **seen}
    broken = {key: row[key] for key in ("part", "call", *MACHINE)} | {
        "row": "tests/b.py",
        "outcome": "failed: 4",
    }
    text = tables.draw({TESTS: None}, [row | {"seconds": 61.0}, broken])
    assert "| tests/test_kernels.py |      1 |      2 |       1 |      61 |" in text
    assert "| tests/b.py: failed: 4 |      - |" in text
    assert "- **failed**: `tests.test_a::test_b`" in text


# ---- wheels


def test_what_is_lacking(tmp_path):
    def wheel(name, version):
        return tmp_path / f"{name}-{version}-py3-none-any.whl"

    there = wheel("torchtune", "0.6.1")
    other = wheel("torchtune", "0.7.0")  # it must be the version that is fetched
    any_version = wheel("pytest", "1.0")
    absent = wheel("no_such_package", "1.0")
    assert wheels.lacking([there, any_version]) == []
    assert wheels.lacking([there, other, any_version, absent]) == [other, absent]


def test_versions_come_from_the_constraints():
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not [name for name in wheels.PACKAGES if name not in pinned]
    assert set(wheels.EXACT) < set(wheels.PACKAGES)


def test_without_wheels_it_says_where_they_come_from(tmp_path):
    with pytest.raises(SystemExit, match="run `make wheels` where there is network and copy the folder here"):
        wheels.install(folder=tmp_path, site=tmp_path / "site")


# ---- the examples in the docstrings, which pytest collects from streampack only


@pytest.mark.parametrize("name", ["settings", "model", "batches", "run"])
def test_examples(name):
    found = doctest.testmod(import_module(f"benchmarks.gpu.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
