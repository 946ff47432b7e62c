"""Pictures of packs: tokens lie where they are in the pack, and the text says what is trained."""

from __future__ import annotations

import re

from streampack import IterablePackedDataset
from streampack.inspection.pack_pictures import MOST_LISTED, pack_picture
from streampack.inspection.picture import first_packs
from tests.support.inspection import token_rows


def picture(lengths: list[int], max_seq_len: int = 64) -> str:
    data = IterablePackedDataset(token_rows(lengths, prompt=0.5), max_seq_len=max_seq_len)
    [pack] = first_packs(data.lane_config, 1, 1)
    return pack_picture(pack, step=3)


def test_rectangles_are_the_tokens() -> None:
    html = picture([32, 16])
    found = re.findall(r'<rect class="(\w+)" x="(\d+)" width="(\d+)"', html)
    assert [(kind, int(x), int(width)) for kind, x, width in found] == [
        ("masked", 0, 16),
        ("trained", 16, 16),
        ("masked", 32, 8),
        ("trained", 40, 8),
        ("padding", 48, 16),
    ]
    assert "A pack of step 3: 2 sequences, 48 of 64 tokens, 25.0% padding" in html


def test_long_lists_are_cut() -> None:
    html = picture([2] * (MOST_LISTED + 5), max_seq_len=2 * MOST_LISTED + 10)
    assert html.count("<li") == MOST_LISTED
    assert "<p>5 more are not listed.</p>" in html
    assert html.count('class="edge"') == MOST_LISTED + 5
