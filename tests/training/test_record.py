"""The record of a run: read as it was written, through resumes and kills."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.training.record import METRICS_FILE, MetricRecord, read_metrics


def test_no_file_is_an_empty_record(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / METRICS_FILE) == {}


def test_a_line_cut_off_by_a_kill_is_left_out_and_a_resume_writes_on(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    record = MetricRecord(path)
    record.write({"loss": 4.0}, step=1)
    record.write({"loss": 3.0}, step=2)
    with path.open("a") as file:
        file.write('{"step":3,"lo')
    assert sorted(read_metrics(path)) == [1, 2]
    MetricRecord(path, resumed=2).write({"loss": 2.0}, step=3)
    assert read_metrics(path) == {1: {"loss": 4.0}, 2: {"loss": 3.0}, 3: {"loss": 2.0}}
    assert list(tmp_path.iterdir()) == [path]


def test_a_validation_is_merged_with_the_step_after_which_it_was(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    record = MetricRecord(path)
    record.write({"loss": 4.0}, step=5)
    record.write({"validation_loss": 4.5}, step=5)
    assert read_metrics(path) == {5: {"loss": 4.0, "validation_loss": 4.5}}


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    MetricRecord(path).write({"loss": math.nan, "grad_norm": math.inf, "step_size": 1}, step=1)
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "grad_norm": None, "step_size": 1}
    [values] = read_metrics(path).values()
    assert math.isnan(values["loss"])
    assert math.isnan(values["grad_norm"])


@settings(max_examples=50, deadline=None)
@given(
    starts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 4)), max_size=5),
)
def test_of_a_step_that_was_trained_twice_the_last_counts(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int, int]]
) -> None:
    """Each start goes on from a step at or before where the last one ended, and logs every n-th step."""
    path = tmp_path_factory.mktemp("record") / METRICS_FILE
    expected: dict[int, dict[str, float]] = {}
    end = 0
    for start, (before, steps, every) in enumerate(starts):
        resumed = max(0, end - before) if start else None
        record = MetricRecord(path, resumed=resumed)
        begin = resumed or 0
        expected = {step: values for step, values in expected.items() if step <= begin}
        for step in range(begin + 1, begin + steps + 1):
            if step % every == 0:
                record.write({"start": float(start)}, step=step)
                expected[step] = {"start": float(start)}
        end = begin + steps
    assert read_metrics(path) == expected


def test_a_new_run_in_the_folder_removes_the_lines_of_one_that_left_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    MetricRecord(path).write({"loss": 4.0}, step=0)
    MetricRecord(path).write({"loss": 3.0}, step=1)
    assert read_metrics(path) == {1: {"loss": 3.0}}
