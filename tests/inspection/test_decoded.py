"""Packs as text: the boundaries, what is trained, special tokens and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.text import Text

from streampack import IterablePackedDataset
from streampack.inspection.decoded import MASKED, SPECIAL, TRAINED, decoded, decoded_pack

LETTERS = dict(enumerate("abcdefgh", start=3))


def decode(tokens: list[int]) -> str:
    """Decode as torchtune's tokenizers do: special tokens (below 3) are left out."""
    return "".join(LETTERS[token] for token in tokens if token in LETTERS)


def styled(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_spans_are_trained_or_masked() -> None:
    text = decoded([1, 3, 4, 5, 6, 2], [False, False, False, True, True, True], decode)
    assert styled(text) == [
        ("<1>", f"{MASKED} {SPECIAL}"),
        ("ab", MASKED),
        ("cd", TRAINED),
        ("<2>", f"{TRAINED} {SPECIAL}"),
    ]


def test_the_first_token_looks_like_the_second() -> None:
    """Its label is masked in every pack, also where all of a sample is trained."""
    assert styled(decoded([3, 4, 5], [False, True, True], decode)) == [("abc", TRAINED)]
    assert styled(decoded([3], [False], decode)) == [("a", MASKED)]
    assert decoded([], [], decode).plain == ""


def test_tokens_without_a_decoder_are_numbers() -> None:
    assert decoded([7, 8], [False, True], None).plain == "7 8 "


def test_a_pack_shows_its_rows_and_its_padding() -> None:
    class Encode:
        def __call__(self, row: Any) -> Any:
            return {"input_ids": np.array(row["ids"]), "labels": np.array(row["labels"])}

        def decode(self, tokens: list[int]) -> str:
            return decode(tokens)

    rows = [{"ids": [3, 4, 5], "labels": [-100, -100, 5]}, {"ids": [6, 7], "labels": [6, 7]}]
    data = IterablePackedDataset(rows, encoder=Encode(), max_seq_len=8, num_lanes=1)
    [pack] = data.stream()
    lines = [line.plain for line in decoded_pack(pack, data.lane_config)]
    assert lines == [
        "── sequence 1: sample 0; 3 tokens, 1 trained",
        "abc",
        "── sequence 2: sample 1; 2 tokens, 1 trained",
        "de",
        "── padding: 3 tokens",
    ]
    data = IterablePackedDataset(rows, encoder=Encode(), max_seq_len=8, num_lanes=1, pad_seqs_to=4)
    [pack] = data.stream()
    assert [line.plain for line in decoded_pack(pack, data.lane_config)] == [
        "── sequence 1: sample 0; 3 tokens, 1 trained, 1 of padding",
        "abc",
        "── sequence 2: sample 1; 2 tokens, 1 trained, 2 of padding",
        "de",
    ]
