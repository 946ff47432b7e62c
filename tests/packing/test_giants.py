"""A giant text makes the same tokens in parts as whole, for each tokenizer that is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import HFTokenizer, TextEncoder
from streampack.packing.encoders.giants import PART, can_be_cut, cut_giant  # private: the size of parts
from tests.harness.hf_tokenizers import SPECIAL, TEXT, byte_level, llama_like

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = ["<|im_start|>", "two words", "word", "é"]
BLANKS = [
    f"x{blanks}"
    for blanks in ("  \n", " \n", "\n\n", "\r\n", "\t\n", ".\n", "\n\n\n", " \u3000\n", "/\n", "\n/")
]
PIECES = st.sampled_from(
    [
        *ADDED, *TEXT, "\n", "\n", "\n\n", "\r\n", "\r", " ", "  ", "\t", "\u00a0", "\u3000", "\u180e", "\u0301",
        "e\u0301", "漢字", "。", "'s", "'LL", "12345", "²", "_", "/", "...", "a", "B", "<|im_", "two", " words", "\x1c",
        "\x85", "א", "\u1100", "\u1161", "🙂", "\u200b",
    ]
)  # fmt: skip


def made(kind: str, *, added: Any = ADDED, normalizer: Any = None) -> Any:
    """A byte-level BPE with the pre-tokenizer of a family, and added tokens with spaces."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    steps = {
        "gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "starcoder": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        **{
            name: [pre_tokenizers.Split(Regex(pattern), "isolated"),
                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            for name, pattern in (("llama3", LLAMA3), ("qwen", QWEN), ("o200k", O200K), ("other", r"\w+|\n\w|\W+"))
        },
        "prefix": [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        "metaspace": [pre_tokenizers.Metaspace(prepend_scheme="first", split=False)],
        "none": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    }[kind]  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator([*TEXT, *BLANKS] * 9, trainer)
    tokenizer.add_tokens(
        [each if not isinstance(each, str) else AddedToken(each, normalized=False) for each in added]
    )
    return tokenizer


CUT_ONES = ["gpt2", "starcoder", "llama3", "qwen", "qwen with NFC", "o200k"]
MADE: dict[str, Any] = {}


def tokenizer_of(name: str) -> Any:
    from tokenizers.normalizers import NFC

    kind, _, normalizer = name.partition(" with ")
    if name not in MADE:
        MADE[name] = made(kind, normalizer=NFC() if normalizer else None)
    return MADE[name]


@pytest.mark.parametrize("name", CUT_ONES)
@settings(max_examples=300)
@given(pieces=st.lists(PIECES, max_size=30))
def test_the_parts_of_a_text_make_the_tokens_of_the_whole(name: str, pieces: list[str]) -> None:
    tokenizer, text = tokenizer_of(name), "".join(pieces)
    parts = cut_giant(text, size=1)
    assert "".join(parts) == text
    found = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    assert [token for each in found for token in each.ids] == tokenizer.encode(
        text, add_special_tokens=False
    ).ids


def test_only_tokenizers_whose_tokens_end_at_cuts_are_cut() -> None:
    from tokenizers import AddedToken
    from tokenizers.normalizers import NFKC

    assert all(can_be_cut(tokenizer_of(name)) for name in CUT_ONES)
    refused = [
        *(made(kind) for kind in ("other", "prefix", "metaspace", "none")),
        made("gpt2", normalizer=NFKC()),
        *(made("gpt2", added=[token]) for token in ("a\nb", AddedToken("c", lstrip=True))),
        llama_like().backend_tokenizer,
    ]
    assert not any(map(can_be_cut, refused))


def test_a_giant_text_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i} of a long text,\n{'  ' * (i % 3)}with more.\n" for i in range(9000))
    assert len(cut_giant(text)) == len(text) // PART
    encode = TextEncoder(byte_level(bos_by_itself=True))
    whole = HFTokenizer(byte_level()).tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    for found in (encode({"text": text}), *encode.encode_many([{"text": "a"}, {"text": text}])[1:]):
        assert found.tokens.tolist()[1:-1] == whole
