"""Broken records: skipped exactly, listed exactly once, counted, and limited."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import IterablePackedDataset, JSONLSource, MapSource, Mix, PackedDataLoader
from streampack.sources import ParquetSource, Reading
from tests.harness import files
from tests.harness.conformance import check_resume_everywhere, content
from tests.harness.corpus import Numbers, rows
from tests.harness.files import skipping, survivors
from tests.harness.workers import process_of

KINDS = ("jsonl", "gz", "parquet", "map")
ROWS = rows(600)
BROKEN = {
    17: b'{"i": 17, "n": ',
    40: b"\xff\xfe\x00",
    41: b"[1, 2]",
    300: b'{"i": 300}',  # readable, and no sample
    599: b'{"i": 599, "n": "many"}',
}
JSON_REASONS = ["not a line of JSON", "not a line of JSON", "a row must be", "KeyError", "TypeError"]


class Refusing:
    """Map-style rows, some of which raise."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> Any:
        if i in (17, 40, 41):
            raise ValueError("cannot be encoded")
        return json.loads(BROKEN[i]) if i in BROKEN else ROWS[i]


def corpus(kind: str, folder: Path) -> tuple[Any, list[int], list[tuple[str, int, str]]]:
    """Return a source, its good rows, and its bad records: shard, offset, beginning of the reason."""
    folder.mkdir(exist_ok=True)
    if kind == "map":
        bad = [("Refusing", i, "cannot be encoded") for i in (17, 40, 41)]
        bad += [("Refusing", 300, "KeyError"), ("Refusing", 599, "TypeError")]
        return MapSource(Refusing()), [i for i in range(600) if i not in BROKEN], bad
    if kind == "parquet":
        path = folder / "a.parquet"
        table = pa.Table.from_pylist(ROWS)
        pq.write_table(table, path, row_group_size=50, write_page_checksum=True, use_dictionary=False)
        files.damage(path, group=3, column=1)
        survivors = [i for i in range(600) if not 150 <= i < 200]
        return ParquetSource(path), survivors, [("a.parquet", 150, "row group 3 is damaged")]
    lines = [json.dumps(row).encode() for row in ROWS]
    for i, line in BROKEN.items():
        lines[i] = line
    offsets = [sum(len(line) + 1 for line in lines[:i]) for i in range(600)]
    text = b"\n".join(lines) + b"\n"
    name = "a.jsonl" if kind == "jsonl" else "a.jsonl.gz"
    (folder / name).write_bytes(text if kind == "jsonl" else gzip.compress(text))
    bad = [(name, offsets[i], reason) for i, reason in zip(BROKEN, JSON_REASONS, strict=True)]
    return JSONLSource(folder / name), [i for i in range(600) if i not in BROKEN], bad


def listed(folder: Path) -> list[tuple[str, int, str]]:
    lines = files.listed(folder)
    for line in lines:
        assert [key for key in line if key != "path"] == ["place", "offset", "reason"]
    names = [Path(line["path"]).name if "path" in line else "Refusing" for line in lines]
    return sorted((name, line["offset"], line["reason"]) for name, line in zip(names, lines, strict=True))


def check_listed(folder: Path, bad: list[tuple[str, int, str]]) -> None:
    for (shard, offset, reason), (name, place, begins) in zip(listed(folder), sorted(bad), strict=True):
        assert (shard, offset) == (name, place)
        assert reason.startswith(begins)


@pytest.mark.parametrize("kind", KINDS)
def test_all_good_rows_are_packed_and_all_bad_ones_listed(tmp_path: Path, kind: str) -> None:
    data, expected, bad = corpus(kind, tmp_path / "data")
    dataset = skipping(data, skip_bad=tmp_path / "bad", epochs=2)
    assert survivors(list(dataset)) == sorted(2 * expected)
    check_listed(tmp_path / "bad", bad)
    ledger = dataset.ledger()
    assert ledger.as_dict()["bad_records"] == ledger.dropped_samples["bad"] == 2 * len(bad)
    assert ledger.samples == 2 * len(expected)
    once = skipping(data)
    assert once.estimate(rows=600).packs == pytest.approx(len(list(once)), rel=0.15)
    packs, whole = (
        [pack["tokens"].tolist() for pack in skipping(source, shuffle=False, num_lanes=1)]
        for source in (data, MapSource([ROWS[i] for i in expected]))
    )
    assert packs == whole, "as those of a corpus without the bad records"


@pytest.mark.parametrize("kind", ["gz", "parquet", "map"])
def test_resume_at_every_pack(tmp_path: Path, kind: str) -> None:
    """The list holds each record once, however often it is read."""
    data, _, bad = corpus(kind, tmp_path / "data")
    folder = tmp_path / "bad"

    def make() -> IterablePackedDataset:
        return skipping(data, skip_bad=folder)

    check_resume_everywhere(make, packs=30, whole_every=30)
    list(make())
    check_listed(folder, bad)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_another_process_or_dataset_listed_is_not_listed_again(
    tmp_path: Path, workers: int
) -> None:
    """A worker that is started again is a copy of a process that has begun the list before the first worker wrote."""
    data, _, bad = corpus("jsonl", tmp_path / "data")
    folder = tmp_path / "bad"
    first = skipping(data, skip_bad=folder, num_lanes=1)
    reading = iter(first)
    while not listed(folder):
        next(reading)
    assert len(listed(folder)) < len(bad)
    if workers:
        loader = iter(PackedDataLoader(first, num_workers=1))
        next(loader)
        while len(listed(folder)) < len(bad):  # by the worker, which makes packs ahead
            time.sleep(0.01)
        process_of().kill()
        list(loader)
    else:
        list(skipping(data, skip_bad=folder, num_lanes=1))
        list(reading)
    check_listed(folder, bad)


def test_a_line_cut_off_by_a_kill_is_written_again(tmp_path: Path) -> None:
    data, _, bad = corpus("jsonl", tmp_path / "data")
    folder = tmp_path / "bad"
    dataset = skipping(data, skip_bad=folder)
    list(islice(dataset, 100))
    state = dataset.state_dict()
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    assert len(list(folder.iterdir())) == 2
    resumed = skipping(data, skip_bad=folder)
    list(resumed)
    check_listed(folder, bad)
    resumed.load_state_dict(state)


def test_too_many_bad_records_fail_the_run(tmp_path: Path) -> None:
    data, _, bad = corpus("jsonl", tmp_path / "data")
    settings: dict[str, Any] = {"num_lanes": 1, "shuffle": False}
    dataset, found = skipping(data, skip_bad={"folder": tmp_path / "bad", "limit": 2}, **settings), []
    with pytest.raises(ValueError) as error:
        found.extend(dataset)
    assert str(error.value).startswith(
        f"{tmp_path}/data/a.jsonl:42: a row must be a JSON object, this is a list; "
    )
    assert "lane 0 has skipped 2 others, and skip_bad.limit=2 lets no more pass" in str(error.value)
    assert len(listed(tmp_path / "bad")) == 2
    lenient, stopped = (skipping(data, skip_bad=limit, **settings) for limit in (len(bad), 2))
    for resumed in (lenient, stopped):
        resumed.load_state_dict(dataset.state_dict())
    assert len(found) + len(list(lenient)) == len(list(skipping(data, **settings)))
    with pytest.raises(ValueError, match="has skipped 2 others"):  # a resume counts on
        list(stopped)


@pytest.mark.parametrize("limit", [{}, {"skip_bad": 1}])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_line_that_is_read_again_in_every_pass_does_not_end_a_run(
    tmp_path: Path, mixed: bool, limit: dict[str, Any]
) -> None:
    """A resume in the middle of a pass, in which the line may have been read, ends none either."""
    lines = [json.dumps({"i": i, "n": 9}) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:3], "{", *lines[3:]]))

    def make(**settings: Any) -> IterablePackedDataset:
        data: Any = JSONLSource(tmp_path / "a.jsonl")
        if mixed:
            more = {"name": "b", "source": MapSource(ROWS), "weight": 1}
            data = Mix([{"name": "a", "source": data, "weight": 1}, more])
        return skipping(data, epochs=None, num_lanes=1, **settings)

    seen = 0
    dataset = make(**limit)
    for _ in range(4):
        iterator = iter(dataset)
        while dataset.ledger().dropped_samples["bad"] < seen + 40:
            next(iterator)
        seen += 40
        state = dataset.state_dict()
        dataset = make(**limit)
        dataset.load_state_dict(state)
    with pytest.raises(ValueError, match="0 others, and skip_bad.limit=0 lets no more pass"):
        list(islice(make(skip_bad=0), 100))


def test_a_fraction_of_the_rows_may_be_bad(tmp_path: Path) -> None:
    lines = [json.dumps({"i": i, "n": 2}) if i % 20 else "{" for i in range(2_400)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    def run(**settings: Any) -> int:
        settings = {"num_lanes": 1, "shuffle": False, "max_seq_len": 1000, **settings}
        dataset = skipping(JSONLSource(tmp_path / "a.jsonl"), **settings)
        list(dataset)
        return dataset.ledger().dropped_samples["bad"]

    assert run(skip_bad=0.06) == run(skip_bad=120) == 120
    rows = " of the 2,000 rows"
    for skip_bad, limit, share in ((True, 0.01, rows), (0.04, 0.04, rows), (100, 100, "")):
        with pytest.raises(ValueError, match=f"a.jsonl:2001: .*100 others{share}.*skip_bad.limit={limit} "):
            run(skip_bad=skip_bad)


@pytest.mark.parametrize("kind", ["jsonl", "map"])
def test_by_default_a_broken_record_is_an_error_and_skipping_may_begin_at_a_resume(
    tmp_path: Path, kind: str
) -> None:
    data, expected, _ = corpus(kind, tmp_path / "data")
    settings: Mapping[str, Any] = {"num_lanes": 1, "shuffle": False}
    strict = skipping(data, skip_bad=False, **settings)
    packs: list[Any] = []
    with pytest.raises(ValueError) as error:
        packs.extend(strict)
    assert type(error.value) is ValueError, "which can leave a worker's process"
    lenient = skipping(data, **settings)
    lenient.load_state_dict(strict.state_dict())
    packs += list(lenient)
    assert survivors(packs) == expected
    assert [content(pack) for pack in packs] == [content(pack) for pack in skipping(data, **settings)]


def test_errors_of_the_storage_and_overlong_samples_are_not_skipped(tmp_path: Path) -> None:
    class Gone(Refusing):
        def __getitem__(self, i: int) -> Any:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(skipping(MapSource(Gone())))
    with pytest.raises(OSError, match="gone"):
        next(reader := MapSource(Gone()).read(Reading()))
    assert reader.cursor == (0,), "it consumes nothing"
    with pytest.raises(ValueError, match="has 30 tokens, max_seq_len is 24"):
        list(skipping([{"i": 1, "n": 30}]))


@pytest.mark.parametrize(
    ("skip_bad", "message"),
    [
        (["skip"], "skip_bad=['skip'] is a list; give True or False, a limit, a folder, or a mapping of"),
        ({"limits": 3}, "skip_bad got an unexpected keyword argument 'limits'; did you mean 'limit'?"),
        (-1, "skip_bad.limit=-1 is below 0"),
        *((wrong, f"skip_bad.limit={wrong!r} is neither a whole number nor a fraction")
          for wrong in (1.5, 100.0, 0.0, float("nan"))),
        ({"folder": 3}, "skip_bad.folder=3 is no path; name a folder of this machine"),
        ("{d}/file", "skip_bad.folder='{d}/file' cannot be made: {d}/file is no folder"),
        ("s3://bucket/bad", "skip_bad.folder='s3://bucket/bad' is a URL; name a folder of this"),
    ],
)  # fmt: skip
def test_settings_are_checked(tmp_path: Path, skip_bad: Any, message: str) -> None:
    (tmp_path / "file").write_text("")
    if isinstance(skip_bad, str):
        skip_bad, message = (text.format(d=tmp_path) for text in (skip_bad, message))
    with pytest.raises(ValueError) as error:
        skipping(ROWS, skip_bad=skip_bad)
    assert str(error.value).startswith(message)


class Failing(Numbers):
    """An encoder with a bug of its own for some rows, as torchtune's transforms have for ``content: null``."""

    errors = (
        UnboundLocalError("content"),
        RuntimeError("internal"),
        StopIteration(),
        ZeroDivisionError(),
        KeyError("no column"),
    )

    def __call__(self, row: Mapping[str, Any], /) -> Any:
        if row["i"] % 50 == 7:
            raise self.errors[row["i"] // 50 % len(self.errors)]
        return super().__call__(row)


class FailingRows:
    """Map-style rows that are encoded in ``__getitem__``, as in torchtune's datasets."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> Any:
        Failing()(ROWS[i])
        return ROWS[i]


LEFT = [i for i in range(600) if i % 50 != 7]


@pytest.mark.parametrize("place", ["encoder", "dataset", "mixture"])
def test_any_error_of_a_users_code_is_skipped(tmp_path: Path, place: str) -> None:
    source: Any = MapSource(ROWS) if place == "encoder" else FailingRows()
    if place == "mixture":
        source = Mix([{"name": "a", "source": source, "weight": 1}])
    dataset = skipping(source, encoder=Failing() if place == "encoder" else Numbers(), skip_bad=tmp_path)
    assert survivors(dataset) == LEFT
    assert {reason.partition(":")[0] for _, _, reason in listed(tmp_path)} >= {
        *("UnboundLocalError", "RuntimeError", "ZeroDivisionError", "KeyError")
    }
    assert len(listed(tmp_path)) == 12
    assert place == "mixture" or dataset.estimate(rows=600).packs > 0


@pytest.mark.parametrize("mixed", [False, True])
def test_lists_have_paths_that_can_be_opened_and_keep_files_of_one_name_apart(
    mixed: bool, tmp_path: Path
) -> None:
    """Two folders with the same names, of files and of what is broken in them."""
    good, broken = '{"i": 1, "n": 3}\n', '{"i": 2, "n"\n'
    for folder in ("en", "fr"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.jsonl").write_text(good + broken + good)
        (tmp_path / folder / "1.jsonl").write_text("")
    sources = [tmp_path / "en", tmp_path / "fr"]
    mix = [{"name": folder.name, "source": JSONLSource(folder), "weight": 1} for folder in sources]
    with pytest.warns(
        UserWarning, match=rf"2 of 4 files cannot be read .* the first is {tmp_path}/en/1.jsonl"
    ):
        data = skipping(Mix(mix) if mixed else JSONLSource(sources), skip_bad=tmp_path / "bad", num_lanes=1)
    list(data)
    lines = files.listed(tmp_path / "bad")
    empty, second = [(str(folder / "1.jsonl"), 0) for folder in sources], len(good)
    assert {(line["path"], line.get("offset")) for line in lines} == {
        *empty, *((str(folder / "0.jsonl"), second) for folder in sources)
    }  # fmt: skip
    assert (sources[0] / "0.jsonl").read_bytes()[second:].startswith(broken.encode())
    assert data.ledger().dropped_samples["bad"] >= 4, "each is read as often as its source"


def test_skipped_rows_are_listed_by_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "a.jsonl"
    unequal = ['{"tokens": [1, 2], "labels": [1]}', '{"tokens": [1, 2, 3], "labels": [1]}']
    path.write_text(
        "\n".join(['{"tokens": [1], "labels": [1]}', "{broken", *unequal, '{"text": "a"}']) + "\n"
    )
    for skip_bad in (True, "~/bad"):
        data = skipping(path, encoder=None, skip_bad=skip_bad, shuffle=False, num_lanes=1)
        list(data)
    places = [f"{path}:{line}" for line in (2, 3, 4, 5)]
    skipped = [message for message in caplog.messages if message.startswith("skipped ")]
    assert [message.split(" ")[1].rstrip(":") for message in skipped] == places
    assert [line["place"] for line in files.listed(tmp_path / "bad")] == places


def test_a_list_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    data, _, _ = corpus("jsonl", tmp_path / "data")
    (tmp_path / "bad").mkdir()
    (tmp_path / "other").write_text('{"place": "a", "reason": "b"}\n')
    link = tmp_path / "bad" / "lane-00000.jsonl"
    for target in ("other", "nowhere"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        dataset = skipping(data, skip_bad=tmp_path / "bad", num_lanes=1)
        with pytest.raises(ValueError, match=f"{link} is a link, and is not followed; remove it"):
            list(dataset)
    assert (tmp_path / "other").read_text() == '{"place": "a", "reason": "b"}\n'
    assert not (tmp_path / "nowhere").exists()
