"""torchtune's message transforms: what its own dataset makes of rows, and rows that would lose something, refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streampack import (
    IGNORE_INDEX,
    ChatEncoder,
    HFTokenizer,
    IterablePackedDataset,
    MapSource,
    MessagesEncoder,
    Mix,
    PackedDataset,
    TextEncoder,
    method_loader,
    packed_dataset,
)
from tests.harness.hf_tokenizers import CHATML, DEAF, EOS, MARKED, byte_level

tune_data = pytest.importorskip("torchtune.data")

USER = {"role": "user", "content": "what now"}
ANSWER = {"role": "assistant", "content": "go on"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}
NULL = {"role": "assistant", "content": None}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
OPENAI, SHARE = tune_data.OpenAIToMessages, tune_data.ShareGPTToMessages
ALPACA, PAIR = tune_data.AlpacaToMessages, tune_data.InputOutputToMessages


class Words:
    """A model tokenizer that numbers words, and ends answers with EOS."""

    bos_id, eos_id, pad_id = 1, 2, 0

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids = [self.words.setdefault(word, 10 + len(self.words)) for word in text.split()]
        return [1] * add_bos + ids + [2] * add_eos

    def decode(self, tokens: list[int]) -> str:
        names = {number: word for word, number in self.words.items()}
        return " ".join(names.get(int(token), f"<{token}>") for token in tokens)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        tokens, mask = [], []
        for message in sample["messages"]:
            ids = self.encode(message.text_content, add_bos=False, add_eos=message.role == "assistant")
            tokens += ids
            mask += [message.masked] * len(ids)
        return {"tokens": tokens, "mask": mask}


def trained(row: Mapping[str, Any], transform: Any, **settings: Any) -> str:
    """Decode the trained tokens of a row."""
    encoder = MessagesEncoder(Words(), message_transform=transform, **settings)
    labels = encoder(row).labels
    return encoder.decode(labels[labels != IGNORE_INDEX].tolist())


def chat(*messages: Mapping[str, Any], **beside: Any) -> dict[str, Any]:
    return {"messages": list(messages), **beside}


def share(*values: Any, **beside: Any) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]
    return {"conversations": turns, **beside}


@pytest.mark.parametrize(
    ("transform", "row"),
    [
        (PAIR, {"input": "how are you", "output": "fine thank you"}),
        (ALPACA, {"instruction": "add one", "input": "three", "output": "four"}),
        (SHARE, share("how are you", "fine", "bye", "so long")),
        (OPENAI, chat(USER, ANSWER, USER, ANSWER)),
    ],
)
@pytest.mark.parametrize("train_on_input", [False, True])
def test_messages_are_encoded_as_by_torchtunes_dataset(
    transform: Any, row: dict[str, Any], train_on_input: bool
) -> None:
    from torchtune.datasets._sft import SFTTransform

    made = transform(train_on_input=train_on_input)
    theirs = SFTTransform(message_transform=made, model_transform=Words())(dict(row))
    ours = MessagesEncoder(Words(), message_transform=made)(row)
    assert ours.tokens.tolist() == list(theirs["tokens"])
    assert ours.labels.tolist() == list(theirs["labels"])
    assert (ours.labels != IGNORE_INDEX).any()
    assert (ours.labels == IGNORE_INDEX).any() or train_on_input
    assert ours.tokens.dtype == ours.labels.dtype == np.int32


# Forms of rows that lose nothing.

PARTS = {"role": "assistant", "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]}
THINKING = {**ANSWER, "reasoning_content": "hm"}
EMPTY: dict[str, Any] = {"system": None, "tools": [], "history": None}
SYSTEM = {"role": "system", "content": "be"}
UNWEIGHTED = chat(SYSTEM, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1})
UNWEIGHTED_TURN = share("a", "b", "go", "go on")
UNWEIGHTED_TURN["conversations"][1]["weight"] = 0


@pytest.mark.parametrize(
    ("transform", "row", "settings"),
    [
        (OPENAI(), chat(USER, PARTS), {}),
        (OPENAI(), {"messages": json.dumps([USER, ANSWER])}, {}),
        (OPENAI(), chat(USER, {**ANSWER, "tool_calls": None, "name": None}, tools=None, id=3), {}),
        (OPENAI(), chat(USER, ANSWER, tools=[CALL]), {"ignore": ["tools"]}),
        (OPENAI(), chat(USER, THINKING), {"ignore": ["reasoning_content"]}),
        (SHARE(), share("a", "go on", **EMPTY), {}),
        (PAIR(column_map={"input": "q", "output": "r"}), {"q": "a", "r": "go on"}, {}),
        *((ALPACA(train_on_input=False), {"instruction": "a", "output": "go on", **extra}, {})
          for extra in ({}, {"input": None}, {"input": ""})),
        (ALPACA(train_on_input=False, column_map={"input": "system"}),
         {"instruction": "a", "system": "s", "output": "go on"}, {}),
    ],
)  # fmt: skip
def test_rows_that_lose_nothing_pass(transform: Any, row: dict[str, Any], settings: dict[str, Any]) -> None:
    before = repr(row)
    assert trained(row, transform, **settings) == "go on <2>"
    assert repr(row) == before, "the row is left as it was"


# What is refused.


@pytest.mark.parametrize(
    ("transform", "row", "message"),
    [
        (OPENAI(), chat(USER, NULL), r"message 1 \(assistant\) has no content \(null\)"),
        (OPENAI(), UNWEIGHTED, "'messages', message 2 has weight=.*, which torchtune.s .*ignore: .weight., or use"),
        (SHARE(), UNWEIGHTED_TURN, "'conversations', message 1 has weight="),
        (OPENAI(), chat(USER, CALLING), "'messages', message 1 has tool_calls=.*, which torchtune.s .*ChatEncoder"),
        (OPENAI(), chat(USER, THINKING), "has reasoning_content=.*, which torchtune's transform drops"),
        (OPENAI(), chat(USER, ANSWER, tools=[CALL]), r"column 'tools' would be ignored.*ignore: \[tools\]"),
        (OPENAI(), chat(USER, USER, ANSWER), "Two consecutive user messages at index 1"),
        (SHARE(), {"conversations": [{"from": "alien", "value": "a"}, {"from": "gpt", "value": "b"}]},
         "message 0 is from 'alien'; the known ones are human, gpt, system"),
        (SHARE(), share("a", "b", system="be kind"), "column 'system' would be ignored"),
        (SHARE(), share("a", "b", image="x.png"), "Failed to open image as PIL Image from x.png"),
        (OPENAI(), chat(USER, {**ANSWER, "content": 5}), r"message 1 \(assistant\) has content of type int; it must"),
        (PAIR(), {"input": "a", "answer": "b"}, "column 'output' is missing; the row's columns are 'input', 'answer'"),
        (PAIR(), {"input": "a", "output": None}, "column 'output' has no content .null.; mend the row"),
        (PAIR(), {"input": "a", "output": 5}, "column 'output' has content of type int, not text"),
        (ALPACA(), {"instruction": None, "output": "b"}, "column 'instruction' has no content .null.; mend the row"),
        (ALPACA(), {"instruction": "a", "output": "b", "history": [["c"]]}, "column 'history' would be ignored"),
        (ALPACA(column_map={"input": "contxt"}), {"instruction": "a", "context": "c", "output": "b"},
         "column 'contxt' is missing"),
    ],
)  # fmt: skip
def test_rows_that_would_lose_something_are_refused(transform: Any, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(row, transform)


def test_an_answer_never_becomes_the_prompt() -> None:
    """torchtune repeats the message before a null, which would train the prompt as the answer."""
    row = chat(USER, NULL)
    theirs = OPENAI()(row)["messages"]
    assert theirs[1].text_content == USER["content"], "fixed in torchtune: the guard can go"
    encoder = MessagesEncoder(Words(), message_transform=OPENAI())
    skips = IterablePackedDataset([row, chat(USER, ANSWER)], max_seq_len=16, skip_bad=True, encoder=encoder)
    assert [pack["num_seqs"] for pack in skips] == [1]


def test_messages_of_a_users_own_transform_are_checked() -> None:
    class Own(OPENAI):  # type: ignore[misc, valid-type]
        """A user's own, which may read rows in its own way."""

        def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            content = [{"type": "image" if sample["x"] == "image" else "text", "content": sample["x"]}]
            return {"messages": [tune_data.Message("user", "a"), tune_data.Message("assistant", content)]}

    assert trained({"x": "b", "tools": [CALL]}, Own()) == "a b <2>"
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) has an image; only text can be packed"):
        trained({"x": "image"}, Own())

    def of_a_function(row: Mapping[str, Any]) -> dict[str, Any]:
        question = tune_data.Message(role="user", content=row["q"], masked=True)
        return {"messages": [question, tune_data.Message(role="assistant", content=row["a"])]}

    assert trained({"q": "one two", "a": "three"}, of_a_function) == "three <2>"


# Inside torchtune's own datasets, whose rows do not pass our encoders.


class TunesDataset:
    """torchtune's SFTDataset over rows in memory."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        from torchtune.datasets._sft import SFTTransform

        self.rows = rows
        self._prepare_sample = SFTTransform(message_transform=OPENAI(), model_transform=Words())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self._prepare_sample(self.rows[index])


def concatenated(data: Any) -> Any:
    from torchtune.datasets import ConcatDataset

    return ConcatDataset([data])


DOORS: dict[str, Any] = {
    "stream": lambda data: list(IterablePackedDataset(data, max_seq_len=16)),
    "of several": lambda data: list(IterablePackedDataset(concatenated(data), max_seq_len=16)),
    "mixture": lambda data: list(
        IterablePackedDataset(Mix([{"name": "a", "source": MapSource(data), "weight": 1}]), max_seq_len=16)
    ),
    "map-style": lambda data: PackedDataset(data, max_seq_len=16),
    "methods": lambda data: list(method_loader(data, method="exact_fit", max_seq_len=16, batch_size=1)),
}


@pytest.mark.parametrize("door", DOORS)
def test_torchtunes_datasets_are_guarded(door: str) -> None:
    good = TunesDataset([chat(USER, ANSWER)] * 2)
    DOORS[door](good)
    assert type(good._prepare_sample._message_transform) is OPENAI, "the user's dataset is not changed"
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) has no content \(null\)"):
        DOORS[door](TunesDataset([chat(USER, ANSWER), chat(USER, NULL)]))


def test_torchtunes_builders_with_a_hugging_face_tokenizer(tmp_path: Any) -> None:
    """As a stock recipe does: the tokenizer from a config node, torchtune's dataset inside ours."""
    pytest.importorskip("datasets")
    from omegaconf import OmegaConf
    from torchtune import config

    byte_level(bos_by_itself=True, template=MARKED).save_pretrained(tmp_path / "model")
    node = {"_component_": "streampack.HFTokenizer", "path": str(tmp_path / "model")}
    tokenizer = config.instantiate(OmegaConf.create(node))

    def packs(*rows: dict[str, Any]) -> Any:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        builder = {
            "_component_": "torchtune.datasets.chat_dataset", "conversation_column": "messages",
            "conversation_style": "openai", "source": "json", "data_files": str(tmp_path / "rows.jsonl"),
            "split": "train", "cache_dir": str(tmp_path / f"cache{len(rows)}"),
        }  # fmt: skip
        return packed_dataset(tokenizer, dataset=builder, max_seq_len=64, packed=True)

    [pack] = packs(chat(USER, ANSWER))
    assert tokenizer.decode(pack["labels"][pack["labels"] != IGNORE_INDEX].tolist()) == "go on<|im_end|>"
    with pytest.raises(ValueError, match=r"has no content \(null\)"):
        packs(chat(USER, ANSWER), chat(USER, CALLING))


def test_max_seq_len_of_a_tokenizer_is_written_as_in_torchtunes_configs(tmp_path: Any) -> None:
    """It cuts for torchtune's own datasets; the swapped node takes the packs' length from it, and cuts by itself."""
    pytest.importorskip("datasets")
    from omegaconf import OmegaConf
    from torchtune import config

    byte_level(bos_by_itself=True, template=MARKED).save_pretrained(tmp_path / "model")
    rows = [chat({**USER, "content": f"hello {i} " * i}, ANSWER) for i in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    node = {"_component_": "streampack.HFTokenizer", "path": str(tmp_path / "model")}
    whole = config.instantiate(OmegaConf.create(node | {"max_seq_len": None}))
    tokenizer = config.instantiate(OmegaConf.create(node | {"max_seq_len": 36}))
    assert (whole.max_seq_len, tokenizer.max_seq_len) == (None, 36)
    builder = {
        "_component_": "torchtune.datasets.chat_dataset", "conversation_column": "messages",
        "conversation_style": "openai", "source": "json", "data_files": str(tmp_path / "rows.jsonl"),
        "split": "train", "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    alone, stock = (
        config.instantiate(OmegaConf.create(builder), tokenizer=each, packed=packed)
        for each, packed in ((whole, False), (tokenizer, True))
    )
    lengths = [len(row["tokens"]) for row in alone]
    assert min(lengths) < 36 < max(lengths)
    assert {len(pack["tokens"]) for pack in stock} == {36}, (
        "torchtune's own packing wants samples that are cut"
    )
    packed = packed_dataset(tokenizer, dataset=builder, packed=True)
    assert (packed.max_seq_len, packed.packing.overlong) == (36, "truncate")
    ledger = packed.ledger()
    assert (ledger.tokens_in, ledger.packed) == (sum(lengths), sum(min(length, 36) for length in lengths))
    with pytest.raises(ValueError, match="max_seq_len is None here and in the tokenizer"):
        packed_dataset(whole, dataset=builder, packed=True)

    # Our own encoders cut nothing: `overlong` decides.
    assert len(ChatEncoder(tokenizer)(rows[-1]).tokens) == lengths[-1]
    assert len(TextEncoder(tokenizer)({"text": "hello " * 99}).tokens) > 99
    assert len(MessagesEncoder(tokenizer, message_transform=OPENAI())(rows[-1]).tokens) == lengths[-1]
    with pytest.raises(ValueError, match="max_seq_len=0 is below 1"):
        HFTokenizer(tmp_path / "model", max_seq_len=0)


def test_a_cut_conversation_keeps_the_eos_that_it_ended_with() -> None:
    messages = [SimpleNamespace(role="user", text_content="hello", masked=True),
                SimpleNamespace(role="assistant", text_content="hello there " * 9, masked=False)]  # fmt: skip
    for template, ends in ((DEAF, True), (CHATML, False)):
        raw = byte_level(template=template)
        ids, mask = HFTokenizer(raw).tokenize_messages(messages)
        cut, cut_mask = HFTokenizer(raw, max_seq_len=20).tokenize_messages(messages)
        assert len(ids) > 20
        assert (ids[-1] == EOS) == ends
        assert cut == [*ids[:19], EOS if ends else ids[19]]
        assert cut_mask == mask[:20]
        asked = HFTokenizer(raw, max_seq_len=20).tokenize_messages(messages[:1] * 9, inference=True)[0]
        assert len(asked) > 20, "a prompt is not cut"
