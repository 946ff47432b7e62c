"""Files that are not what their format says: refused at the start, or bad records behind which reading goes on."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from streampack import (
    DatatroveSource,
    FlatTokensSource,
    IterablePackedDataset,
    JSONLSource,
    MDSSource,
    MegatronSource,
    ParquetSource,
    TokenShardSource,
)
from streampack.sources import Reading
from streampack.tokenize import tokenize
from tests.harness.corpus import in_memory, next_error, write
from tests.harness.files import (
    COMPRESS,
    damage,
    rewrite,
    varint,
    write_datatrove,
    write_flat,
    write_mds,
    write_megatron,
)

Change = Callable[[Path], Any]


def nothing(folder: Path) -> None:
    """Change nothing."""


def poke(name: str, at: int, data: bytes) -> Change:
    """Write bytes over those of a file."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at : at + len(data)] = data
        (folder / name).write_bytes(content)

    return change


def edit(name: str, at: int, form: str, value: int) -> Change:
    """Write a number over that of a file."""
    return poke(name, at, struct.pack(form, value))


def cut(name: str, left: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:left])


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def index(change: Callable[[Any], Any]) -> Change:
    """Change the index of a folder of shards."""

    def changed(folder: Path) -> None:
        found = json.loads((folder / "index.json").read_text())
        change(found)
        (folder / "index.json").write_text(json.dumps(found))

    return changed


def first(**changes: Any) -> Change:
    return index(lambda found: found["shards"][0].update(changes))


def file(**changes: Any) -> Change:
    return index(lambda found: found["shards"][0]["raw_data"].update(changes))


def text(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def array(values: Any) -> Change:
    return lambda folder: np.save(folder / "a.npy", values)


# Formats: how a corpus is written, and how it is opened.


def documents(count: int) -> list[list[int]]:
    return [[i, i, i] for i in range(count)]


def token_rows(count: int) -> list[dict[str, list[int]]]:
    return [{"tokens": ids, "labels": ids} for ids in ([i] * (i % 5 + 1) for i in range(count))]


def texts(count: int) -> list[dict[str, Any]]:
    return [{"text": f"row {i} " * (i % 7), "i": i} for i in range(count)]


def shards(folder: Path, count: int) -> None:
    tokenize(token_rows(count), out=folder, lanes=1, dtype="uint32", progress=False)


def zipped(folder: Path, count: int) -> None:
    """Write MDS shards that a change still finds unpacked; see `packed`."""
    write_mds(folder, texts(count), {"text": "str", "i": "int"})


def packed(change: Change) -> Change:
    """Change the first shard, then pack it."""

    def changed(folder: Path) -> None:
        change(folder)
        data = zstandard.compress((folder / "shard.00000.mds").read_bytes())
        (folder / "shard.00000.mds.zstd").write_bytes(data)
        entry = {"basename": "shard.00000.mds.zstd", "bytes": len(data), "hashes": {}}
        first(compression="zstd:3", zip_data=entry)(folder)

    return changed


class Format(NamedTuple):
    """How many rows are written and how; what is opened, below the folder or its URL; and how."""

    write: Callable[[Path, int], Any]
    opened: str
    open: Callable[[Any], Any]


MARKS = "00000_unshuffled.ds"
IDX, BIN = "text_document_0.idx", "text_document_0.bin"
SHARD, MDS = "tokens-00000-00000.bin", "shard.00000.mds"
ONCE = {"max_outage": 0}
FORMATS = {
    "megatron": Format(
        lambda f, n: write_megatron(f, documents(n)), "text_document_0", partial(MegatronSource, storage=ONCE)
    ),
    "datatrove": Format(
        lambda f, n: write_datatrove(f, documents(n), losses=[[1, 0, 1]] * n), MARKS,
        partial(DatatroveSource, storage=ONCE),
    ),
    "tokens": Format(shards, "", partial(TokenShardSource, storage=ONCE)),
    "mds": Format(zipped, "", partial(MDSSource, storage=ONCE)),
    "json": Format(lambda f, n: write_mds(f, texts(n), {"text": "str", "i": "json"}), "", MDSSource),
}  # fmt: skip


# What is refused when the source is made.

REFUSED: dict[str, dict[str, tuple[Change, str]]] = {
    "megatron": {
        "no index": (remove(IDX), f"there is no {IDX} beside it; name pairs of Megatron's files, or read"),
        "another format": (poke(IDX, 0, b"TNTIDX\0\0\0"), "is no index of Megatron-LM, .* it begins with b'TNT"),
        "version": (edit(IDX, 9, "<Q", 2), r"no index of Megatron-LM, version 1, .*x02.*; write both"),
        "floats": (edit(IDX, 17, "<B", 7), r"of ids of type 1, 2, 3, 4, 5, 8: it begins with b'MMIDIDX.*\\x07'"),
        "cut header": (cut(IDX, 20), "has 20 bytes, and 10 sequences and -1 documents take 154; it was cut off"),
        "cut index": (cut(IDX, 90), "has 90 bytes, and 10 sequences and 10 documents take 242; it was cut off or"),
        "cut tokens": (cut(BIN, 100), "it has 100 bytes, and its index describes 120, in .*; one of the two was cut"),
        "another dtype": (edit(IDX, 17, "<B", 8), "it has 120 bytes, and its index describes 114"),
        "no tokens": (cut(BIN, 0), "it is empty"),
        "too many sequences": (edit(IDX, 18, "<Q", 2**61), "sequences and 10 documents take"),
        "no documents": (edit(IDX, 26, "<Q", 0), "and 10 sequences and -1 documents take"),
        "other documents": (edit(IDX, 34 + 120, "<q", 1), "in documents of the sequences 1 to 10 of 10"),
        "modes": (lambda f: write_megatron(f, documents(10), modes=True), "or has the modes of a multimodal"),
    },
    "datatrove": {
        "no index": (remove(f"{MARKS}.index"), f"there is no {MARKS}.index beside it, which says where documents end"),
        "odd index": (cut(f"{MARKS}.index", 77), f"{MARKS}.index has 77 bytes, and an index has 8 for each document"),
        "empty index": (cut(f"{MARKS}.index", 0), f"{MARKS}.index has 0 bytes, and an index has 8 for each document"),
        "short index": (cut(f"{MARKS}.index", 72), "it has 60 bytes, and the 27 tokens of its index take 54 or 108"),
        "cut tokens": (cut(MARKS, 58), "it has 58 bytes, and the 30 tokens of its index take 60 or 120; one of"),
        "no tokens": (cut(MARKS, 0), "it is empty"),
        "cut loss": (cut(f"{MARKS}.loss", 29), f"{MARKS}.loss has 29 bytes, and the file has 30 tokens; one"),
    },
    "tokens": {
        "a name out of it": (first(name="../x"), "the name '../x' is refused: it must be relative"),
        "a link out of it": (
            lambda f: ((f / "link.bin").symlink_to("/etc/passwd"), first(name="link.bin")(f)),
            "it is a link that leads out of",
        ),
        "no name": (first(name=None), r"shard 0: None of \d+ bytes is no shard; an entry has a name and a"),
        "a number as a name": (first(name=7), r"shard 0: 7 of \d+ bytes is no shard; an entry has a name"),
        "gone": (first(name="gone.bin"), "gone.bin: there is no such file"),
        "more tokens": (first(tokens=10**6), "bytes and its index says"),
        "fewer than none": (first(tokens=-1), "its description is damaged"),
        "no shard": (index(lambda found: found.update(shards=[])), "names no shard"),
        "no list": (index(lambda found: found.pop("shards")), "names no shards: it is no index of such"),
        "version": (
            index(lambda found: found.update(version=3)), "is of format 'streampack-tokens', version 3; this reads"
        ),
        "dtype": (index(lambda found: found.update(dtype="object")), "its description is damaged"),
        "no index": (remove("index.json"), "there is no .*index.json; name the folder that holds index.json"),
        "a list": (text("index.json", "[1]"), "names no shards"),
        "no json": (text("index.json", "{"), "is no JSON"),
        "cut off": (cut(SHARD, 4100), "it was cut off or replaced: copy it again"),
    },
    "mds": {
        "a name out of it": (file(basename="../x.mds"), "the name '../x.mds' is refused: it must be relative"),
        "no name": (file(basename=5), "5 of .* bytes is no shard"),
        "bytes": (file(bytes=7), "has .* bytes and its index says 7"),
        "pickles": (first(column_encodings=["pkl", "int"]), "shard 0: column 'text' is pickled, and reading it could"),
        "images": (first(column_encodings=["jpeg", "int"]), "column 'text' is encoded as 'jpeg', which is not read"),
        "objects": (first(column_encodings=["ndarray:object", "int"]), "column 'text' holds arrays of 'object'"),
        "columns": (first(column_encodings=["str"]), "its samples or columns do not fit together"),
        "sizes": (first(column_sizes=[None, -8]), "column 'i' of -8 bytes is none"),
        "samples": (first(samples=-1), "its samples or columns do not fit together"),
        "more samples": (first(samples=10**6), "it is too short for its samples: copy it again"),
        "format": (first(format="json"), "it is no MDS shard, version 2"),
        "compression": (first(compression="br:11"), "compression 'br:11' is not read; it can be gz, zstd"),
        "no file": (first(raw_data=None), "it lacks its file or its columns"),
        "version": (index(lambda found: found.update(version=3)), "shard 0: it is no MDS shard, version 2"),
        "no shard": (index(lambda found: found.update(shards=[])), "names no shard"),
    },
}  # fmt: skip


PLACES = [(kind, False) for kind in REFUSED] + [("megatron", True), ("datatrove", True)]


@pytest.mark.parametrize(
    ("kind", "remote", "case"), [(kind, remote, case) for kind, remote in PLACES for case in REFUSED[kind]]
)
def test_what_does_not_fit_together_is_refused_at_the_start(
    tmp_path: Path, kind: str, remote: bool, case: str
) -> None:
    change, message = REFUSED[kind][case]
    made, folder = FORMATS[kind], tmp_path / tmp_path.name
    made.write(folder, 10)
    change(folder)
    with pytest.raises(ValueError, match=message):
        IterablePackedDataset(
            made.open(f"{in_memory(folder) if remote else folder}/{made.opened}"), max_seq_len=8
        )


FLAT: dict[str, tuple[str | None, Any, Change, str]] = {
    "no dtype": (None, None, nothing, "it has no header that says how ids are stored; give dtype, such as"),
    "odd": (None, "uint16", cut("a.npy", 99), "it has 99 bytes, no multiple of the 2 of uint16; it was cut"),
    "empty": (None, "uint16", cut("a.npy", 0), "it is empty"),
    "cut numpy": ("numpy", None, cut("a.npy", 200), "it has 200 bytes, and its header describes 328"),
    "cut header": ("numpy", None, cut("a.npy", 40), "its numpy header cannot be read"),
    "cut llm.c": ("llm.c", None, cut("a.npy", 1100), "it has 1,100 bytes, and its header describes 1,224"),
    "matrix": (None, None, array(np.ones((3, 4), np.int32)), r"it holds an array of int32 of shape \(3, 4\); save"),
    "floats": (None, None, array(np.ones(9)), "it holds an array of float64"),
    "big endian": (None, None, array(np.ones(9, ">i4")), "it holds an array of >i4"),
    "objects": (None, None, array(np.array([None])), "it holds an array of object"),
    "a Parquet file": (
        None, "uint16", lambda folder: Path(folder, "a.npy").write_bytes(b"PAR1" * 50),
        "it holds no ids of uint16: it is a Parquet file",
    ),
    "another dtype": ("numpy", "int64", nothing, "its header says uint16, and dtype is 'int64'; leave dtype out"),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAT)
def test_a_file_that_is_no_flat_file_is_refused(tmp_path: Path, case: str) -> None:
    header, dtype, change, message = FLAT[case]
    path = write_flat(tmp_path / "a.npy", list(range(2, 102)), header=header)
    change(tmp_path)
    with pytest.raises(ValueError, match=f"a.npy: {message}"):
        FlatTokensSource(path, eos_token_id=0, dtype=dtype)


# What is found when it is read: a record or a stretch of records is lost, and the others are read.


def jsonl(folder: Path, count: int, *, suffix: str) -> None:
    rows = texts(count)
    rows[7]["text"] = "x" * 300_000
    write(folder / f"a.jsonl{suffix}", rows)


def flat(folder: Path, count: int) -> None:
    """Documents of which the eighth is too long."""
    lengths = [100 if i == 7 else 1 + i % 5 for i in range(count)]
    write_flat(folder / "a.bin", [token for i, n in enumerate(lengths) for token in [*[i] * n, 999]])


def table(folder: Path, count: int, *, group: int = 10, **options: Any) -> None:
    options = {"write_page_checksum": True, "use_dictionary": False, "compression": "none", **options}
    pq.write_table(pa.Table.from_pylist(texts(count)), folder / "a.parquet", row_group_size=group, **options)


def no_text(folder: Path) -> None:
    """Write a text that is no UTF-8."""
    found = [row["text"].encode() for row in texts(40)]
    found[7] = b"\xff\xfe"
    columns = {"i": list(range(40)), "text": pa.array(found, pa.binary()).view(pa.string())}
    pq.write_table(pa.table(columns), folder / "a.parquet")


def outside(folder: Path) -> None:
    """Let a row group of a Parquet file lie behind its end."""
    path = folder / "a.parquet"
    offset = pq.read_metadata(path).row_group(40).column(1).data_page_offset
    rewrite(path, offset, (1 << 7 * len(varint(offset)) - 1) - 1)


def nested(folder: Path) -> None:
    """Nest a value of an MDS shard deeper than is read."""
    rows = [{**row, "i": "[" * 100_000 if row["i"] == 7 else str(row["i"])} for row in texts(30)]
    write_mds(folder, rows, {"text": "str", "i": "str"})
    index = folder / "index.json"
    index.write_text(index.read_text().replace('["str", "str"]', '["str", "json"]'))


def half(folder: Path) -> None:
    """Write over the middle of a packed shard."""
    write_mds(folder, texts(30), {"text": "str", "i": "int"}, compression="zstd:3")
    path = folder / f"{MDS}.zstd"
    poke(path.name, path.stat().st_size // 2, b"\xff" * 20)(folder)


def sample(folder: Path) -> None:
    """Write a length over that of sample 3."""
    start = struct.unpack_from("<I", (folder / MDS).read_bytes(), 4 + 4 * 3)[0]
    poke(MDS, start, b"\xff\0\0\0")(folder)


def offsets(value: int) -> Change:
    """Write an offset of a token shard over that of document 12."""

    def change(folder: Path) -> None:
        [shard] = TokenShardSource(folder).shards
        edit(SHARD, shard.offsets_at + 12 * 12, "<q", value)(folder)

    return change


FORMATS |= {
    **{
        f"jsonl{suffix}": Format(
            partial(jsonl, suffix=suffix), f"a.jsonl{suffix}", partial(JSONLSource, max_line_bytes=999)
        )
        for suffix in ("", ".gz", ".zst")
    },
    "flat": Format(flat, "a.bin", partial(FlatTokensSource, eos_token_id=999, dtype="uint16", max_document_tokens=21)),
    "parquet": Format(table, "a.parquet", ParquetSource),
    "small groups": Format(partial(table, group=200, write_page_checksum=False), "a.parquet", ParquetSource),
}  # fmt: skip

STARTS, ENDS = 34 + 4 * 60, 34 + 12 * 60  # the tables of an index of Megatron of 60 documents
BAD_TABLE = rf"{BIN}, document \d+: the (index|offsets) of its (documents is damaged|records lead out)"
BAD_ENDS = rf"{MARKS}, document \d+: the offsets of its records lead out of {MARKS}"
BAD_OFFSETS = r"document \d+: the offsets of .* lead out of"
BAD_SUM = r"document \d+: its checksum is not the one that was written"
BAD_SAMPLES = "the offsets of its records lead out of shard.00000.mds(.zstd)?, or backwards"
LOST: dict[str, tuple[str, int, Change, str, int]] = {
    "a start behind the end": ("megatron", 60, edit(IDX, STARTS + 8 * 30, "<q", 2**62), BAD_TABLE, 9),
    "a start between ids": ("megatron", 60, edit(IDX, STARTS + 8 * 30, "<q", 359), BAD_TABLE, 9),
    "backwards": ("megatron", 60, edit(IDX, ENDS + 8 * 30, "<q", 28), BAD_TABLE, 9),
    "documents behind the end": ("megatron", 60, edit(IDX, ENDS + 8 * 30, "<q", 2**61), BAD_TABLE, 9),
    **{
        f"datatrove {end}": ("datatrove", 60, edit(f"{MARKS}.index", 8 * 30, "<Q", end), BAD_ENDS, 9)
        for end in (0, 2**40, 2**63)
    },
    **{f"tokens {value}": ("tokens", 30, offsets(value), BAD_OFFSETS, 4) for value in (-5, 10**6, 2**62)},
    "a token": ("tokens", 30, edit(SHARD, 4096 + 4 * 40, "<I", 7), BAD_SUM, 1),
    "an offset": ("tokens", 30, offsets(35), BAD_SUM, 2),
    **{
        f"{what} {name}": ("mds", 30, how(poke(MDS, at, data)), message, 10)
        for name, how in (("raw", lambda change: change), ("packed", packed))
        for what, at, data, message in (
            ("count", 0, b"\x09\0\0\0", r"00000.mds(.zstd)?, sample 0: it holds 9 samples and its index says"),
            ("offset", 4 + 4 * 3, b"\xff" * 4, BAD_SAMPLES),
            ("offset 0", 4 + 4 * 3, bytes(4), BAD_SAMPLES),
        )
    },
    "cut packed": ("mds", 30, packed(cut(MDS, 30)), "it is too short for its samples: copy it again", 10),
    "archive": ("mds", 0, half, "shard.00000.mds.zstd, sample 0: it is damaged", 10),
    "sample": ("mds", 30, sample, r"shard.00000.mds, sample 3: not a sample of its columns \(the columns take", 1),
    "nested": ("json", 0, nested, "sample 7: not a sample of its columns .maximum recursion depth", 1),
    **{
        f"line{suffix}": (f"jsonl{suffix}", 30, nothing, f"a.jsonl{suffix}(:8|, byte .*): the line is longer than", 1)
        for suffix in ("", ".gz", ".zst")
    },
    "document": ("flat", 30, nothing, r"a.bin, token \d+: the document has more than max_document_tokens=21 by", 1),
    "page": (
        "parquet", 40, lambda f: damage(f / "a.parquet", group=2),
        r"a.parquet, row 20: row group 2 is damaged: ", 10,
    ),
    "row group": ("small groups", 20_000, outside, "row group 40 is damaged: it lies outside the file", 200),
    "no utf-8": ("parquet", 0, no_text, "row 7.*'utf-8' codec can't decode byte 0xff", 1),
}  # fmt: skip


def number(row: Any) -> int:
    return int(row["i"] if "i" in row else row["tokens"][0])


@pytest.mark.parametrize("remote", [False, True], ids=["local", "url"])
@pytest.mark.parametrize("case", LOST)
def test_a_damaged_record_is_an_error_with_its_place_and_the_others_are_read(
    tmp_path: Path, case: str, remote: bool
) -> None:
    """A new reader at the cursor before it raises the same error."""
    kind, count, change, message, lost = LOST[case]
    made, folder = FORMATS[kind], tmp_path / tmp_path.name
    folder.mkdir()
    if count:
        made.write(folder, count)
    change(folder)
    place = f"{in_memory(folder) if remote else folder}/{made.opened}"
    source, all_rows = made.open(place), set(range(count or (40 if kind == "parquet" else 30)))
    for num_lanes, window in ((1, 0), (3, 6)):
        found, errors = [], 0
        for lane in range(num_lanes):
            reading: dict[str, Any] = {"num_lanes": num_lanes, "shuffle_window": window}
            reader = source.read(Reading(lane, **reading))
            while True:
                before = reader.cursor
                try:
                    found.append(number(next(reader).data))
                except StopIteration:
                    break
                except ValueError as error:
                    errors += 1
                    assert re.search(message, str(error))
                    again = source.read(Reading(lane, start=before, **reading))
                    assert next_error(again) == str(error)
        assert len(found) == len(set(found))
        missing = all_rows - set(found)
        assert 0 < len(missing) <= lost
        assert errors
    settings: dict[str, Any] = {"max_seq_len": 32, "encoder": lambda row: [number(row)] * 2, "num_lanes": 1}
    with pytest.raises(ValueError, match=message):
        list(IterablePackedDataset(source, **settings))
    skipping = IterablePackedDataset(source, skip_bad=True, **settings)
    packed_rows = {token for pack in skipping for token in pack["tokens"].tolist()}
    assert skipping.ledger().dropped_samples["bad"] > 0
    assert len(all_rows - packed_rows) <= lost


@pytest.mark.parametrize(
    "remote", [pytest.param(False, id="local"), pytest.param(True, id="url", marks=pytest.mark.slow)]
)
def test_no_byte_of_a_token_shard_changes_unnoticed(tmp_path: Path, remote: bool) -> None:
    """Each byte after the header is changed once: every document is the one that was written, or a bad record."""
    rows = [{"tokens": [i, *range(i)], "labels": [-100, *range(i)]} for i in range(2, 12)]
    tokenize(rows, out=tmp_path, lanes=1, dtype="uint16", progress=False)
    good, lost = (tmp_path / SHARD).read_bytes(), 0
    for at in range(4096, len(good)):
        poke(SHARD, at, bytes([good[at] ^ 1 << at % 8]))(tmp_path)
        reader = TokenShardSource(in_memory(tmp_path) if remote else tmp_path, storage=ONCE).read(Reading())
        found, errors = [], 0
        while True:
            try:
                row = next(reader).data
                found.append({name: row[name].tolist() for name in ("tokens", "labels")})
            except StopIteration:
                break
            except ValueError as error:
                errors += 1
                assert re.search(
                    r"document \d+: (its checksum is not|the offsets of its records)", str(error)
                )
        assert all(row in rows for row in found), at
        assert errors or found == rows
        lost += bool(errors)
        poke(SHARD, at, good[at : at + 1])(tmp_path)
    assert lost > len(good) - 4096 - 12, (
        "all but the zeros after the tokens, and those of the end, are checked"
    )


@pytest.mark.parametrize("case", ["document", "tokens -5", "datatrove 0", "backwards"])
def test_rows_that_waited_on_both_sides_of_damage_are_read_again(tmp_path: Path, case: str) -> None:
    """Behind a URL, rows that lie near one another are read with what lies between them."""
    kind, count, change, _, _ = LOST[case]
    folder = tmp_path / tmp_path.name
    folder.mkdir()
    FORMATS[kind].write(folder, count)
    change(folder)
    source = FORMATS[kind].open(f"{in_memory(folder)}/{FORMATS[kind].opened}")

    def stream() -> IterablePackedDataset:
        return IterablePackedDataset(source, max_seq_len=8, shuffle=count, skip_bad=True)

    data, packs, states = stream(), [], []
    for pack in data:
        packs.append(pack["tokens"].tolist())
        states.append(data.state_dict())
    assert data.ledger().dropped_samples["bad"] > 0
    for k, state in enumerate(states, 1):
        (resumed := stream()).load_state_dict(state)
        assert [pack["tokens"].tolist() for pack in resumed] == packs[k:]


@pytest.mark.parametrize(("compression", "says"), [("gz", None), ("zstd:3", 1 << 20), ("zstd:3", 1 << 60)])
def test_a_shard_that_decompresses_to_more_than_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, says: int | None
) -> None:
    """16 MiB of zeros behind some KB; the index may say anything."""
    write_mds(tmp_path, texts(3), {"text": "str", "i": "int"}, compression=compression)
    found = json.loads((tmp_path / "index.json").read_text())
    [entry] = found["shards"]
    bomb = COMPRESS[compression][1](bytes(16 << 20))
    (tmp_path / entry["zip_data"]["basename"]).write_bytes(bomb)
    entry["zip_data"]["bytes"] = len(bomb)
    entry["raw_data"] = {**entry["raw_data"], "bytes": says}
    (tmp_path / "index.json").write_text(json.dumps(found))
    # private: no index may allow more than this, 1 GiB, which would take seconds to pack
    monkeypatch.setattr("streampack.sources.formats.mds.MAX_CONTENT_BYTES", 2 << 20)
    reader = MDSSource(tmp_path).read(Reading())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="has more content than the [0-9,]+ bytes that its index names"):
            next(reader)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
