"""Encoders turn rows into samples: ready tokens, plain text, conversations, prompts with completions.

An encoder is a callable ``row -> Sample``; of a prompt with several answers it makes a `Group`.
Tokenizers of torchtune and of Hugging Face work alike. A tokenizer's own length limit is switched off, because it would
drop tokens uncounted: ``overlong`` decides what becomes of a long sample.
"""

from streampack.packing.encoders.answers import AnswersEncoder
from streampack.packing.encoders.base import Encoder, TextEncoder, TokensEncoder
from streampack.packing.encoders.chat import ChatEncoder
from streampack.packing.encoders.checks import check_tokenizer, require_encoder
from streampack.packing.encoders.messages import MessagesEncoder
from streampack.packing.encoders.shaped import ShapeEncoder, encoder_for
from streampack.packing.encoders.tokenizer import HFTokenizer, eos_of, padding_id
from streampack.packing.encoders.vision import VisionEncoder

__all__ = [
    "AnswersEncoder",
    "ChatEncoder",
    "Encoder",
    "HFTokenizer",
    "MessagesEncoder",
    "ShapeEncoder",
    "TextEncoder",
    "TokensEncoder",
    "VisionEncoder",
    "check_tokenizer",
    "encoder_for",
    "eos_of",
    "padding_id",
    "require_encoder",
]
