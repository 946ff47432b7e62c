from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    MessagesEncoder,
    TextEncoder,
    TokensEncoder,
)


class WordTokenizer:
    """A tokenizer with torchtune's interface: a word is a token, a role a token of its own, cut at max_seq_len."""

    bos_id, eos_id, pad_id = 1, 2, 0

    def __init__(self, *, max_seq_len: int | None = None, shift: int = 0, header: int = 7) -> None:
        self.max_seq_len = max_seq_len
        self.shift = shift
        self.header = header
        self.calls = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        self.calls += 1
        words = [10 + self.shift + sum(word.encode()) % 80 for word in text.split()]
        tokens = [self.bos_id] * add_bos + words + [self.eos_id] * add_eos
        return tokens if self.max_seq_len is None else tokens[: self.max_seq_len]

    def tokenize_messages(self, messages: list[Any]) -> tuple[list[int], list[bool]]:
        tokens, mask = [self.bos_id], [True]
        for message in messages:
            content = [self.header, *self.encode(message.text_content, add_bos=False, add_eos=False)]
            if message.role == "assistant":
                content.append(self.eos_id)
            tokens += content
            mask += [message.masked] * len(content)
        end = self.max_seq_len
        return tokens[:end], mask[:end]

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        sample["tokens"], sample["mask"] = self.tokenize_messages(sample.pop("messages"))
        return sample


# Ready tokens.


def test_tokens_are_read_from_the_named_columns() -> None:
    assert TokensEncoder()({"tokens": [1, 2], "labels": [-100, 2]}).labels.tolist() == [-100, 2]
    named = TokensEncoder(tokens="input_ids", labels="targets")
    assert named({"input_ids": [1, 2], "targets": [-100, 2]}).labels.tolist() == [-100, 2]
    with pytest.raises(ValueError, match="column 'targets' is missing; the row's columns are 'input_ids'"):
        named({"input_ids": [1]})


def test_tokens_fingerprint_covers_the_columns() -> None:
    encoders = [TokensEncoder(), TokensEncoder(labels=None), TokensEncoder(tokens="input_ids")]
    assert len({encoder.fingerprint() for encoder in encoders}) == 3
    assert TokensEncoder().fingerprint() == TokensEncoder().fingerprint()


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"text": "a"}, "TextEncoder(tokenizer)"),
        ({"id": 1, "messages": []}, "ChatEncoder(tokenizer)"),
        ({"conversations": []}, "ChatEncoder(tokenizer)"),
        ({"prompt": "a", "completion": "b"}, "PromptCompletionEncoder(tokenizer)"),
        ({"prompt": "a", "completions": ["b"]}, "RolloutEncoder(tokenizer)"),
        ({"instruction": "a", "output": "b"}, "MessagesEncoder(tokenizer, message_transform=AlpacaToMessages())"),
    ],
)  # fmt: skip
def test_rows_without_tokens_name_the_encoder_they_need(row: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError) as error:
        list(IterablePackedDataset([row], max_seq_len=8))
    assert "sample 0: column 'tokens' is missing; the row's columns are " in str(error.value)
    assert str(error.value).endswith(
        f"; such rows need an encoder: encoder={hint}, or data.encoder in a config"
    )


def test_other_bad_rows_get_no_hint_of_an_encoder() -> None:
    for row in ({"tokens": [0.5], "text": "a"}, {"tokens": [1], "text": "a"}, {"x": 1}):
        with pytest.raises(ValueError) as error:
            TokensEncoder()(row)
        assert "encoder" not in str(error.value)


# Plain text.


def test_every_token_of_a_text_is_trained() -> None:
    encode = TextEncoder(WordTokenizer())
    sample = encode({"text": "a b c"})
    assert sample.tokens.tolist() == WordTokenizer().encode("a b c")
    assert sample.labels.tolist() == sample.tokens.tolist()
    assert sample.tokens.dtype == np.int32


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, True), (False, False)])
def test_text_gets_bos_and_eos_as_asked(add_bos: bool, add_eos: bool) -> None:
    encode = TextEncoder(WordTokenizer(), add_bos=add_bos, add_eos=add_eos, column="body")
    expected = WordTokenizer().encode("a b", add_bos=add_bos, add_eos=add_eos)
    assert encode({"body": "a b", "text": "no"}).tokens.tolist() == expected


def test_empty_text_without_bos_and_eos_is_an_empty_sample() -> None:
    assert TextEncoder(WordTokenizer(), add_bos=False, add_eos=False)({"text": ""}).tokens.size == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"body": "a"},
            "column 'text' is missing; the row's columns are 'body'; the encoder's option column= names the one to "
            "read",
        ),
        (
            {"text": None},
            "column 'text' holds no text (null); mend the row, or set on_bad_record='skip', which counts and lists "
            "such rows",
        ),
        ({"text": 5}, "column 'text' holds a int; it must be text"),
    ],
)
def test_bad_text(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        TextEncoder(WordTokenizer())(row)
    assert str(error.value) == message


def test_text_fingerprint_covers_tokenizer_and_settings() -> None:
    def fingerprint(tokenizer: WordTokenizer | None = None, **settings: Any) -> str:
        return TextEncoder(tokenizer or WordTokenizer(), **settings).fingerprint()

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(WordTokenizer(shift=1)),
        fingerprint(column="body"),
        fingerprint(add_bos=False),
        fingerprint(add_eos=False),
    ]
    assert len({fingerprint(), *others}) == 5
    assert fingerprint(WordTokenizer(max_seq_len=3)) == fingerprint(), "its limit is switched off"


# Truncation by the tokenizer.


def test_the_ledger_counts_what_a_tokenizer_would_have_cut() -> None:
    tokenizer = WordTokenizer(max_seq_len=5)
    data = IterablePackedDataset(
        [{"text": "a b c d e f"}, {"text": "a b"}],
        encoder=TextEncoder(tokenizer),
        max_seq_len=5,
        overlong="truncate",
    )
    packs = list(data)
    assert [pack["num_seqs"] for pack in packs] == [1, 1]
    assert data.ledger().dropped["truncated"] == 3
    assert data.ledger().tokens_in == 8 + 4
    assert tokenizer.max_seq_len == 5, "the caller's tokenizer is not changed"


# Messages, by torchtune's transforms.

CONVERSATION = [
    ("user", "how are you"),
    ("assistant", "fine thank you"),
    ("user", "bye"),
    ("assistant", "so long"),
]
ROWS: dict[str, dict[str, Any]] = {
    "InputOutputToMessages": {"input": "how are you", "output": "fine thank you"},
    "AlpacaToMessages": {"instruction": "add one", "input": "three", "output": "four"},
    "ShareGPTToMessages": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[role], "value": text}
            for role, text in CONVERSATION
        ]
    },
    "OpenAIToMessages": {"messages": [{"role": role, "content": text} for role, text in CONVERSATION]},
}


@pytest.fixture(scope="module")
def tune_data() -> Any:
    return pytest.importorskip("torchtune.data")


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("train_on_input", [False, True])
def test_messages_are_encoded_as_by_torchtunes_dataset(
    tune_data: Any, name: str, train_on_input: bool
) -> None:
    from torchtune.datasets._sft import SFTTransform

    transform = getattr(tune_data, name)(train_on_input=train_on_input)
    theirs = SFTTransform(message_transform=transform, model_transform=WordTokenizer())(dict(ROWS[name]))
    ours = MessagesEncoder(WordTokenizer(), message_transform=transform)(ROWS[name])
    assert ours.tokens.tolist() == list(theirs["tokens"])
    assert ours.labels.tolist() == list(theirs["labels"])
    trained = int((ours.labels != IGNORE_INDEX).sum())
    assert 0 < trained < ours.tokens.size
    assert ours.tokens.dtype == ours.labels.dtype == np.int32


def test_a_users_own_transform(tune_data: Any) -> None:
    def transform(row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "messages": [
                tune_data.Message(role="user", content=row["q"], masked=True),
                tune_data.Message(role="assistant", content=row["a"]),
            ]
        }

    sample = MessagesEncoder(WordTokenizer(), message_transform=transform)({"q": "one two", "a": "three"})
    assert sample.labels.tolist() == [IGNORE_INDEX] * 4 + sample.tokens.tolist()[4:]


def test_errors_of_bad_messages_name_the_column_or_the_fault(tune_data: Any) -> None:
    encode = MessagesEncoder(WordTokenizer(), message_transform=tune_data.InputOutputToMessages())
    with pytest.raises(ValueError) as error:
        encode({"input": "a", "answer": "b"})
    found = "the message transform found no 'output', in the row or within it; the row's columns are 'input', 'answer'"
    assert str(error.value) == found

    encode = MessagesEncoder(WordTokenizer(), message_transform=tune_data.ShareGPTToMessages())
    with pytest.raises(
        ValueError, match="found no 'alien', in the row or within it; the row's columns are 'convers"
    ):
        encode({"conversations": [{"from": "alien", "value": "a"}, {"from": "gpt", "value": "b"}]})

    encode = MessagesEncoder(WordTokenizer(), message_transform=tune_data.OpenAIToMessages())
    with pytest.raises(ValueError, match="Two consecutive user messages at index 1"):
        encode({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})
    with pytest.raises(ValueError, match="at least length 2"):
        encode({"messages": [{"role": "user", "content": "a"}]})


def test_tokens_and_mask_of_different_length_are_an_error(tune_data: Any) -> None:
    class Broken(WordTokenizer):
        def tokenize_messages(self, messages: list[Any]) -> tuple[list[int], list[bool]]:
            tokens, _ = super().tokenize_messages(messages)
            return tokens, [False]

    encode = MessagesEncoder(Broken(), message_transform=tune_data.InputOutputToMessages())
    with pytest.raises(ValueError, match="1"):
        encode({"input": "a", "output": "b"})


def test_messages_fingerprint_covers_transform_and_tokenizer(tune_data: Any) -> None:
    transform = tune_data.InputOutputToMessages

    def fingerprint(made: Any, tokenizer: WordTokenizer | None = None) -> str:
        return MessagesEncoder(tokenizer or WordTokenizer(), message_transform=made).fingerprint()

    assert fingerprint(transform()) == fingerprint(transform())
    assert fingerprint(transform(), WordTokenizer(max_seq_len=3)) == fingerprint(transform())
    others = {
        fingerprint(transform()),
        fingerprint(transform(train_on_input=True)),
        fingerprint(transform(column_map={"input": "q", "output": "a"})),
        fingerprint(transform(new_system_prompt="be kind")),
        fingerprint(tune_data.AlpacaToMessages()),
        fingerprint(transform(), WordTokenizer(shift=1)),
        fingerprint(transform(), WordTokenizer(header=8)),  # another chat template
        fingerprint(lambda row: {"messages": []}),
    }
    assert len(others) == 8


# SentencePiece.


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with byte fallback, trained on this file."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("torchtune")
    prefix = tmp_path_factory.mktemp("spm") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        input=__file__, model_prefix=str(prefix), vocab_size=600, model_type="bpe", byte_fallback=True,
        pad_id=3, minloglevel=2,
    )  # fmt: skip
    return f"{prefix}.model"


def test_half_a_surrogate_pair_is_a_bad_record(spm: str) -> None:
    """SentencePiece's own error says nothing of the text."""
    from torchtune.data import InputOutputToMessages
    from torchtune.models.mistral import mistral_tokenizer

    tokenizer = mistral_tokenizer(spm)
    for encoder in (
        TextEncoder(tokenizer, column="output"),
        MessagesEncoder(tokenizer, message_transform=InputOutputToMessages()),
    ):
        rows = [{"input": "whole", "output": end} for end in ("whole", "half: \ud800", "whole")]
        with pytest.raises(UnicodeEncodeError):
            encoder(rows[1])
        skips = IterablePackedDataset(rows, encoder=encoder, max_seq_len=96, on_bad_record="skip")
        assert [pack["num_seqs"] for pack in skips] == [2]
