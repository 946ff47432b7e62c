from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from streampack import (
    IterablePackedDataset,
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
