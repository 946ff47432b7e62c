from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from streampack import IGNORE_INDEX, IterablePackedDataset
from streampack.attention.varlen import cu_seqlens_of
from streampack.inspection.page_packs import mask_figure
from streampack.inspection.picture import MOST_TEXT, first_packs
from streampack.inspection.reading import tolerant
from streampack.packing.batch import stack_packs
from tests.harness.corpus import rows
from tests.harness.inspection import CORPORA, dataset, token_rows
from tests.harness.segments import Pairs


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("way", [{}, {"split_across_pack": True}, {"balance_window": 4}, {"pad_seqs_to": 8}])
def test_the_first_packs_of_a_run(name: str, way: dict[str, object], tmp_path: Path) -> None:
    """Rows, texts, labels and boundaries are those of the packs that are iterated."""
    run = dataset(name, tmp_path, **way)
    stream = [pack for pack in run.stream() if "balance_window" not in way or pack.lane == 0]
    config = replace(tolerant(run.lane_config), balance_window=run.balance_window or 0)
    views = first_packs(config, run.num_lanes or 1, 5)
    assert len(views) == 5
    for view, pack in zip(views, stream, strict=False):
        assert (view.lane, view.number, view.max_seq_len) == (pack.lane, pack.number, pack.tokens.size)
        batch = stack_packs([pack])
        assert (
            view.cu_seqlens
            == cu_seqlens_of(batch.seq_lens, max_seq_len=pack.tokens.size)[: len(view.cu_seqlens)].tolist()
        )
        positions = torch.cat([torch.arange(first, last + 1) for first, last in view.positions])
        assert torch.equal(positions, batch.input_pos[0])
        for sequence, fragment in zip(view.sequences, pack.fragments, strict=True):
            found = run.trace(fragment)
            assert sequence.place == found["place"]
            assert sequence.of_sample == (fragment.start, fragment.stop)
            stop = sequence.start + sequence.length
            assert sequence.stop - stop == sequence.padding == fragment.padding
            assert pack.tokens[sequence.start : stop].tolist() == found["tokens"]
            assert sequence.trained == np.count_nonzero(pack.labels[sequence.start : stop] != IGNORE_INDEX)
            assert [sequence.start, *(each.stop for each in sequence.runs)] == [
                *(each.start for each in sequence.runs), stop
            ]  # fmt: skip
            for each in sequence.runs:
                labels = pack.labels[max(each.start, sequence.start + 1) : each.stop]
                assert ((labels != IGNORE_INDEX) == each.trained).all()
            if "text" in found and all(len(each.text or "") < MOST_TEXT for each in sequence.runs):
                assert "".join(each.text or "" for each in sequence.runs) == found["text"]


def test_a_long_text_is_shortened(tmp_path: Path) -> None:
    class Letters:
        def __call__(self, row: dict[str, int]) -> dict[str, list[int]]:
            return {"input_ids": [ord("a")] + [ord("b")] * (row["n"] - 2) + [ord("c")]}

        def decode(self, tokens: list[int]) -> str:
            return "".join(map(chr, tokens))

    run = IterablePackedDataset([{"n": 5000}, {"n": 9}], max_seq_len=5100, encoder=Letters())  # type: ignore[arg-type]
    [view] = first_packs(tolerant(run.lane_config), 1, 1)
    texts = [each.text or "" for sequence in view.sequences for each in sequence.runs]
    assert texts[0].startswith("ab")
    assert texts[0].endswith("bc")
    assert " [...] " in texts[0]
    assert len(texts[0]) <= MOST_TEXT + 10
    assert texts[1] == "abbbbbbbc"


def test_fewer_packs_than_asked_for() -> None:
    run = IterablePackedDataset(token_rows([5, 5, 5]), max_seq_len=8, num_lanes=2)
    assert [(view.lane, view.number) for view in first_packs(run.lane_config, 2, 9)] == [
        (0, 0),
        (1, 0),
        (0, 1),
    ]


def test_the_packs_of_groups_say_which_sequence_continues_which() -> None:
    """Positions go on, first tokens of answers count as trained, and the picture shows what they attend to."""
    run = IterablePackedDataset(rows(60), encoder=Pairs(), max_seq_len=48, overlong="drop", num_lanes=1)
    views, shared = first_packs(tolerant(run.lane_config), 1, 6), 0
    for view, pack in zip(views, run.stream(), strict=False):
        batch = stack_packs([pack])
        positions = torch.cat([torch.arange(first, last + 1) for first, last in view.positions])
        assert torch.equal(positions, batch.input_pos[0])
        assert sum(sequence.trained for sequence in view.sequences) == batch.num_trained
        for number, sequence in enumerate(view.sequences):
            assert pack.groups is None or sequence.parent == pack.groups.parents[number]
            if sequence.parent != -1:
                assert [run.trained for run in sequence.runs] == [True]
                shared += 1
        assert mask_figure(view).count("<path") == len(view.sequences) + (view.padding > 0) + sum(
            sequence.parent != -1 for sequence in view.sequences
        )
    assert shared > 5
