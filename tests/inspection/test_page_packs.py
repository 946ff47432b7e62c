from __future__ import annotations

import re
from pathlib import Path

from streampack import IterablePackedDataset
from streampack.inspection.page_packs import MOST_TEXT, boundaries, mask_figure, packs_figure
from streampack.inspection.picture import first_packs
from streampack.inspection.reading import tolerant
from streampack.inspection.report import PackView, Run, Sequence
from tests.harness.html import parsed
from tests.harness.inspection import dataset, token_rows
from tests.inspection.test_page import EVIL


def packs(folder: Path) -> list[PackView]:
    return first_packs(tolerant(dataset("chat", folder).lane_config), 4, 4)


def test_every_block_has_what_is_shown_of_it(tmp_path: Path) -> None:
    views = packs(tmp_path)
    found = parsed(packs_figure(views))
    sequences = [sequence for view in views for sequence in view.sequences]
    assert found.tags["button"] == found.tags["template"] == len(sequences)
    assert found.values("data-detail") == found.values("id")
    assert len(set(found.values("id"))) == len(sequences)
    assert found.values("tabindex").count("0") == len(views), "a pack is one stop of the tab key"
    for sequence in sequences:
        assert sequence.place in found.text
        assert any(sequence.place in about for about in found.values("aria-label"))
        for run in sequence.runs[:2]:
            assert (run.text or "")[:60] in found.text


def test_widths_are_tokens(tmp_path: Path) -> None:
    """Blocks and padding of a pack together are the pack; the runs of a block are the block."""
    for view in packs(tmp_path):
        figure = packs_figure([view])
        widths = [int(each) for each in re.findall(r"<button[^>]*flex:(\d+) ", figure)]
        padding = sum(int(each) for each in re.findall(r'<i class="hatched" style="flex:(\d+) ', figure))
        assert widths == [sequence.length for sequence in view.sequences]
        assert sum(widths) + padding == view.max_seq_len
        for button, sequence in zip(re.findall(r"<button.*?</button>", figure), view.sequences, strict=True):
            runs = re.findall(r'<i class="([sm])\d" style="flex:(\d+) ', button)
            assert [(kind == "s", int(width)) for kind, width in runs] == [
                (run.trained, run.stop - run.start) for run in sequence.runs
            ]


def test_texts_and_places_of_the_data_cannot_leave_their_element() -> None:
    sequence = Sequence(EVIL, EVIL, 0, 8, (0, 8), 4, [Run(0, 4, False, EVIL), Run(4, 8, True, EVIL)])
    view = PackView(0, 0, 16, 8, [sequence], [0, 8, 16])
    found = parsed(packs_figure([view]) + boundaries(view) + mask_figure(view))
    assert not {"script", "img", "style"} & set(found.tags)
    assert found.text.count(EVIL) == 5
    assert EVIL in found.values("aria-label")[1]


def test_a_page_of_long_texts_and_many_sequences_is_bounded() -> None:
    class Long:
        def __call__(self, row: dict[str, int]) -> dict[str, list[int]]:
            return {"input_ids": [1] * 20}

        def decode(self, tokens: list[int]) -> str:
            return "<&" * 5000

    run = IterablePackedDataset([{"n": 1}] * 20_000, max_seq_len=65_536, num_lanes=1, encoder=Long())  # type: ignore[arg-type]
    views = first_packs(run.lane_config, 1, 6)
    assert [len(view.sequences) for view in views] == [3276] * 6
    figure = packs_figure(views)
    assert len(figure) < 3_000_000
    said = re.findall(r'<div class="said">(.*?)</div>', figure)
    assert max(len(re.sub(r"<[^>]*>", "", each)) for each in said) < 8 * MOST_TEXT


def test_the_mask_is_a_triangle_for_each_sequence() -> None:
    [view] = first_packs(IterablePackedDataset(token_rows([100, 200]), max_seq_len=400).lane_config, 1, 1)
    assert re.findall(r' d="(M[^"]*)"', mask_figure(view)) == [
        "M0.00 0.00V100.00H100.00Z", "M100.00 100.00V300.00H300.00Z", "M300.00 300.00V400H400Z"
    ]  # fmt: skip


def test_boundaries() -> None:
    [view] = first_packs(IterablePackedDataset(token_rows([5, 3]), max_seq_len=10).lane_config, 1, 1)
    text = parsed(boundaries(view)).text
    for words in ("sample 0", "0 - 5", "0 - 4", "5 - 8", "0 - 2", "padding", "8 - 10", "0 - 1"):
        assert words in text
