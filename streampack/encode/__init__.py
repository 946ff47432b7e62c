"""Rows become samples: ready tokens, plain text, and messages through torchtune's transforms.

An encoder is a callable ``row -> Sample`` with a ``fingerprint()``. Any tokenizer of torchtune will do. A tokenizer's
own limit is switched off, because it would drop tokens uncounted: ``overlong`` says what becomes of a long sample.
"""

from streampack.encode.base import PROBE, Encoder, TokensEncoder, qualified_name
from streampack.encode.messages import MessagesEncoder
from streampack.encode.text import TextEncoder, sentencepiece_of
from streampack.encode.tokenizer import without_truncation

__all__ = [
    "PROBE",
    "Encoder",
    "MessagesEncoder",
    "TextEncoder",
    "TokensEncoder",
    "qualified_name",
    "sentencepiece_of",
    "without_truncation",
]
