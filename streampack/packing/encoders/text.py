"""The encoder of plain text, for pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.packing.encoders.base import Encoder
from streampack.packing.encoders.tokenizer import check_ends, check_tokenizer
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import Sample


class TextEncoder(Encoder):
    """Encoder of plain text, for pretraining: every token is trained.

    Args:
        tokenizer: one of torchtune's, a Hugging Face tokenizer, or anything with ``encode(text, add_bos=, add_eos=)``.
        column: the column that holds the text.
        add_bos: whether each text begins with BOS. None leaves it to the tokenizer.
        add_eos: whether each text ends with EOS.

    Raises:
        ValueError: for a tokenizer that ignores ``add_bos`` or ``add_eos``, or has no such token.
    """

    def __init__(
        self, tokenizer: Any, *, column: str = "text", add_bos: bool | None = None, add_eos: bool = True
    ) -> None:
        self.tokenizer = check_tokenizer(tokenizer)
        self.add_bos = check_ends(self.tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.add_eos = add_eos
        self.column = column

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        if self.column not in row:
            raise missing_column(row, self.column, option="column")
        text = row[self.column]
        if not isinstance(text, str):
            raise ValueError(
                f"column {self.column!r} holds {'no text (null)' if text is None else f'a {type(text).__name__}'}; "
                "mend the row, or set skip_bad=True, which counts and lists such rows"
            )
        tokens = self.tokenizer.encode(text, add_bos=self.add_bos, add_eos=self.add_eos)
        return sample_from_pair(tokens, tokens)

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))
