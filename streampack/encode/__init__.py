"""Rows become samples: ready tokens, plain text, conversations, prompts with completions.

An encoder is a callable ``row -> Sample`` with a ``fingerprint()``. Tokenizers of torchtune and of Hugging Face will
do. A tokenizer's own limit is switched off, because it would drop tokens uncounted: ``overlong`` says what becomes of a
long sample.
"""

from streampack.encode.base import PROBE, Encoder, TokensEncoder, qualified_name
from streampack.encode.chat import ChatEncoder, PromptCompletionEncoder
from streampack.encode.hf_tokenizer import HFTokenizer
from streampack.encode.messages import MessagesEncoder
from streampack.encode.text import TextEncoder, sentencepiece_of
from streampack.encode.tokenizer import check_tokenizer, padding_id, without_truncation
from streampack.encode.transforms import guard_datasets

__all__ = [
    "PROBE",
    "ChatEncoder",
    "Encoder",
    "HFTokenizer",
    "MessagesEncoder",
    "PromptCompletionEncoder",
    "TextEncoder",
    "TokensEncoder",
    "check_tokenizer",
    "guard_datasets",
    "padding_id",
    "qualified_name",
    "sentencepiece_of",
    "without_truncation",
]
