"""Print what sources of stored tokens and MDS show, a line a case: run it in two versions of the package, and diff.

    python -m tests.harness.compare > lines

A line is a digest of the rows and cursors of all lanes, of what is fetched again, and of the errors of damaged files;
with ``--full``, all of it is printed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from streampack import PackedDataLoader
from streampack.fingerprint import digest
from streampack.sources import Reading
from streampack.sources.corpus_identity import fingerprint_of
from tests.harness.conformance import lists
from tests.harness.corpus import in_memory
from tests.harness.files import small_pieces
from tests.sources.test_damaged_files import FORMATS as DAMAGED
from tests.sources.test_damaged_files import LOST, nothing
from tests.sources.test_every_source import MAKE, ROWS, stream
from tests.sources.test_token_files import FORMATS

STORED = ("mds", "shard", "tokens", "megatron", "datatrove", "flat")


def observed(source: Any, folder: Path) -> Iterator[str]:
    """Yield what readers of a source show, its paths left out."""
    for num_lanes, window, epoch in ((1, 0, 0), (3, 7, 1), (8, 0, 0)):
        found: dict[Any, Any] = {}
        for lane in range(num_lanes):
            reader = source.read(Reading(lane, num_lanes=num_lanes, shuffle_window=window, epoch=epoch))
            while True:
                try:
                    row = next(reader)
                except StopIteration:
                    break
                except ValueError as error:
                    yield f"{reader.cursor} {error}".replace(str(folder), "").replace(
                        f"memory://{folder.name}", ""
                    )
                    reader.skip()
                    continue
                found[row.row_id] = lists(row.data)
                types = {name: getattr(value, "dtype", type(value)) for name, value in row.data.items()}
                yield f"{lane} {row.row_id} {row.cursor} {reader.cursor} {found[row.row_id]} {types}"
        try:
            assert list(map(lists, source.fetch_many([*found]))) == [*found.values()]
        except ValueError as error:  # rows of damaged parts may be read with those beside them
            yield f"{type(error)} is raised"
    yield f"{source.natural_lanes()} {source.ids_below} {fingerprint_of(source)}"


def cases() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Yield names of cases, and what makes the source of each in a folder."""

    def formatted(kind: str, remote: bool, folder: Path) -> Any:
        FORMATS[kind].write(folder)
        return FORMATS[kind].open(f"{in_memory(folder)}{FORMATS[kind].pattern}" if remote else folder)

    def damaged(case: str, remote: bool, folder: Path) -> Any:
        kind, count, change, _, _ = LOST.get(case, (case, 60, nothing, "", 0))
        if count:
            DAMAGED[kind].write(folder, count)
        change(folder)
        return DAMAGED[kind].open(f"{in_memory(folder) if remote else folder}/{DAMAGED[kind].opened}")

    of_stored = [case for case, (kind, *_) in LOST.items() if kind in (*STORED, "json")]
    for remote in (False, True):
        for kind in FORMATS:
            yield f"{kind}, {remote=}", partial(formatted, kind, remote)
        for case in ("mds", *of_stored):
            yield f"damaged: {case}, {remote=}", partial(damaged, case, remote)
    for kind in MAKE:
        if any(word in kind for word in STORED):
            yield kind, lambda folder, kind=kind: MAKE[kind](folder, ROWS)


def main() -> None:
    """Print the lines of all cases."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch, block=47)
        for name, make in cases():
            with tempfile.TemporaryDirectory() as folder:
                lines = list(observed(make(Path(folder)), Path(folder)))
                print(name, digest(lines), len(lines), *(lines if "--full" in sys.argv else []), sep="\n  ")
        for kind, workers in product(
            [kind for kind in MAKE if any(word in kind for word in STORED)], (0, 1, 2)
        ):
            with tempfile.TemporaryDirectory() as folder:
                data = stream(MAKE[kind](Path(folder), ROWS), epochs=2)
                loader = PackedDataLoader(data, num_workers=workers, packs_per_step=2)
                packs = [[batch.tokens.tolist(), str(batch.fragments)] for batch in loader]
                assert len(packs) > 10
                print(f"{kind}, {workers=} {digest(packs)}")


if __name__ == "__main__":
    main()
