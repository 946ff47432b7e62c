from __future__ import annotations

import numpy as np
import pytest

from streampack import IterablePackedDataset
from streampack.inspection.costs import model_work, slowest_over_mean
from streampack.packing.attention_cost import AttentionCost
from tests.harness.inspection import log_normal, token_rows


def node(**changes: object) -> dict[str, object]:
    return {
        "_component_": "torchtune.models.llama3.llama3", "vocab_size": 100, "num_layers": 3, "num_heads": 4,
        "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64, "intermediate_dim": 48, **changes,
    }  # fmt: skip


def test_operations_of_a_model_are_counted_by_hand() -> None:
    pytest.importorskip("torchtune")
    work = model_work(node())
    attention = 32 * 32 * 2 + 32 * 16 * 2
    layer = attention + 3 * 32 * 48
    assert work.per_token == 6 * (3 * layer + 32 * 100)
    assert work.per_pair == 12 * 3 * 32
    assert work.parameters == 3 * layer + 2 * 32 * 100 + 7 * 32
    assert work.name == "llama3"


def test_a_tied_output_is_computed_and_an_embedding_is_not() -> None:
    pytest.importorskip("torchtune")
    tied = {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        **{k: v for k, v in node().items() if k[0] != "_"},
    }
    assert model_work(tied).per_token == model_work(node()).per_token


def test_operations_of_matrices_are_those_that_torch_counts() -> None:
    """On a CPU, torch's counter leaves attention out."""
    pytest.importorskip("torchtune")
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from streampack.instantiate import build

    model, length = build(node()), 48
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == model_work(node()).of(length, 0)


def simulated(
    packed: IterablePackedDataset, *, ranks: int, window: int, seed: int = 0
) -> tuple[float, float]:
    """What `slowest_over_mean` expects of a run's packs as planned, and what the run's own steps come to."""
    cost = AttentionCost()
    planned = IterablePackedDataset(
        packed.lane_config.source, max_seq_len=512, overlong="truncate", num_lanes=ranks, balance_window=0
    )
    pool = [cost.of(pack.seq_lens) for pack in sorted(planned.stream(), key=lambda p: (p.lane, p.number))]
    expected = slowest_over_mean(
        np.array(pool, np.float64), pool, ranks=ranks, lanes=ranks, packs_per_rank=1, epoch_packs=len(pool),
        window=window, seed=seed,
    )  # fmt: skip
    lanes: list[list[int]] = [[] for _ in range(ranks)]
    for pack in packed.stream():
        lanes[pack.lane].append(cost.of(pack.seq_lens))
    steps = np.array(list(zip(*lanes, strict=False)), np.float64)
    return expected, float((steps.max(1) / steps.mean(1)).mean())


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_expected_imbalance_is_that_of_a_run(ranks: int, window: int) -> None:
    rows = token_rows(log_normal(6000, 80, 1.2))
    packed = IterablePackedDataset(
        rows, max_seq_len=512, overlong="truncate", num_lanes=ranks, balance_window=window
    )
    expected, measured = simulated(packed, ranks=ranks, window=window)
    assert expected - 1 == pytest.approx(measured - 1, rel=0.15)
