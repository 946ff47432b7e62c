import logging
import subprocess
import sys
import warnings

import pytest
import torch

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.accounting import Ledger
from streampack.distributed.world import World
from streampack.losses import label_weights
from streampack.training.progress import MetricLogger, StepMeter, bar, memory_metrics, stream_totals, summary

CPU = torch.device("cpu")
ROWS = [{"tokens": [1, 2, 3], "labels": [-100, 2, 3]} for _ in range(3)]


def batches():
    return PackedDataLoader(IterablePackedDataset(ROWS, max_seq_len=4, num_lanes=1), batch_size=2)


@pytest.mark.parametrize(("loss_norm", "weight"), [("token", 6), ("sample", 3)])
def test_a_step_is_counted_over_its_batches(loss_norm, weight):
    meter = StepMeter(World(), CPU)
    meter.start()
    for batch in batches():
        meter.add(batch, torch.tensor(6.0), label_weights(batch, loss_norm=loss_norm))
    assert meter.batches == 2
    assert float(meter.reduce()) == pytest.approx(1 / weight)
    meter.stop()
    assert meter.tokens == 9
    metrics = meter.metrics()
    assert metrics["loss"] == pytest.approx(12.0 / weight)
    assert metrics["trained_tokens"] == 6
    assert metrics["samples_per_step"] == 3
    assert metrics["padding"] == 1 - 9 / 16


def test_a_report_is_the_loss_of_its_step_and_the_rates_since_the_one_before(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    meter = StepMeter(World(), CPU)
    [batch, _] = batches()
    for loss in 4.0, 8.0, 2.0:
        meter.start()
        meter.add(batch, torch.tensor(loss), label_weights(batch, loss_norm="token"))
        meter.reduce()
        meter.stop()
        next(clock)  # a validation, say: not counted
        if loss == 8.0:
            first = meter.metrics()
    assert (first["loss"], first["samples_per_step"], first["trained_tokens"]) == (2.0, 2, 4)
    assert first["tokens_per_second"] == 12 / 3  # two steps of a second, and one to read the numbers
    second = meter.metrics()
    assert (second["loss"], second["samples_per_step"]) == (0.5, 2)
    assert second["tokens_per_second"] == 6 / 2
    assert meter.tokens == 18


def test_a_step_without_trained_tokens_has_loss_0_and_no_gradients():
    meter = StepMeter(World(), CPU)
    meter.start()
    assert float(meter.reduce()) == 0
    meter.stop()
    assert meter.metrics()["loss"] == 0


def test_totals_of_a_stream():
    loader = batches()
    for _ in loader:
        pass
    ledger, epoch = stream_totals(loader, World())
    assert (ledger.samples, ledger.packed, epoch) == (3, 9, 0)


def test_only_rank_0_logs(tmp_path):
    node = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(tmp_path),
        "filename": "log.txt",
    }
    silent = MetricLogger(node, world=World(rank=1, size=2))
    silent.log({"loss": 1.0}, step=3)
    silent.log_config({})
    silent.close()
    assert list(tmp_path.iterdir()) == []
    logger = MetricLogger(node, world=World())
    logger.log({"loss": 1.5}, step=3)
    logger.close()
    assert "Step 3 | loss:1.5" in (tmp_path / "log.txt").read_text()


def test_what_a_logger_prints_stands_on_lines_of_its_own(monkeypatch, capsys):
    """As on a terminal, where the bar and the logger write to one place."""
    place = sys.stdout
    monkeypatch.setattr(sys, "stderr", place)
    logger = MetricLogger({"_component_": "torchtune.training.metric_logging.StdoutLogger"}, world=World())
    with bar(3, done=1) as progress:
        for step in 2, 3:
            progress.update()
            progress.set_postfix_str("loss 1.5")
            logger.log({"loss": 1.5}, step=step)
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "going on from step 1 of 3"
    for step in 2, 3:
        [line] = [line for line in lines if f"Step {step} |" in line]
        shown = line.rpartition("\r")[2]  # what is before it on the line was wiped out
        assert shown == f"Step {step} | loss:1.5 "
        assert not line.rpartition("\r")[0].rpartition("\r")[2].strip()


def test_no_gpu_no_memory_to_report():
    assert memory_metrics(World(), CPU) == {}


def test_the_summary_balances_the_tokens():
    ledger = Ledger(samples=4, tokens_in=100, packs=1, slots=80, packed=70)
    ledger.drop("truncated", 10)
    text = summary(ledger, seconds=2.0, tokens=70, validation=[(0, 7.5), (9, 4.25)])
    assert "packs        1, from 4 samples that were read, 12.50% padding" in text
    assert "100 in = 70 packed + 10 dropped (10 truncated) + 20 buffered" in text
    assert "35 tokens/s" in text
    assert "7.500 (step 0) -> 4.250 (step 9)" in text
    assert "broken" not in text
    ledger.drop("bad", 0)
    text = summary(ledger, seconds=2.0, tokens=70, validation=[])
    assert "bad records  1 skipped" in text.splitlines()


def meter_after(*steps, untrained=None):
    """A meter after steps of (tokens, whether they are trained), each a pack of 8."""
    meter = StepMeter(World(), CPU, untrained=untrained)
    for tokens, trained in steps:
        rows = [{"tokens": [1] * tokens, "labels": [1 if trained else -100] * tokens}]
        meter.start()
        for batch in PackedDataLoader(IterablePackedDataset(rows, max_seq_len=8)):
            meter.add(batch, torch.tensor(0.0), label_weights(batch, loss_norm="token"))
        meter.reduce()
        meter.stop()
    return meter


@pytest.mark.parametrize(
    "steps",
    [
        [(8, False)],
        [(2, False), (8, True)],  # little, but nothing was trained before
        [(8, True), (4, False), (8, True)],
    ],
)
def test_a_step_that_trains_nothing_is_an_error(steps):
    with pytest.raises(
        ValueError, match=rf"^1 of {len(steps)} step\(s\) trained nothing: .*data.untrained=drop"
    ):
        meter_after(*steps).metrics()
    with pytest.raises(ValueError, match="trained nothing"):
        meter_after(*steps).check()
    meter_after(*steps, untrained="keep").metrics()


def test_what_is_left_at_an_epochs_end_may_train_nothing():
    meter_after((8, True), (3, False)).metrics()


MESSAGES = """
import logging, sys, warnings
from streampack.training.progress import bar
with bar(4, done=0) as progress:
    progress.update()
    logging.getLogger("streampack.somewhere").warning("a log message")
    warnings.warn("a warning")
    progress.set_postfix_str("loss 1.000")
    progress.update()
warnings.warn("afterwards")
"""


def test_warnings_in_the_loop_stand_on_lines_of_their_own():
    """In a process of its own: pytest catches warnings and log messages, and would hide a broken line."""
    done = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, check=True)
    lines = [line.rpartition("\r")[2] for line in done.stderr.split("\n")]
    assert "a log message" in lines
    assert "<string>:7: UserWarning: a warning" in lines
    assert "<string>:10: UserWarning: afterwards" in lines
    assert "2/4" in done.stderr


def test_the_bar_leaves_handlers_and_warnings_as_they_were():
    handlers, show = list(logging.root.handlers), warnings.showwarning
    with bar(2, done=0) as progress:
        with pytest.warns(UserWarning, match="seen"):
            warnings.warn("seen", stacklevel=1)
        progress.update()
    with pytest.raises(KeyboardInterrupt), bar(2, done=0):
        raise KeyboardInterrupt
    assert (logging.root.handlers, warnings.showwarning) == (handlers, show)
