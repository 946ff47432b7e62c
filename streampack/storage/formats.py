"""File formats by the endings of names: those that sources read, and those that the library ``datasets`` reads."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from streampack.storage.base import File, path_in
from streampack.storage.compression import COMPRESSED, not_text

JSON_LINES = tuple(f".{name}{packed}" for name in ("jsonl", "ndjson") for packed in ("", *COMPRESSED))
PARQUET = (".parquet",)
NOT_TEXT = (
    ".bz2", ".xz", ".lzma", ".zip", ".lz4", ".7z", ".br", ".sz", ".snappy", ".tar", ".tgz", ".tar.gz", ".tar.zst",
    ".feather",
)  # fmt: skip
READ_BY_DATASETS = {
    ".arrow": "HFSource('arrow', data_files={path!r}, split='train')",
    ".csv": "HFSource('csv', data_files={path!r}, split='train')",
    ".tsv": "HFSource(datasets.load_dataset('csv', data_files={path!r}, sep='\\t', split='train'))",
}
"""Endings of other formats, and the source that reads each."""

TOKEN_FILES = {
    ".ds": "DatatroveSource",
    ".npy": "FlatTokensSource",
    ".bin": "MegatronSource if an .idx lies beside it, else with FlatTokensSource",
    ".idx": "MegatronSource",
}
"""Endings of files of tokens, and the source that reads each."""


def in_folder(folder: str, endings: Iterable[str]) -> list[str]:
    """Return the files in a folder, at any depth, whose names have one of these endings; no hidden files.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "en").mkdir()
    >>> [(folder / name).touch() for name in ("en/a.jsonl", ".b.jsonl", "c.md")]
    [None, None, None]
    >>> [Path(path).name for path in in_folder(str(folder), JSON_LINES)]
    ['a.jsonl']
    """
    everything = glob.glob(f"{glob.escape(str(Path(folder)))}/**/*", recursive=True)
    return sorted(path for path in everything if path.endswith(tuple(endings)) and Path(path).is_file())


def not_json_lines(file: File, *, local: bool) -> str | None:
    """Return why a file is not JSON lines, judging by its name and, of a local ``.json`` file, by its beginning.

    The reason names a way to read such a file. None if nothing is wrong with it.

    >>> not_json_lines(File("a.parquet", "a.parquet", 9), local=True)
    'it is a Parquet file and would be read as plain text; read it with ParquetSource'
    >>> not_json_lines(File("a.ds", "a.ds", 9), local=True)
    'it holds tokens, judging by its name; read it with DatatroveSource'
    """
    name = path_in(file.path)
    if name.lower().endswith(PARQUET):
        return not_text("a Parquet file")
    if name.lower().endswith(NOT_TEXT):
        return not_text("a binary file, judging by its name")
    ending = Path(name).suffix
    if ending in TOKEN_FILES:
        return f"it holds tokens, judging by its name; read it with {TOKEN_FILES[ending]}"
    if ending in READ_BY_DATASETS:
        source = READ_BY_DATASETS[ending].format(path=file.shown)
        return f"it is no file of JSON lines; let datasets read it: {source}"
    if ending == ".json" and local and _begins_a_list(file.path):
        return f"it is one JSON array and no lines; {whole_json(file.shown)}"
    return None


def whole_json(path: str) -> str:
    """Return the advice, for an error message, on a file that is one JSON document with all rows."""
    return f"let datasets read it: HFSource('json', data_files={path!r}, split='train')"


def other_json(raw: bytes, error: ValueError, path: str) -> str:
    """Return the end of the error message for a line that is no JSON: what the file may be, and how to read that.

    >>> other_json(b"{'text': 'a'}", ValueError(), "a.jsonl")
    '; Python wrote it in single quotes: write rows by json.dumps'
    """
    if isinstance(error, UnicodeDecodeError):
        return "; JSON is UTF-8: convert the file, such as by iconv -f LATIN1 -t UTF-8"
    if raw[:2] == b"{'":
        return "; Python wrote it in single quotes: write rows by json.dumps"
    if raw[:1] in (b"[", b"{"):
        return f"; if the file is one JSON document, {whole_json(path)}"
    return f"; if the file is plain text, let datasets read it: HFSource('text', data_files={path!r}, split='train')"


def _begins_a_list(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(256).lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"[")
