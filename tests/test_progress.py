import torch

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.metrics import Ledger
from streampack.training.progress import StepMeter, summary


def test_a_step_is_counted_over_its_batches():
    rows = [{"tokens": [1, 2, 3], "labels": [-100, 2, 3]} for _ in range(3)]
    meter = StepMeter()
    for batch in PackedDataLoader(IterablePackedDataset(rows, max_seq_len=4), batch_size=2):
        meter.add(batch, torch.tensor(6.0), int(batch.num_trained))
    metrics = meter.metrics()
    assert metrics["loss"] == 12.0 / 6
    assert metrics["trained_tokens"] == 6
    assert metrics["samples_per_step"] == 3
    assert metrics["padding"] == 1 - 9 / 16


def test_a_step_without_trained_tokens_has_loss_0():
    assert StepMeter().metrics()["loss"] == 0


def test_the_summary_balances_the_tokens():
    ledger = Ledger(samples=4, tokens_in=100, packs=1, slots=80, packed=70)
    ledger.drop("truncated", 10)
    text = summary(ledger, seconds=2.0, tokens=70, validation=[(0, 7.5), (9, 4.25)])
    assert "1 from 4 samples, 12.50% padding" in text
    assert "100 in = 70 packed + 10 dropped (10 truncated) + 20 buffered" in text
    assert "35 tokens/s" in text
    assert "7.500 (step 0) -> 4.250 (step 9)" in text
