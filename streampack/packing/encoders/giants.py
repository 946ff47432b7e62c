"""Cuts a giant text into parts. Tokenized one by one, they yield the tokens of the complete text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

PART = 1 << 16
"""Fewest characters of a part. A text of up to twice this length is not cut."""

CUT = re.compile(r"(?<=[^\s\u180e]\n)(?=\w)")
"""Place of a cut: after a line break that comes between a non-space character and a letter, number or underscore.

No pattern in `PATTERNS` matches such a line break together with the next character, so a pre-token ends at the cut. No
pattern looks back, so the text after the cut is matched as in the complete text. Only ``\\s+(?!\\S)`` has a lookahead.
Without the text after the cut, it matches the line break that ``\\s+`` matches otherwise. No NFC composition contains a
line break.
"""

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
THREE = r"|\p{N}{1,3}"
PATTERNS = {
    WORDS + THREE + SIGNS,
    WORDS + r"|\p{N}" + SIGNS,
    CASED + THREE + SIGNS.replace(r"\n]*", r"\n/]*"),
}
"""Pre-token patterns of Llama 3 (and cl100k), Qwen 2 and 3, and gpt-oss (o200k). ``ByteLevel`` contains GPT-2's."""


def can_be_cut(backend: Any) -> bool:
    """Return whether the parts yield the tokens of the text with this tokenizer, a byte-level BPE of tokenizers."""
    state = json.loads(backend.to_str())
    model, normalizer = state["model"], state["normalizer"] or {"type": "NFC"}
    return (
        model["type"] == "BPE"
        and not model["dropout"]
        and normalizer["type"] == "NFC"
        and _ends_at_cuts(state["pre_tokenizer"] or {})
        and not any(
            "\n" in each["content"] or each["lstrip"] or each["single_word"] for each in state["added_tokens"]
        )
    )


def _ends_at_cuts(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a pre-token ends at each cut. A step must split by a known pattern; others may split digits."""
    steps, known = pre_tokenizer.get("pretokenizers", [pre_tokenizer]), False
    for step in steps:
        match step:
            case {"type": "Digits"}:
                pass
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(regex)}:
                known |= regex
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                if pattern not in PATTERNS:
                    return False
                known = True
            case _:
                return False
    return known


def cut_giant(text: str, *, size: int = PART) -> list[str]:
    r"""Return the parts of a text. Each but the last is the shortest of at least ``size`` characters up to a cut.

    >>> cut_giant("one\ntwo\n\nthree\n", size=2)
    ['one\n', 'two\n\nthree\n']
    """
    parts, start = [], 0
    while len(text) - start > 2 * size and (cut := CUT.search(text, start + size)):
        parts.append(text[start : cut.start()])
        start = cut.start()
    return [*parts, text[start:]]
