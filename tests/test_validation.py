from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streampack import IterablePackedDataset, PackedDataset, method_loader


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
