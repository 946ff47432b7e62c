"""Cutting a giant text into parts that make the same tokens apart as together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

PART = 1 << 16
"""Characters of a part, at least. Texts below twice of it stay in one."""

CUT = re.compile(r"(?<=[^\s\u180e]\n)(?=\w)")
"""One line break after a character that is no white space, and before a letter or number.

None of the patterns in `PATTERNS` matches a line break with what follows it here, so there a pre-token ends. None looks
back, so the text after the cut is matched as in the whole. The only one with a lookahead, ``\\s+(?!\\S)``, has one line
break here, which ``\\s+`` matches as well. No composition of NFC has a line break in it.
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
"""Patterns of pre-tokens of Llama 3 (and cl100k), Qwen 2 and 3, and gpt-oss (o200k). GPT-2's is ``ByteLevel``'s own."""


def can_be_cut(backend: Any) -> bool:
    """Return whether a tokenizer of the tokenizers library makes the same tokens of parts: a BPE of bytes."""
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
    """Return whether a pre-token ends at each cut: one step splits by a known pattern, others at digits or nowhere."""
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
    r"""Return the parts of a text, each the shortest of at least ``size`` characters that ends at a cut.

    >>> cut_giant("one\ntwo\n\nthree\n", size=2)
    ['one\n', 'two\n\nthree\n']
    """
    parts, start = [], 0
    while len(text) - start > 2 * size and (cut := CUT.search(text, start + size)):
        parts.append(text[start : cut.start()])
        start = cut.start()
    return [*parts, text[start:]]
