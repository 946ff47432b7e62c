"""Hugging Face tokenizers of every habit, made on the spot: no network, some milliseconds each."""

from __future__ import annotations

from typing import Any

import pytest

TEXT = [
    "What is the answer? The answer is 42.", "User: hello\nAssistant: hello there, how are you?\n",
    "def f(x):\n    return x + 1\n", "one two three four five six seven eight nine ten",
]  # fmt: skip
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|call|>"]
BOS, EOS, START, END, CALL = range(5)

# ChatML, with BOS written by the template, as many models have it; tools and their calls as JSON.
_TURNS = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}GENERATION"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ '<|call|>' + (c.function | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}ENDGENERATION{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = _TURNS.replace("ENDGENERATION", "").replace("GENERATION", "")
MARKED = _TURNS.replace("ENDGENERATION", "{% endgeneration %}").replace("GENERATION", "{% generation %}")
# Knows two roles and no tools, and says nothing about the others.
DEAF = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Strips the thoughts of all answers but the last, as reasoning models' templates do.
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}",
)
# A generation prompt that ends with a space, which the answer's first token takes in.
CROSSING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + '\n' }}"
    "{% else %}{{ 'A: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
DATED_UNLESS_TOLD = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
    "{{ date_string }}\n" + CHATML
)


def byte_level(
    *,
    bos_by_itself: bool = False,
    eos_by_itself: bool = False,
    template: str | None = CHATML,
    **settings: Any,
) -> Any:
    """A byte-level BPE as GPT-2's; with ``bos_by_itself``, a post-processor adds BOS as llama's does."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    made.train_from_iterator(TEXT, trainer)
    return _finished(made, transformers, bos_by_itself, eos_by_itself, template, settings)


def llama_like(*, bos_by_itself: bool = True, template: str | None = None, **settings: Any) -> Any:
    """A BPE over U+2581 with byte fallback, as converted from SentencePiece."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme="first")]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, *bytes_], show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return _finished(made, transformers, bos_by_itself, False, template, settings)


def _finished(
    made: Any, transformers: Any, bos: bool, eos: bool, template: str | None, settings: dict[str, Any]
) -> Any:
    from tokenizers import processors

    if bos or eos:
        single = " ".join(["<s>"] * bos + ["$A"] + ["</s>"] * eos)
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    known = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": SPECIAL[2:], **settings}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **known)
    tokenizer.chat_template = template
    return tokenizer


class Letters:
    """A tokenizer of bytes with torchtune's interface, which knows no messages."""

    bos_id, eos_id = 1, 2

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [1] * add_bos + list(text.encode()) + [2] * add_eos
