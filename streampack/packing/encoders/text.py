"""The encoder of plain text, for pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.fingerprint import digest, plain
from streampack.packing.assemble import as_sample, missing_column
from streampack.packing.encoders.base import PROBE, Encoder
from streampack.packing.encoders.tokenizer import check_ends, check_tokenizer, own_bos, own_fingerprint
from streampack.types import Sample


class TextEncoder(Encoder):
    """Plain text for pretraining: every token is trained.

    Args:
        tokenizer: one of torchtune's, a Hugging Face tokenizer, or anything with ``encode(text, add_bos=, add_eos=)``.
        column: which column holds the text.
        add_bos: whether each text begins with BOS. None: as the tokenizer does by itself.
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
        self._processor = sentencepiece_of(self.tokenizer)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        if self.column not in row:
            raise missing_column(row, self.column)
        text = row[self.column]
        if not isinstance(text, str):
            raise ValueError(f"column {self.column!r} holds a {type(text).__name__}; it must be text")
        try:
            tokens = self._encode(text)
        except Exception:
            text.encode()  # raises for half a surrogate pair, of which SentencePiece's RuntimeError says nothing
            raise
        if self._processor is not None:
            return Sample(tokens, tokens)
        return as_sample({"tokens": tokens}, labels=None)

    def ids_below(self, stored: int | None) -> int | None:
        """Return SentencePiece's vocabulary size. Other tokenizers, and subclasses, may make any ids."""
        if self._processor is None or type(self) is not TextEncoder:
            return None
        return int(self._processor.vocab_size())

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the settings, the tokenizer, and the tokens of a sentence."""
        probe = plain(self._encode(PROBE))
        return digest("text", self.column, self.add_bos, self.add_eos, probe, own_fingerprint(self.tokenizer))

    def _encode(self, text: str) -> Any:
        if self._processor is None:
            return self.tokenizer.encode(text, add_bos=self.add_bos, add_eos=self.add_eos)
        ids = self._processor.encode(text, add_bos=self.add_bos, add_eos=self.add_eos, return_type="numpy")
        return ids.copy()  # SentencePiece's own array is read-only


def sentencepiece_of(tokenizer: Any) -> Any:
    """Return the SentencePiece processor behind a torchtune tokenizer that only forwards to it; else None.

    The processor can return arrays. The lists that torchtune asks for cost a twentieth of its work, and as much again
    to convert. Only torchtune's own classes count: a subclass may do something else to a text.
    """
    base = getattr(tokenizer, "_spm_model", tokenizer)  # within the tokenizer of a model
    processor = getattr(base, "spm_model", None)
    parts = (tokenizer, base)
    if processor is None or not all(type(part).__module__.startswith("torchtune.") for part in parts):
        return None
    if any("encode" in vars(part) for part in parts):
        return None
    try:
        found = processor.encode(PROBE, add_bos=True, add_eos=False, return_type="numpy")
    except (TypeError, ValueError, RuntimeError):  # an older release, or a model without BOS
        return None
    return processor if found.tolist() == tokenizer.encode(PROBE, add_bos=True, add_eos=False) else None
