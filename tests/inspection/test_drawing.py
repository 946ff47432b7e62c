from __future__ import annotations

import re

from streampack import IterablePackedDataset
from streampack.inspection.drawing import COLOURS, END, MASKED, PADDING, TRAINED, draw_packs
from streampack.inspection.picture import first_packs
from tests.harness.inspection import token_rows


def drawn(lengths: list[int], width: int = 32, *, pad_seqs_to: int = 1, **settings: object) -> str:
    rows = token_rows(lengths, prompt=0.5)
    config = IterablePackedDataset(rows, max_seq_len=64, pad_seqs_to=pad_seqs_to).lane_config
    return draw_packs(first_packs(config, 1, 4), width=width, **settings)  # type: ignore[arg-type]


def test_a_line_for_each_pack_and_a_cell_for_each_stretch() -> None:
    """A cell is 2 tokens: 8 masked and 8 trained cells of the first row, whose last cell ends it, and so on."""
    lines = drawn([32, 16, 40], colour=False).splitlines()
    assert lines == [
        MASKED * 8 + TRAINED * 7 + END + MASKED * 4 + TRAINED * 3 + END + PADDING * 8,
        MASKED * 10 + TRAINED * 9 + END + PADDING * 12,
    ]


def test_padding_at_the_ends_of_sequences() -> None:
    """10 tokens of 16 and 20 of 32."""
    ten = MASKED * 2 + TRAINED * 2 + END + PADDING * 3
    twenty = MASKED * 5 + TRAINED * 4 + END + PADDING * 6
    assert drawn([10, 20], pad_seqs_to=16, colour=False) == ten + twenty + PADDING * 8


def test_neighbours_differ_in_colour() -> None:
    coloured = drawn([8] * 8, width=64)
    found = [int(code) for code in re.findall(r"\x1b\[38;5;(\d+)m.\x1b\[0m", coloured)]
    assert found == [COLOURS[i // 8 % len(COLOURS)] for i in range(64)]
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == drawn([8] * 8, width=64, colour=False)


def test_sequences_shorter_than_a_cell() -> None:
    """Of several in a cell, the middle one is drawn, and none of their ends."""
    assert (
        drawn([1] * 64, width=8, colour=False) == TRAINED * 8
        or len(drawn([1] * 64, width=8, colour=False)) == 8
    )
    assert END not in drawn([4] * 16, width=8, colour=False)
