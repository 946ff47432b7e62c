"""Arrow, WebDataset and text files: what a row is, what is left out, what is damaged, and what a file is not."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from streampack import ArrowSource, IterablePackedDataset, TextSource, WebDatasetSource
from streampack.sources import Reading, as_source
from streampack.sources.reading import BadRecord
from tests.harness.conformance import lists
from tests.harness.corpus import PACK, Numbers, in_memory, numbered, read_all, rows
from tests.harness.threads import Run, Topology, packs_of, run, steps_of


def tar(path: Path, members: Mapping[str, bytes], **settings: Any) -> Path:
    with tarfile.open(path, "w", **settings) as archive:
        for name, data in members.items():
            (info := tarfile.TarInfo(name)).size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def rows_and_reasons(source: Any, lanes: int = 1) -> tuple[list[Any], list[str]]:
    found, reasons = [], []
    for lane in range(lanes):
        reader = source.read(Reading(lane, num_lanes=lanes))
        while True:
            try:
                if (row := next(reader, None)) is None:
                    break
                found.append(lists(row.data))
            except BadRecord as error:
                reasons.append(error.reason)
    return found, reasons


# WebDataset.


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_sample_is_the_members_of_one_base_name(
    tmp_path: Path, form: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Python's tarfile wrote them, with long names by each format's own way, and reads them as an oracle."""
    long = "a folder/" * 9 + "0002" + "x" * (90 if form != tarfile.USTAR_FORMAT else 9)
    members = {
        "./0001.json": json.dumps({"messages": [{"role": "user"}], "text": "of the json"}).encode(),
        "./0001.txt": "naïve".encode(),
        "./0001.left.jpg": b"JPG",
        "./0001.right.PNG": b"PNG",
        "./._0001.txt": b"of a Mac",
        f"{long}.cls": b"7\n",
        f"{long}.npy": b"x" * 3000,
        "0003.npy": b"",
        "deep/0003.txt": b"",
    }
    tar(tmp_path / "a.tar", members, format=form)
    source = as_source(tmp_path / "*")
    assert isinstance(source, WebDatasetSource)
    assert read_all(source) == [
        {
            "__key__": "0001",
            "messages": [{"role": "user"}],
            "text": "naïve",
            "images": [b"JPG", b"PNG"],
        },
        {"__key__": long, "cls": 7},
        {"__key__": "deep/0003", "text": ""},
    ]
    assert source.skipped == {"npy": 2}
    assert caplog.messages == [f"members such as {long}.npy are skipped: .npy is not read"]
    with tarfile.open(tmp_path / "a.tar") as archive:
        begins = [member.offset for member in archive]
    found = [row.row_id[1] for row in source.read(Reading())]
    assert found == [begins[0], begins[5], begins[8]]


SAMPLES = {f"{i:03}.{ending}": f'{{"i": {i}}}'.encode() for i in range(30) for ending in ("json", "npy")}


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def no_end(data: bytes) -> bytes:
    return data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512)


def flipped(data: bytes) -> bytes:
    return data[: 1024 * 40 + 5] + b"\xff" + data[1024 * 40 + 6 :]


def not_json(data: bytes) -> bytes:
    return data.replace(b'{"i": 7}', b'{"i": 7,')


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    ("change", "count", "reason"),
    [
        (torn, 17, "the tar is damaged or cut off after byte "),
        (no_end, 29, "the tar is damaged or cut off after byte "),
        (flipped, 19, r"the tar is damaged or cut off after byte 38,912 \(bad checksum\); copy it again"),
        (not_json, 29, "007.json: Expecting property name"),
    ],
)
def test_a_damaged_tar_gives_the_samples_before_and_one_bad_record(
    tmp_path: Path, change: Callable[[bytes], bytes], count: int, reason: str, lanes: int
) -> None:
    path = tar(tmp_path / "a.tar", SAMPLES)
    path.write_bytes(change(path.read_bytes()))
    rows, reasons = rows_and_reasons(WebDatasetSource(path), lanes)
    numbers = sorted(row["i"] for row in rows)
    assert len(reasons) == 1
    assert re.match(reason, reasons[0]), reasons
    wanted = [i for i in range(30) if i != 7] if change is not_json else list(range(len(numbers)))
    assert numbers == wanted
    assert abs(len(numbers) - count) <= 3


@pytest.mark.parametrize("ending", ["tar", "tgz"])
def test_braces_name_the_shards_of_a_webdataset_here_and_by_url(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / f"braces-{ending}"
    folder.mkdir()
    for i in range(12):
        path = tar(folder / f"a-{i % 3:03}-{i // 3}.tar", {f"{i}.txt": b"%d" % i})
        if ending == "tgz":
            path.with_suffix(".tgz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    for place in (str(folder), in_memory(folder)):
        source = as_source(f"{place}/a-{{000..002}}-{{1..3}}.{ending}")
        assert isinstance(source, WebDatasetSource)
        rows = read_all(source, num_lanes=2)
        assert sorted(int(row["text"]) for row in rows) == list(range(3, 12))
        assert len(read_all(as_source(place), num_lanes=2)) == 12
    with pytest.raises(
        ValueError, match=f"1 of 4 files cannot be read: .*a-003-1.{ending}: there is no such"
    ):
        IterablePackedDataset(WebDatasetSource(f"{folder}/a-{{000..003}}-1.{ending}"), max_seq_len=8)


def test_a_lane_reads_its_part_of_a_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streampack.storage.base import LocalStorage

    path = tar(tmp_path / "a.tar", {f"{i}.txt": b"x" * 9000 for i in range(300)})
    taken, read = [0], LocalStorage.read

    def counted(self: LocalStorage, file: Any, start: int, stop: int) -> bytes:
        taken[0] += stop - start
        return read(self, file, start, stop)

    monkeypatch.setattr(LocalStorage, "read", counted)
    monkeypatch.setattr(LocalStorage, "block", 1 << 14)
    assert len(read_all(WebDatasetSource(path), num_lanes=4)) == 300
    assert taken[0] < 1.1 * path.stat().st_size, "not a tar for each lane"


# Arrow.


def test_a_folder_that_datasets_saved_is_read_as_it_says(tmp_path: Path) -> None:
    features = Features(
        {
            "input_ids": List(Value("int32")),
            "label": ClassLabel(names=["no", "yes"]),
            "calls": [{"x": Value("int64")}],
        }
    )
    rows = [{"input_ids": [i] * (i % 3), "label": i % 2, "calls": [{"x": i}, {"x": None}]} for i in range(9)]
    Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "data", num_shards=3)
    Dataset.from_list(rows[::-1], features=features).save_to_disk(tmp_path / "data", num_shards=2)
    assert len(list((tmp_path / "data").glob("*.arrow"))) == 5, "the first save's are there still"
    expected = [
        {**row, "calls": [{"x": row["input_ids"][0]} if row["input_ids"] else row["calls"][0], {}]}
        for row in rows
    ]
    assert [lists(row) for row in read_all(as_source(tmp_path / "data"))] == expected[::-1]
    DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows)).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        ValueError, match=r"splits has several splits: test, train; name one, such as .*/splits/test"
    ):
        as_source(tmp_path / "splits")


@pytest.mark.parametrize("by_url", [False, True])
@pytest.mark.parametrize("kind", ["stream", "file", "lz4"])
def test_an_arrow_file_that_was_cut_off(tmp_path: Path, kind: str, by_url: bool) -> None:
    """A stream gives the rows before; a file lacks its footer, without which this machine's cannot be read."""
    folder = tmp_path / f"{tmp_path.name}-data"
    folder.mkdir()
    path, table = folder / "a.arrow", pa.Table.from_pylist(numbered(40))
    if kind == "stream":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    else:
        pa.feather.write_feather(
            table, path, chunksize=10, compression="lz4" if kind == "lz4" else "uncompressed"
        )
    source = ArrowSource(in_memory(folder) if by_url else folder)
    assert read_all(source) == numbered(40)
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    source = ArrowSource(f"{in_memory(folder)}/a.arrow" if by_url else folder)
    rows, reasons = rows_and_reasons(source, 3 if not by_url else 1)
    rows.sort(key=lambda row: row["i"])
    assert rows == numbered(40)[: len(rows)]
    assert bool(rows) == (kind == "stream" or by_url)
    assert reasons
    assert all("it is damaged or cut off after row " in reason for reason in reasons)


# Text.


def test_a_row_of_text_is_a_line_or_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOnce\r\n\n upon \xe2\x80\xa8a\ntime")
    (tmp_path / "b.txt").write_bytes(b"\n\n")
    lines = [{"text": "Once"}, {"text": " upon \u2028a"}, {"text": "time"}]
    assert read_all(as_source(tmp_path)) == lines
    assert caplog.messages == [
        "text files: each line is a row; TextSource(..., sample_by='document') makes each file one"
    ]
    whole = [{"text": "Once\r\n\n upon \u2028a\ntime"}, {"text": "\n\n"}]
    assert read_all(TextSource(tmp_path, sample_by="document")) == whole
    with pytest.raises(ValueError, match="sample_by='paragraph' is unknown; choose one of"):
        TextSource(tmp_path, sample_by="paragraph")
    reasons = rows_and_reasons(TextSource(tmp_path, sample_by="document", max_line_bytes=9))[1]
    assert reasons == ["the file is longer than max_line_bytes=9; cut it, or raise that"]
    (tmp_path / "a.txt").write_bytes(b"good\nna\xefve\ngood\n")
    assert rows_and_reasons(TextSource(tmp_path / "a.txt"))[0] == [{"text": "good"}] * 2


# What a file is not.


def test_folders_of_lance_and_litdata_are_refused_with_what_reads_them(tmp_path: Path) -> None:
    (tmp_path / "lit").mkdir()
    (tmp_path / "lit" / "index.json").write_text('{"chunks": [], "config": {}}')
    (tmp_path / "a.lance" / "data").mkdir(parents=True)
    (tmp_path / "a.lance" / "data" / "0.lance").write_bytes(b"")
    for name, said in (
        ("lit", "is of litData; give MapSource an "),
        ("a.lance", "is of Lance; give MapSource an "),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            as_source(tmp_path / name)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", "{}")


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(numbered(3)), path)


ARE_NOT: list[tuple[str, Callable[[Path], Any], str]] = [
    *(
        (f"a.{ending}", zipped, "it is a zip: unpack it")
        for ending in ("json", "jsonl", "tar", "arrow", "txt")
    ),
    *(
        (f"a.{ending}", parquet, "it is a Parquet file: ParquetSource(")
        for ending in ("json", "tar", "arrow", "txt")
    ),
    (
        "a.tar",
        lambda path: tar(path, {"a/b.py": b"1", "a/c.jsonl": b"{}"}),
        "no member of it ends in .txt, .json, ",
    ),
    ("a.tar", lambda path: tar(path, {}), "bytes are zeros"),
    (
        "a.tar",
        lambda path: path.write_text("i,t\n" * 999),
        "the tar is damaged or cut off after byte 0 (invalid header)",
    ),
    ("a.txt", lambda path: path.write_bytes("naïve\n".encode("utf-16")), "it is UTF-16: convert it to UTF-8"),
    (
        "a.feather",
        lambda path: path.write_bytes(b"FEA1" + bytes(99)),
        "it is Feather, version 1: write it again",
    ),
    (
        "a.json",
        lambda path: path.write_text("i,t\n1,2\n3,4\n5,6\n"),
        "lines is a JSON object; if it is text, TextSource(",
    ),
]


@pytest.mark.parametrize(("name", "make", "said"), ARE_NOT)
def test_what_a_file_is_not_is_refused_by_what_was_found(
    tmp_path: Path, name: str, make: Callable[[Path], Any], said: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        next(as_source(tmp_path / name).read(Reading()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["json", "tar", "saved"])
def test_steps_are_the_same_on_one_rank_two_and_one_again(tmp_path: Path, kind: str) -> None:
    data = rows(240)
    if kind == "json":
        (path := tmp_path / "a.json").write_text(json.dumps(data, indent=1))
    elif kind == "tar":
        path = tar(tmp_path / "a.tar", {f"{row['i']}.json": json.dumps(row).encode() for row in data})
    else:
        Dataset.from_list(data).save_to_disk(path := tmp_path / "saved")

    def make() -> IterablePackedDataset:
        return IterablePackedDataset(
            str(path), encoder=Numbers(), max_seq_len=24, buffer_size=4, num_lanes=4, shuffle=9, epochs=1
        )

    one, two = Topology(1, batch_size=4), Topology(2, batch_size=2)

    def steps(result: Run) -> list[Any]:
        made = steps_of([[packs_of(batch) for batch in batches] for batches in result.batches], 1)
        return list(map(sorted, made))  # ranks have other slots

    whole = steps(run(make, one, limit=8))
    assert len(steps(run(make, one))) > 9, "no lane ends before"
    for stop in range(6):
        parts = [run(make, one, limit=stop)]
        parts.append(run(make, two, state=parts[0].states[0], limit=3))
        parts.append(run(make, one, state=parts[1].states[1], limit=5 - stop))
        assert [step for part in parts for step in steps(part)] == whole, f"cut after {stop}"


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_every_format_of_text_is_read_compressed_by_path_and_by_url(tmp_path: Path, suffix: str) -> None:
    data = numbered(30)
    lines = [json.dumps(row) for row in data]
    tar(tmp_path / "a.tar", {f"{row['i']}.json": json.dumps(row).encode() for row in data})
    contents = {
        "jsonl": "\n".join(lines).encode(),
        "json": json.dumps(data, indent=1).encode(),
        "txt": "\n".join(lines).encode(),
        "tar": (tmp_path / "a.tar").read_bytes(),
    }
    (tmp_path / "a.tar").unlink()
    folder = tmp_path / f"{tmp_path.name}{suffix}"
    folder.mkdir()
    for ending, content in contents.items():
        (folder / f"a.{ending}{suffix}").write_bytes(PACK[suffix](content))
    for place in (str(folder), in_memory(folder)):
        for ending in contents:
            found = read_all(as_source(f"{place}/a.{ending}{suffix}"), num_lanes=2)
            numbers = [json.loads(row["text"])["i"] if ending == "txt" else row["i"] for row in found]
            assert sorted(numbers) == list(range(30)), (place, ending)
