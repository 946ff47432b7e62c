"""Writers of other programs' files of tokens, made from the formats' descriptions."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Documents = Sequence[Sequence[int]]

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(
    folder: Path,
    documents: Documents,
    *,
    name: str = "text_document",
    dtype: str = "int32",
    per_file: int | None = None,
    sentence: int | None = None,
    modes: bool = False,
) -> Path:
    """Write ``.bin`` and ``.idx`` files of ``per_file`` documents. With ``sentence``, documents have several sequences,
    of that many tokens each. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    width = np.dtype(dtype).itemsize
    per_file = per_file or len(documents)
    for number, begin in enumerate(range(0, len(documents), per_file)):
        own = documents[begin : begin + per_file]
        lengths: list[int] = []
        firsts = [0]
        for document in own:
            step = sentence or max(1, len(document))
            lengths += [len(document[i : i + step]) for i in range(0, len(document), step)]
            if not document and sentence is None:
                lengths.append(0)
            firsts.append(len(lengths))
        data = b"".join(np.array(document, dtype).tobytes() for document in own)
        index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + bytes([MEGATRON_CODES[dtype]])
        index += struct.pack("<QQ", len(lengths), len(firsts)) + struct.pack(f"<{len(lengths)}i", *lengths)
        pointers = [width * sum(lengths[:i]) for i in range(len(lengths))]
        index += struct.pack(f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(firsts)}q", *firsts)
        (folder / f"{name}_{number}.bin").write_bytes(data)
        (folder / f"{name}_{number}.idx").write_bytes(index + bytes(len(lengths) if modes else 0))
    return folder


def write_datatrove(
    folder: Path,
    documents: Documents,
    *,
    losses: Sequence[Sequence[int]] | None = None,
    width: int = 2,
    per_file: int | None = None,
) -> Path:
    """Write ``.ds`` files of ``per_file`` documents, with ``losses`` as bytes of 0 or 1. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    per_file = per_file or len(documents)
    for number, begin in enumerate(range(0, len(documents), per_file)):
        own = documents[begin : begin + per_file]
        path = folder / f"{number:05d}_unshuffled.ds"
        tokens = [token for document in own for token in document]
        ends = np.cumsum([len(document) for document in own]).tolist()
        path.write_bytes(struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))
        path.with_name(f"{path.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
        if losses is not None:
            marks = [mark for loss in losses[begin : begin + per_file] for mark in loss]
            path.with_name(f"{path.name}.loss").write_bytes(bytes(marks))
    return folder


def write_flat(
    path: Path, tokens: Sequence[int], *, dtype: str = "uint16", header: str | None = None
) -> Path:
    """Write a flat file of tokens: raw, or with the header of ``numpy`` or ``llm.c``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.array(tokens, np.dtype(dtype).newbyteorder("<"))
    if header == "numpy":
        with path.open("wb") as file:  # `numpy.save` would add an ending to the name
            np.save(file, ids)
        return path
    head = b""
    if header == "llm.c":
        magic, version = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[dtype]
        head = struct.pack("<3i", magic, version, len(tokens)) + bytes(1012)
    path.write_bytes(head + ids.tobytes())
    return path
