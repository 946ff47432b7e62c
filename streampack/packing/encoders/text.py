"""The encoder of plain text, for pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.packing.encoders.base import Encoder
from streampack.packing.encoders.tokenizer import check_ends, check_tokenizer, own_bos
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
        check_ends(self.tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.column = column
        self.add_bos = own_bos(self.tokenizer) if add_bos is None else add_bos
        self.add_eos = add_eos

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        if self.column not in row:
            raise missing_column(row, self.column, option="column")
        text = row[self.column]
        if text is None:
            raise ValueError(
                f"column {self.column!r} holds no text (null); mend the row, or set skip_bad=True, which counts "
                "and lists such rows"
            )
        if not isinstance(text, str):
            raise ValueError(f"column {self.column!r} holds a {type(text).__name__}; it must be text")
        try:
            tokens = self._encode(text)
        except Exception:
            text.encode()  # raises for half a surrogate pair, of which SentencePiece's RuntimeError says nothing
            raise
        return sample_from_pair(tokens, tokens)

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def _encode(self, text: str) -> Any:
        return self.tokenizer.encode(text, add_bos=self.add_bos, add_eos=self.add_eos)
