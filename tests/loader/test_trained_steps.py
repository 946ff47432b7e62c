"""A step, a batch or a run that trains nothing is said in every loop; recipes and Trainer make it an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    ChatEncoder,
    FlatteningCollator,
    IterablePackedDataset,
    PackedDataLoader,
    PackedDataset,
    PaddedCollator,
    collate_packed,
)
from streampack.map_style import collators
from tests.harness.hf_tokenizers import byte_level
from tests.harness.threads import ThreadSync, on_ranks


def row(tokens: int, trained: bool) -> dict[str, list[int]]:
    return {"tokens": [1] * tokens, "labels": [1 if trained else IGNORE_INDEX] * tokens}


def loader_of(*steps: tuple[int, bool], workers: int = 0, **settings: Any) -> PackedDataLoader:
    """Return a loader of steps of one pack of 8, each of (tokens, whether they are trained)."""
    data = IterablePackedDataset(
        [row(*each) for each in steps], max_seq_len=8, strategy="next_fit", num_lanes=1, **settings
    )
    return PackedDataLoader(data, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "steps",
    [
        [(8, False)],
        [(2, False), (8, True)],  # little, but nothing was trained before
        [(8, True), (5, False), (8, True)],
    ],
)
def test_a_step_that_trains_nothing(
    steps: list[tuple[int, bool]], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(*steps, workers=workers)
    for _ in range(2):
        assert len(list(loader)) == len(steps)
    [said] = [record.message for record in caplog.records if "step(s)" in record.message]
    assert " trained nothing: no label of their tokens is trained" in said
    with pytest.raises(
        ValueError, match=rf"^[12] of {2 * len(steps)} step\(s\) trained nothing: .*untrained='drop'"
    ):
        loader.require_trained()
    kept = loader_of(*steps, untrained="keep")
    caplog.clear()
    assert len(list(kept)) == len(steps)
    kept.require_trained()
    assert not caplog.records


def test_the_rest_of_an_epoch_may_train_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of((8, True), (3, False))
    assert len(list(loader)) == 2
    loader.require_trained()
    assert not [record for record in caplog.records if "step(s)" in record.message]


@pytest.mark.parametrize("wrong", [1, 2])
def test_ranks_count_together(wrong: int) -> None:
    """Of two ranks, ``wrong`` have only rows that train nothing."""

    def act(sync: ThreadSync) -> tuple[int, str]:
        rows = [row(8, trained=number % 2 >= wrong) for number in range(40)]
        data = IterablePackedDataset(rows, max_seq_len=8, num_lanes=2, shuffle=False)
        loader = PackedDataLoader(data)
        loader.rank_sync = sync
        trained = sum(int(batch.num_trained) for batch in loader)
        try:
            loader.require_trained()
        except ValueError as error:
            return trained, str(error)
        return trained, ""

    (first, said), (second, also_said) = on_ranks(2, act)
    assert (first == 0) + (second == 0) == wrong
    assert said == also_said
    assert said.partition(":")[0] == ("20 of 20 step(s) trained nothing" if wrong == 2 else "")


def chats(role: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": "Hi"}, {"role": role, "content": "Yes."}]}] * 4


def samples(role: str) -> list[dict[str, Any]]:
    return [ChatEncoder(byte_level())(each)._asdict() for each in chats(role)]


def stream(role: str) -> IterablePackedDataset:
    return IterablePackedDataset(chats(role), encoder=ChatEncoder(byte_level()), max_seq_len=64)


DOORS: dict[str, Callable[[str], Any]] = {
    "loader": lambda role: list(PackedDataLoader(stream(role))),
    "workers": lambda role: list(PackedDataLoader(stream(role), num_workers=1)),
    "stream": lambda role: list(stream(role)),
    "torch": lambda role: list(DataLoader(stream(role), batch_size=2, collate_fn=collate_packed)),
    "map-style": lambda role: PackedDataset(samples(role), max_seq_len=64),
    "flattening": lambda role: FlatteningCollator()(samples(role)),
    "padded": lambda role: PaddedCollator()(samples(role)),
}


@pytest.mark.parametrize("door", DOORS)
def test_conversations_of_an_unknown_role_are_said(door: str, caplog: pytest.LogCaptureFixture) -> None:
    collators._say_untrained.cache_clear()
    with caplog.at_level(logging.WARNING):
        DOORS[door]("assistant")
        assert not caplog.records
        DOORS[door]("bot")
    assert "only the assistant's are" in caplog.text
