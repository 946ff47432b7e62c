"""Messages for files that hold no JSON lines: their kind, by first bytes and name, and the source that reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from streampack.storage.compression import COMPRESSED

ROWS_IN = ("data", "rows", "records", "examples", "instances", "train")
FEWEST_LINES = 3  # at a file's beginning that tell that it is of another kind; fewer may be damaged rows
ROW = re.compile(rb'\s*\{\s*(".*)?\}\s*', re.DOTALL)
COMPRESSIONS = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\x04\x22\x4d\x18": ".lz4",
}
ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # a file, and a stream as `datasets` writes
ARRAY = "it is a JSON array: let its name end in .json"


def like_row(line: object) -> bool:
    """Return whether a line begins and ends as a JSON object, even if it is a broken one, such as in Latin-1."""
    return isinstance(line, bytes) and ROW.fullmatch(line) is not None


def other_kind(path: str, head: bytes) -> str | None:
    """Return why a file with this beginning is no JSON lines, and what reads it; None if it is, or may be."""
    lines = [line for line in BytesIO(head) if line.endswith(b"\n") and not line.isspace()]
    rows = sum(map(like_row, lines))
    if _is_array(head, rows):
        return ARRAY
    if rows:
        return None
    if (found := by_content(path, head)) is not None:
        return found
    if len(lines) < FEWEST_LINES and b"\0" not in head:
        return None
    what = f"none of its first {len(lines):,} lines is a JSON object" if lines else "it has no line of JSON"
    return f"{what}; {way_out(path, head)}"


def way_out(path: str, head: bytes) -> str:
    """Return what to do with a file that is no JSON lines.

    >>> way_out("a.csv", b"n,text")
    "let datasets read it: HFSource('csv', data_files='a.csv', split='train')"
    """
    if (found := by_content(path, head)) is not None:
        return found
    if _is_array(head, 0):
        return ARRAY
    if head.lstrip().startswith(b"{"):
        jq = f" (jq -c . {path} > {path.removesuffix('.json')}.jsonl)"  # which reads no compressed file and no URL
        jq = "" if path.endswith(COMPRESSED) or "://" in path else jq
        return f"write each object on one line{jq}, or an array of them, and not a list of rows in one object"
    if path.endswith(".tsv"):
        load = f"datasets.load_dataset('csv', data_files={path!r}, sep='\\t', split='train', streaming=True)"
        return f"let datasets read it: HFSource({load})"
    csv = f"let datasets read it: HFSource('csv', data_files={path!r}, split='train')"
    return csv if path.endswith(".csv") else f"if it is text, TextSource({path!r}); if it is CSV, {csv}"


def one_object(row: Mapping[str, Any], path: str) -> str | None:
    """Return why the only object of a file is no row but all of its rows, and what to do; None if it may be a row.

    >>> one_object({"data": [{"text": "a"}, {"text": "b"}]}, "a.json")
    "its rows are in the list 'data': write that alone (jq .data a.json > rows.json)"
    """
    for name in ROWS_IN:
        if isinstance(listed := row.get(name), list) and listed and isinstance(listed[0], dict):
            return f"its rows are in the list {name!r}: write that alone (jq .{name} {path} > rows.json)"
    if row and all(isinstance(column, dict) for column in row.values()):
        return (
            "it is one object of columns, not rows: of a pandas frame write to_json(path, orient='records')"
        )
    return None


def by_content(path: str, head: bytes) -> str | None:
    """Return what to do with a file whose first bytes say what it is; None if they do not."""
    if head and not head.strip(b"\0"):
        return f"its first {len(head):,} bytes are zeros: it was not written to its end, so write or copy it again"
    for magic, ending in COMPRESSIONS.items():
        if head.startswith(magic):
            return f"it is compressed: let its name end in {ending}"
    if head.startswith(b"PAR1"):
        return f"it is a Parquet file: ParquetSource({path!r})"
    if head.startswith(ARROW):
        return f"it is an Arrow file: ArrowSource({path!r})"
    if head[257:262] == b"ustar":
        return f"it is a tar: WebDatasetSource({path!r})"
    if head.startswith(b"PK\x03\x04"):
        return "it is a zip: unpack it"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16: convert it to UTF-8"
    return None


def _is_array(head: bytes, rows: int) -> bool:
    """Return whether a file begins as a JSON array. ``rows`` of its lines look like rows of JSON lines.

    Where an array has a row on each line, only the last one has no comma after it.
    """
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    first = begin.split(b"\n", 1)[0].rstrip()
    return begin.startswith(b"[") and (rows == 0 or (rows == 1 and not first.endswith(b"]")))
