from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from streampack import (
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    Mix,
    MultipackBatchSampler,
    PackedDataLoader,
    PackedDataset,
    method_loader,
    prepare_model_for_packing,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"padding_idx": 10},
            "padding_idx=10 is outside the vocabulary of 10 ids (0 to 9); give a token of the model's",
        ),
        (
            {"truncate_eos": 10},
            "truncate_eos=10 is outside the vocabulary of 10 ids (0 to 9); give a token of the",
        ),
        ({"padding_idx": True}, "padding_idx=True is not a whole number; give one of at least 0"),
        ({"truncate_eos": -1}, "truncate_eos=-1 is below 0; give at least 0"),
    ],
)
def test_settings_that_are_token_ids_are_checked_against_the_vocabulary(settings: Any, message: str) -> None:
    rows = [{"input_ids": [1]}]
    given = {"max_seq_len": 6, "vocab_size": 10, **settings}
    makers: list[Callable[[], Any]] = [
        lambda: IterablePackedDataset(rows, **given),
        lambda: PackedDataset(rows, **given),
    ]
    if "truncate_eos" not in settings:
        makers.append(lambda: method_loader(rows, method="exact_fit", batch_size=1, **given))
    for make in makers:
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value).startswith(message)


ROWS = [{"input_ids": [1]}]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: IterablePackedDataset(ROWS, max_seq_len=8, shufle=True),
            TypeError,
            "'shufle'; did you mean 'shuffle'",
        ),
        (
            lambda: PackedDataset(ROWS, max_seq_len=8, pading_idx=1),
            TypeError,
            "'pading_idx'; did you mean 'padding_idx'",
        ),
        (
            lambda: PackedDataLoader(IterablePackedDataset(ROWS, max_seq_len=8), batch=1),
            TypeError,
            "'batch'; did you mean 'batch_size'",
        ),
        (
            lambda: prepare_model_for_packing(nn.Linear(1, 1), attention="flash_attention_2"),
            ValueError,
            "'flash'; did you mean 'flash'",
        ),
        (
            lambda: next(iter(IterablePackedDataset([{"ids": [1, 2], "n": 2}], max_seq_len=8))),
            ValueError,
            r"encoder=TokensEncoder\(tokens='ids', labels=None\)",
        ),
    ],
)
def test_what_is_misspelt_in_python_is_answered_with_what_was_meant(
    make: Any, kind: Any, message: str
) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_hints_leave_signatures_as_they_are() -> None:
    for each in (IterablePackedDataset, PackedDataset, PackedDataLoader):
        assert "args" not in inspect.signature(each).parameters
        with pytest.raises(TypeError, match="missing"):
            each()


LOADED = IterablePackedDataset(ROWS, max_seq_len=8)


@pytest.mark.parametrize("number", [2**63, 10**400])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("num_lanes", lambda n: IterablePackedDataset(ROWS, max_seq_len=8, num_lanes=n)),
        ("padding_idx", lambda n: IterablePackedDataset(ROWS, max_seq_len=8, padding_idx=n)),
        ("max_seq_len", lambda n: IterablePackedDataset(ROWS, max_seq_len=n)),
        ("max_outage", lambda n: IterablePackedDataset(ROWS, max_seq_len=8, max_outage=n)),
        ("batch_size", lambda n: PackedDataLoader(LOADED, batch_size=n)),
        ("num_workers", lambda n: PackedDataLoader(LOADED, num_workers=n)),
        ("timeout", lambda n: PackedDataLoader(LOADED, timeout=n)),
        ("max_tokens", lambda n: MultipackBatchSampler([1, 2], max_tokens=n)),
        ("max_seq_len", lambda n: PackedDataset(ROWS, max_seq_len=n)),
        ("retries", lambda n: JSONLSource("https://nowhere.invalid/a.jsonl", retries=n)),
        ("timeout", lambda n: JSONLSource("https://nowhere.invalid/a.jsonl", timeout=n)),
        ("max_line_bytes", lambda n: JSONLSource(__file__, max_line_bytes=n)),
    ],
)
def test_numbers_that_no_machine_can_hold_are_refused_by_name(name: str, make: Any, number: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}={number} is "):
        make(number)


def test_a_weight_that_is_no_float_is_refused() -> None:
    with pytest.raises(
        ValueError, match="source 'a' has weight=10+; give its fraction of the trained tokens"
    ):
        Mix([{"name": "a", "source": MapSource(ROWS), "weight": 10**400}])
