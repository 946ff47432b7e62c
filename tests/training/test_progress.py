import logging
import sys

import pytest

from streampack.accounting import Ledger
from streampack.distributed.world import World
from streampack.training.config import read_config
from streampack.training.progress import MetricLogger, bar, summary
from streampack.training.record import METRICS_FILE, read_metrics
from tests.harness.tiny import tiny_config


def test_only_rank_0_logs(tmp_path):
    config = read_config(tiny_config(tmp_path))
    (tmp_path / "out").mkdir()
    silent = MetricLogger(config, world=World(rank=1, size=2))
    silent.log({"loss": 1.0}, step=3)
    silent.log_config({})
    silent.close()
    assert list((tmp_path / "out").iterdir()) == []
    logger = MetricLogger(config, world=World())
    logger.log({"loss": 1.5}, step=3)
    logger.close()
    assert "Step 3 | loss:1.5" in (tmp_path / "out" / "logs" / "log.txt").read_text()
    assert read_metrics(tmp_path / "out" / METRICS_FILE) == {3: {"loss": 1.5}}


def test_a_printing_logger_gets_lines_of_its_own(tmp_path, monkeypatch, capsys):
    """As on a terminal, where the bar and the logger write to one place."""
    place = sys.stdout
    monkeypatch.setattr(sys, "stderr", place)
    node = {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
    logger = MetricLogger(read_config(tiny_config(tmp_path, metric_logger=node)), world=World())
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


def test_the_summary_balances_the_tokens():
    ledger = Ledger(samples=4, tokens_in=100, packs=1, capacity=80, packed=70)
    ledger.drop("truncated", 10)
    result = {"ledger": ledger, "seconds": 2.0, "tokens": 70, "held_out": [(0, 7.5), (9, 4.25)]}
    text = summary(result)
    assert "packs        1, from 4 samples that were read, 12.50% padding" in text
    assert "100 in = 70 packed + 10 dropped (10 truncated) + 20 buffered" in text
    assert "35 tokens/s" in text
    assert "7.500 (step 0) -> 4.250 (step 9)" in text
    assert "broken" not in text
    ledger.drop("bad", 0)
    assert "bad records  1 skipped" in summary(result).splitlines()


def test_log_messages_in_the_loop_get_lines_of_their_own(capsys):
    log = logging.getLogger("streampack.somewhere")
    with bar(4, done=0) as progress:
        progress.update()
        log.warning("a log message")
        progress.update()
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.split("\n")]
    assert "a log message" in lines


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (59, "going on from step 59 of 60"),
        (
            130,
            "at step 130: max_steps or epochs end the run at step 60",
        ),
    ],
)
def test_a_run_that_is_past_its_end_says_so(done: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It said that it went on from step 130 of 60."""
    with bar(60, done=done):
        pass
    assert capsys.readouterr().out == said + "\n"
