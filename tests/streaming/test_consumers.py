"""Which rank and worker reads what: fewer lanes than consumers, foreign loaders, model-parallel groups."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, default_collate

from streampack import (
    FlatteningCollator,
    IterablePackedDataset,
    MultipackBatchSampler,
    PackedDataLoader,
    collate_packed,
    prepare_model_for_packing,
)
from tests.harness import hf_trainers
from tests.harness.corpus import write
from tests.harness.processes import run_ranks
from tests.harness.threads import ThreadSync, on_ranks

ROWS = [{"tokens": [i + 1] * 8, "labels": [i + 1] * 8} for i in range(32)]


ALONE = (
    "each of 2 ranks would read all the data, or accelerate would share the packs out once more; iterate a"
)


def stream(**changes: Any) -> IterablePackedDataset:
    return IterablePackedDataset(ROWS, max_seq_len=8, **({"epochs": None, "num_lanes": 4} | changes))


def seen(packs: Any, count: int) -> set[int]:
    """The numbers of the rows in the first packs."""
    return {int(pack["tokens"][0]) for pack, _ in zip(packs, range(count), strict=False)}


def refusal(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def read_plainly() -> dict[str, Any]:
    """As one of two ranks, with plain torch: what is read, and what is refused."""
    early = PackedDataLoader(stream())
    with pytest.warns(UserWarning, match="WORLD_SIZE=2 and there is no process group, so each of these"):
        next(iter(early))
    dist.init_process_group("gloo")
    found: dict[str, Any] = {
        "early": refusal(lambda: next(iter(early))),
        "epochs": refusal(lambda: next(iter(stream(epochs=1)))),
        "endless": refusal(lambda: next(iter(stream()))),
    }
    sent = pickle.dumps(stream())
    rank = dist.get_rank()
    assert MultipackBatchSampler([8] * 32, max_tokens=8, num_replicas=2, rank=rank).rank == rank
    dist.barrier()  # or the other rank may still connect to one that has left
    dist.destroy_process_group()

    # A worker process that is spawned has no group; what the rank knew came with the dataset.
    class Worker:
        id, num_workers, seed = 0, 1, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.data._utils.worker._worker_info", Worker)  # as in a worker of torch
        found["spawned"] = refusal(lambda: next(iter(pickle.loads(sent))))
    return found


def read_by_accelerate() -> list[str]:
    """As one of two ranks: what accelerate's two ways to share out say, with worker processes and without."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    refusals = []
    for workers in (0, 1):
        for dispatch in (False, None):
            accelerator = Accelerator(
                cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
            )
            loader = accelerator.prepare(
                DataLoader(stream(), num_workers=workers, collate_fn=FlatteningCollator())
            )
            if dispatch is False or accelerator.is_main_process:  # the others wait for what this one reads
                refusals.append(refusal(lambda loader=loader: next(iter(loader))))
    kept = PackedDataLoader(stream(epochs=1))
    assert accelerator.prepare(kept) is kept
    assert len(list(kept)) == 16
    dist.destroy_process_group()
    return refusals


def test_accelerate_never_shares_packs_out_a_second_time() -> None:
    """It read 16 of 32 rows by dispatching, and 8 by sharding."""
    pytest.importorskip("accelerate")
    for rank, refusals in enumerate(run_ranks(read_by_accelerate, 2)):
        assert len(refusals) == (2 if rank else 4)
        for message in refusals:
            assert ALONE in message


def test_ranks_in_plain_torch() -> None:
    found = run_ranks(read_plainly, 2)
    for rank in found:
        assert "made before the process group of 2 ranks, and each would read all the data" in rank["early"]
        assert rank["epochs"].startswith(ALONE)
        assert rank["endless"].startswith(ALONE)
        assert rank["spawned"].startswith(ALONE)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "collate", [collate_packed, default_collate, FlatteningCollator(return_flash_attn_kwargs=True)]
)
def test_accelerate_cuts_no_batches_in_a_single_process(collate: Any, workers: int) -> None:
    """It raised a TypeError for a `Batch`, and left one number of ``cu_seq_lens``."""
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    loader = DataLoader(stream(epochs=1), batch_size=2, num_workers=workers, collate_fn=collate)
    here = {"device": torch.device("cpu"), "num_processes": 1, "process_index": 0, "put_on_device": True}
    with pytest.raises(
        ValueError, match=r"cuts its batches into rows, .* iterate a PackedDataLoader, which acceler"
    ):
        next(iter(prepare(loader, dispatch_batches=True, **here)))
    assert len(list(prepare(loader, dispatch_batches=False, **here))) == 16


def test_a_single_process_may_read_epochs_and_is_warned_of_a_missing_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seen(stream(epochs=1), 99) == set(range(1, 33))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.warns(UserWarning, match="WORLD_SIZE=3 and there is no process group") as caught:
        next(iter(stream()))
    assert caught[0].filename == __file__


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks; the other exists in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["tp", "dp_shard"])
def test_a_sharded_models_mesh_is_looked_at(two_ranks: None, name: str) -> None:
    from torch.distributed.tensor import DTensor, Shard

    llama = hf_trainers.model()
    weight = llama.lm_head.weight
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    sharded = DTensor.from_local(weight.detach()[:512], mesh, [Shard(0)], run_check=False)
    llama.lm_head.weight = torch.nn.Parameter(sharded)
    if name == "tp":
        with pytest.warns(UserWarning, match="dimension 'tp' of 2 ranks that need the same batches, and a"):
            prepare_model_for_packing(llama)
    else:
        prepare_model_for_packing(llama)


# Fewer lanes than consumers, and lanes without rows.

SHORT = [{"tokens": [i + 1] * (2 + i % 7), "labels": [i + 1] * (2 + i % 7)} for i in range(60)]


def short(rows: Any = SHORT, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 12, **settings})


def tokens(packs: Any) -> list[Any]:
    return [pack["tokens"].tolist() for pack in packs]


def rows_in(batches: Any) -> list[Any]:
    return [row for batch in batches for row in batch.tokens.tolist()]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_of_one_lane_resumes_with_several_workers(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    data, resumed, again = short(), short(), short()
    iterator = iter(data)
    list(islice(iterator, 5))
    state, rest = data.state_dict(), tokens(iterator)
    assert state["num_lanes"] == 1, "small data makes one lane"
    again.load_state_dict(state)
    assert tokens(DataLoader(again, batch_size=None, num_workers=workers)) == rest
    caplog.clear()
    loader = PackedDataLoader(resumed, num_workers=workers)
    loader.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        assert rows_in(loader) == rest
    said = [each.getMessage() for each in caplog.records if each.name == "streampack.loader.batching"]
    wanted = (
        f"num_workers={workers}: 1 started on each rank, one for each of its lanes, for the run has 1 in all; to use "
        "more, set num_lanes in a new run"
    )
    assert said == ([wanted] if workers > 1 else [])


@pytest.mark.parametrize("workers", [0, 3])
def test_an_endless_stream_skips_empty_lanes(workers: int) -> None:
    data = short(SHORT[:5], epochs=None, num_lanes=8)
    batches = list(islice(PackedDataLoader(data, num_workers=workers), 25))
    assert [int(batch.tokens[0, 0]) for batch in batches] == [1, 2, 3, 4, 5] * 5
    assert all(batch.num_tokens > 8 for batch in batches), "samples of several epochs share packs"


def test_an_endless_stream_skips_lanes_whose_rows_are_all_dropped() -> None:
    rows = [{"tokens": [9] * (20 if i % 4 else 5), "labels": [9] * (20 if i % 4 else 5)} for i in range(16)]
    data = short(rows, epochs=None, num_lanes=4, overlong="drop")
    assert {pack["lane"] for pack in islice(data, 12)} == {0}
    assert data.ledger().dropped_samples["overlong"] == 12


def test_the_default_number_of_lanes_of_an_endless_stream_is_none_that_fails(tmp_path: Path) -> None:
    """A compressed file is one lane's, however large."""
    noise = np.random.default_rng(0).integers(0, 2**62, 60_000).tolist()
    rows = [{"tokens": [i % 99 + 1] * 3, "labels": [1] * 3, "noise": x} for i, x in enumerate(noise)]
    path = write(tmp_path / "a.jsonl.gz", rows)
    assert path.stat().st_size > 1 << 19
    assert len(list(islice(short(path, epochs=None), 20))) == 20


def test_a_rank_without_rows_hands_out_null_packs() -> None:
    def read(sync: ThreadSync) -> list[Any]:
        loader = PackedDataLoader(short(SHORT[:1], epochs=None, num_lanes=2))
        loader.rank_sync = sync
        return rows_in(islice(loader, 20))

    assert on_ranks(2, read) == [[[1] * 12] * 20, [[0] * 12] * 20]
