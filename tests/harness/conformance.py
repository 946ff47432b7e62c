"""Checks that a reader or stream continues from each of its states.

`check_cursors` is for readers of sources, `check_resume_everywhere` for streams of packs with ``state_dict()``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np

from streampack.types import Cursor


class Stream(Protocol):
    """An `IterablePackedDataset`, or what behaves like one."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


def check_cursors(read: Callable[[Cursor | None], Any]) -> list[Any]:
    """Reading from the cursor before row k yields exactly the rows from k on. Returns the rows' data.

    ``read(start)`` opens a new reader. The cursor at the end yields nothing.
    """
    rows, cursors = read_with_cursors(read(None))
    rows = list(map(comparable, rows))
    for k, cursor in enumerate(cursors):
        assert all(isinstance(number, int) and number >= 0 for number in cursor)
        assert list(map(comparable, read(cursor))) == rows[k:], f"from row {k}"
    return [row.data for row in rows]


def read_with_cursors(reader: Any) -> tuple[list[Any], list[Cursor]]:
    """Read all rows; return them, and the cursors before each and behind the last."""
    rows, cursors = [], [reader.cursor]
    for row in reader:
        rows.append(row)
        cursors.append(reader.cursor)
    return rows, cursors


def comparable(row: Any) -> Any:
    """Return a row whose data are `lists`."""
    return row._replace(data=lists(row.data))


def lists(value: Any) -> Any:
    """Return a value of plain Python: lists for arrays, and dicts for rows of tables."""
    if isinstance(value, Mapping):
        return {name: lists(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(lists, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def content(pack: Mapping[str, Any]) -> tuple[Any, ...]:
    """All of a pack, comparable: every array, the boundaries, the provenance."""
    lens = pack["segment_lens" if "segment_lens" in pack else "seq_lens"]  # with groups, or without
    arrays = (pack["tokens"], pack["labels"], pack["input_pos"], lens)
    plain = (pack["num_seqs"], pack["fragments"], pack["epoch"], pack["lane"])
    return (*(array.numpy().tobytes() for array in arrays), *plain)


def check_resume_everywhere(
    make: Callable[[], Stream], *, packs: int, ahead: int = 3, whole_every: int = 60
) -> list[Mapping[str, Any]]:
    """Stop after each of the first ``packs`` packs, go on elsewhere, stop again, go on again: all identical.

    ``make()`` builds the stream anew, as another process would. After k packs, a second stream takes the
    state and yields 1 to ``ahead`` packs; a third takes *its* state and yields ``ahead`` more, or, every
    ``whole_every`` steps, all there are. Every pack is compared in all its arrays. Where the run ends, the
    others must end too. Returns the packs.
    """
    stream = make()
    iterator = iter(stream)
    states = [stream.state_dict()]
    frozen = [pickle.dumps(states[0])]
    kept: list[Mapping[str, Any]] = []
    for pack in islice(iterator, packs + 2 * ahead):
        kept.append(pack)
        states.append(stream.state_dict())
        frozen.append(pickle.dumps(states[-1]))
    expected = [content(pack) for pack in kept]
    finite = len(kept) < packs + 2 * ahead
    for k, state in enumerate(states[: packs + 1]):
        assert pickle.dumps(state) == frozen[k], f"the state after {k} packs changed while the stream went on"
        second = make()
        second.load_state_dict(state)
        middle = k + 1 + k % ahead
        got = [content(pack) for pack in islice(second, middle - k)]
        assert got == expected[k:middle], f"from the state after {k} packs"
        if k + len(got) < middle:  # it has seen the end, which the state after the last pack has not
            middle = k + len(got)
        else:
            assert second.state_dict() == states[middle], f"after {k} packs and {middle - k} more"
        end = len(kept) + finite if k % whole_every == 0 else middle + ahead
        third = make()
        third.load_state_dict(second.state_dict())
        got = [content(pack) for pack in islice(third, end - middle)]
        assert got == expected[middle:end], f"from the state after {k} packs and {middle - k} more"
    return kept
