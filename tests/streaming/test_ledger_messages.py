"""A run without a pack says so, with any number of consumers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import (
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    Mix,
    PackedDataLoader,
    PackedDataset,
    ParquetSource,
)
from streampack.sources.as_source import as_source
from streampack.streaming.ledger_messages import FIRST_ROWS
from tests.distributed.test_one_run import loader
from tests.sources import test_parquet
from tests.support.corpus import Numbers, all_of, rows, samples_in, write
from tests.support.thread_ranks import on_ranks

LONG = [{"i": i, "n": 30} for i in range(40)]
EMPTY = [{"i": i, "n": 0} for i in range(40)]
BAD = ["no", "rows", "at all"]
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "long": (LONG, {"overlong": "drop"}, "all 40 that were read are dropped (40 longer than a pack)"),
    "empty": (EMPTY, {"empty": "drop"}, "all 40 that were read are dropped (40 without a token)"),
    "bad": (BAD, {"on_bad_record": "skip"}, "all 3 that were read are dropped (3 broken, and skipped)"),
    "none": (IterableSource([]), {}, "the source has no rows at all"),
}


def make(case: str, **more: Any) -> IterablePackedDataset:
    source, settings, _ = CASES[case]
    return IterablePackedDataset(source, encoder=Numbers(), max_seq_len=24, num_lanes=4, **settings, **more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_run_without_packs_is_an_error(case: str, epochs: int | None) -> None:
    def refused(data: Any) -> None:
        with pytest.raises(ValueError) as error:
            list(data)
        assert CASES[case][2] in str(error.value)

    refused(make(case, epochs=epochs))
    refused(PackedDataLoader(make(case, epochs=epochs)))


@pytest.mark.parametrize("whole", [True, False])
def test_a_giant_sample_is_named_once_a_lane_or_left_out(
    whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [{"i": i, "n": 700 if i in (9, 12, 15) else 5} for i in range(30)]
    sources = [
        {"name": name, "source": JSONLSource(write(tmp_path / f"{name}.jsonl", some)), "weight": 1}
        for name, some in (("a", lengths), ("b", [{"i": i, "n": 5} for i in range(100, 130)]))
    ]
    settings: dict[str, Any] = {"overlong": "split", "split_across_pack": whole, "num_lanes": 1}

    def warnings_of(**more: Any) -> list[str]:
        caplog.clear()
        data = IterablePackedDataset(Mix(sources), encoder=Numbers(), max_seq_len=10, **settings, **more)
        list(data)
        counted = data.ledger()
        assert counted.dropped["overlong"] == 700 * counted.dropped_samples["overlong"]
        assert counted.dropped_samples["overlong"] == (0 if more.get("max_document_tokens", 700) > 699 else 3)
        return [record.getMessage() for record in caplog.records if "tokens: lane" in record.getMessage()]

    (message,) = warnings_of()
    assert "a.jsonl" in message
    assert "has 700 tokens: lane 0 gives nothing else for about 70 packs, and until" in message
    assert len(warnings_of(max_document_tokens=700)) == 1
    assert warnings_of(max_document_tokens=699) == []
    with pytest.raises(ValueError, match="max_document_tokens=9 is below 10"):
        warnings_of(max_document_tokens=9)


def test_a_run_without_packs_in_worker_processes_is_an_error() -> None:
    with pytest.raises(ValueError) as error:
        list(PackedDataLoader(make("bad"), num_workers=2))
    assert CASES["bad"][2] in str(error.value)


def test_a_run_without_packs_is_an_error_on_all_ranks() -> None:
    def act(rank_sync: Any) -> None:
        list(loader(rank_sync, LONG, overlong="drop"))

    for error in on_ranks(2, act):
        assert isinstance(error, ValueError)
        assert CASES["long"][2] in str(error), "of all ranks' lanes"


def test_a_consumer_without_packs_is_no_error_where_others_have_some() -> None:
    """Where others have some: the first one's lanes hold what is dropped alone."""
    data = [row for pair in zip(LONG, rows(40), strict=True) for row in pair]
    settings: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 2, "overlong": "drop", "encoder": Numbers()}
    for workers in (0, 2):
        packs = DataLoader(IterablePackedDataset(data, **settings), batch_size=None, num_workers=workers)
        assert samples_in(packs) == all_of(rows(40))
        batches = PackedDataLoader(IterablePackedDataset(data, **settings), num_workers=workers)
        assert sum(int(batch.num_seqs) for batch in batches) == len(rows(40))


def test_a_run_resumed_at_its_end_is_no_error(tmp_path: Path) -> None:
    """Resumed at its end it has packs, behind it."""
    settings: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 4, "encoder": Numbers()}
    before = PackedDataLoader(IterablePackedDataset(rows(40), **settings))
    list(before)
    for workers in (0, 2):
        after = PackedDataLoader(IterablePackedDataset(rows(40), **settings), num_workers=workers)
        after.load_state_dict(before.state_dict())
        assert list(after) == []


def test_a_warning_tells_early_that_all_rows_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A corpus whose rows are all dropped may take days to read."""
    caplog.set_level(logging.WARNING, logger="streampack")
    data = [{"i": i, "n": 30} for i in range(FIRST_ROWS)] + rows(500) + LONG * 100
    settings: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 1, "overlong": "drop"}
    assert len(list(IterablePackedDataset(data, encoder=Numbers(), **settings))) > 10
    said = [record.getMessage() for record in caplog.records if "all dropped" in record.getMessage()]
    assert said == [
        "the first 1,000 rows of lane 0 are all dropped (1,000 longer than a pack), and the next are read; check what "
        "the source reads, and the encoder, max_seq_len and the settings that drop rows"
    ]
    caplog.clear()
    assert list(IterablePackedDataset(data[1:], encoder=Numbers(), **settings))
    assert "all dropped" not in caplog.text


def test_a_map_style_dataset_without_packs_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Whose length says so as well."""
    data = [{"tokens": [1] * 30, "labels": [1] * 30}] * 4
    assert len(PackedDataset(data, max_seq_len=24, overlong="drop")) == 0
    assert "no row makes a pack: all 4 that were read are dropped (4 longer than a pack)" in caplog.text
    caplog.clear()
    assert len(PackedDataset(data, max_seq_len=24, overlong="drop", max_packs=0)) == 0
    assert "no row" not in caplog.text


def test_a_list_of_paths_is_read_as_files(tmp_path: Path) -> None:
    """Taken for rows, each was a broken record."""
    paths = [write(tmp_path / f"{number}.jsonl", rows(9)) for number in range(3)]
    for given in (paths, [str(path) for path in paths], [f"{tmp_path}/*.jsonl"]):
        source = as_source(given)
        assert isinstance(source, JSONLSource)
        assert [file.path for file in source.files] == [str(path) for path in paths]
    table = test_parquet.write(tmp_path / "a.parquet", rows(9))
    assert isinstance(as_source([tmp_path / "a.parquet"]), ParquetSource), table
    with pytest.raises(ValueError, match="the row is a str"):
        next(iter(IterablePackedDataset(["some text", "more text"], max_seq_len=8)))
