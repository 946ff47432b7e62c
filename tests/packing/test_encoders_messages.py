"""Guards of torchtune's message transforms: rows that they would silently change are refused or rendered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streampack import IGNORE_INDEX, IterablePackedDataset, MapSource, MessagesEncoder, Mix, PackedDataset
from streampack.map_style.method_loader import method_loader
from streampack.packing.encoders import guard_datasets
from tests.harness.hf_tokenizers import MARKED, byte_level

tune_data = pytest.importorskip("torchtune.data")

USER = {"role": "user", "content": "what now"}
ANSWER = {"role": "assistant", "content": "go on"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


class Words:
    """A model tokenizer that numbers words and keeps the last messages."""

    bos_id, eos_id, pad_id = 1, 2, 0

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.messages: list[Any] = []

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids = [self.words.setdefault(word, 10 + len(self.words)) for word in text.split()]
        return [1] * add_bos + ids + [2] * add_eos

    def decode(self, tokens: list[int]) -> str:
        names = {number: word for word, number in self.words.items()}
        return " ".join(names.get(int(token), f"<{token}>") for token in tokens)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        self.messages = list(sample["messages"])
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


OPENAI: list[tuple[dict[str, Any], str]] = [
    (chat(USER, {"role": "assistant", "content": None}), r"message 1 \(assistant\) has no content \(null\)"),
    (chat(USER, CALLING), r"message 1 \(assistant\) has tool calls.*ChatEncoder"),
    (chat(USER, ANSWER, {"role": "tool", "content": "rain"}), r"message 2 \(tool\) has tool calls or a tool's answer"),
    (chat({"role": "developer", "content": "be"}, USER, ANSWER), "message 0 has the role 'developer'"),
    (chat(USER, {**ANSWER, "reasoning_content": "hm"}), "'reasoning_content', which torchtune's transform drops"),
    (chat(USER, ANSWER, tools=[CALL]), r"column 'tools' would be left out.*ignore: \[tools\]"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), OPENAI, ids=[str(i) for i in range(len(OPENAI))])
def test_openai_rows_that_would_lose_something_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(row, tune_data.OpenAIToMessages())


def test_an_answer_never_becomes_the_prompt() -> None:
    """torchtune repeats the message before a null, which would train the prompt as the answer."""
    row = chat(USER, {"role": "assistant", "content": None})
    theirs = tune_data.OpenAIToMessages()(row)["messages"]
    assert theirs[1].text_content == USER["content"], "fixed in torchtune: the guard can go"
    skips = IterablePackedDataset(
        [row, chat(USER, ANSWER)], max_seq_len=16, on_bad_record="skip",
        encoder=MessagesEncoder(Words(), message_transform=tune_data.OpenAIToMessages()),
    )  # fmt: skip
    assert [pack["num_seqs"] for pack in skips] == [1]


def test_openai_rows_in_all_forms() -> None:
    transform = tune_data.OpenAIToMessages()
    parts = {
        "role": "assistant",
        "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}],
    }
    for row in (
        chat(USER, ANSWER), chat(USER, parts), {"messages": json.dumps([USER, ANSWER])}, chat(USER, ANSWER, tools=[]),
        chat(USER, {**ANSWER, "tool_calls": None, "name": None}), chat(USER, ANSWER, tools=None, id=3),
        {"messages": np.array([USER, ANSWER], dtype=object)},
    ):  # fmt: skip
        assert trained(row, transform) == "go on <2>"
    kept = chat(USER, ANSWER, tools=[CALL])
    assert trained(kept, transform, ignore=["tools"]) == "go on <2>"
    assert kept == chat(USER, ANSWER, tools=[CALL]), "the row is left as it was"
    thinking = chat(USER, {**ANSWER, "reasoning_content": "hm"})
    assert trained(thinking, transform, ignore=["reasoning_content"]) == "go on <2>"
    encoders = [
        MessagesEncoder(Words(), message_transform=transform, ignore=keys) for keys in ([], ["tools"])
    ]
    assert encoders[0].fingerprint() != encoders[1].fingerprint()
    with pytest.raises(ValueError, match="Two consecutive user messages"):
        encoders[0](chat(USER, USER, ANSWER))


def test_messages_of_weight_0_are_not_trained() -> None:
    row = chat(
        {"role": "system", "content": "be"}, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}
    )
    for settings in ({}, {"new_system_prompt": "another one"}):
        assert trained(row, tune_data.OpenAIToMessages(**settings)) == "go on <2>"
    turns = share("a", "b", "c", "d")
    turns["conversations"][1]["weight"] = 0
    assert trained(turns, tune_data.ShareGPTToMessages()) == "d <2>"


ALPACA, PAIR = tune_data.AlpacaToMessages, tune_data.InputOutputToMessages
OTHERS: list[tuple[Any, dict[str, Any], str]] = [
    (tune_data.ShareGPTToMessages(), share("a", None), "turn 1 has a value of type NoneType; it must be text"),
    (tune_data.ShareGPTToMessages(), {"conversations": None}, "holds a NoneType; it must be a list of turns"),
    (tune_data.ShareGPTToMessages(), {"text": "a"}, "column 'conversations' is missing"),
    (tune_data.ShareGPTToMessages(), share("a", "b", system="be kind"), "column 'system' would be left out"),
    (tune_data.ShareGPTToMessages(), share("a", "b", image="x.png"), "it has an image, which a pack has no place for"),
    (PAIR(), {"input": "a", "output": None}, "column 'output' holds a NoneType; it must be text"),
    (PAIR(), {"input": "a", "output": "b", "image": object()}, "it has an image"),
    (PAIR(), {"input": "a", "output": "b", "tools": [CALL]}, "column 'tools' would be left out"),
    (ALPACA(), {"instruction": None, "output": "b"}, "column 'instruction' holds a NoneType"),
    (ALPACA(), {"instruction": "a", "input": 3, "output": "b"}, "column 'input' holds a int"),
    (ALPACA(), {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "column 'history' would be left out"),
    (ALPACA(column_map={"input": "contxt"}), {"instruction": "a", "context": "c", "output": "b"},
     "column 'contxt', which column_map gives for 'input', is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("transform", "row", "message"), OTHERS, ids=[str(i) for i in range(len(OTHERS))])
def test_other_rows_that_would_lose_something_are_refused(transform: Any, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(row, transform)


def test_other_rows_that_lose_nothing_pass() -> None:
    empty = {"image": None, "system": None, "tools": [], "history": None}
    assert trained(share("a", "b", **empty), tune_data.ShareGPTToMessages()) == "b <2>"
    assert trained({"input": "a", "output": "b", **empty}, PAIR()) == "b <2>"
    assert trained({"q": "a", "r": "b"}, PAIR(column_map={"input": "q", "output": "r"})) == "b <2>"
    for extra in ({}, {"input": None}, {"input": ""}):
        assert trained({"instruction": "a", "output": "b", **extra}, ALPACA(train_on_input=False)) == "b <2>"
    mapped = ALPACA(train_on_input=False, column_map={"input": "system"})
    assert trained({"instruction": "a", "system": "s", "output": "b"}, mapped) == "b <2>", "it is read"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ALPACA(column_map={"inputs": "context"}), "column_map of AlpacaToMessages has 'inputs'.*instruction"),
        (lambda: PAIR(column_map={"input": "a", "output": "b", "system": "c"}), "has 'system', which it does not read"),
        (lambda: tune_data.ChosenRejectedToMessages(), "makes pairs.*column_map: {messages: chosen}"),
    ],
)  # fmt: skip
def test_unfit_transforms_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MessagesEncoder(Words(), message_transform=make())


def test_messages_of_a_users_own_transform_are_checked() -> None:
    class Own(tune_data.OpenAIToMessages):  # type: ignore[misc, name-defined]
        """A user's own, which may read rows in its own way."""

        def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            content = [{"type": "image" if sample["x"] == "image" else "text", "content": sample["x"]}]
            return {"messages": [tune_data.Message("user", "a"), tune_data.Message("assistant", content)]}

    assert trained({"x": "b", "tools": [CALL]}, Own()) == "a b <2>"
    for x, message in ((None, "content of type NoneType; it must be text"), ("image", "it has an image")):
        with pytest.raises(ValueError, match=message):
            trained({"x": x}, Own())


def test_a_tokenizer_that_takes_no_messages_is_refused() -> None:
    with pytest.raises(
        ValueError, match="takes text only, no messages; give one of torchtune's model tokenizers"
    ):
        MessagesEncoder(SimpleNamespace(encode=len), message_transform=PAIR())
    with pytest.raises(ValueError, match="has no chat template"):
        MessagesEncoder(byte_level(template=None), message_transform=PAIR())


def test_torchtunes_transforms_with_a_hugging_face_tokenizer() -> None:
    encoder = MessagesEncoder(byte_level(template=MARKED), message_transform=tune_data.ShareGPTToMessages())
    labels = encoder(share("hello", "hello there")).labels
    assert encoder.decode(labels[labels != IGNORE_INDEX].tolist()) == "hello there<|im_end|>"
    assert encoder.fingerprint() != MessagesEncoder(byte_level(), message_transform=PAIR()).fingerprint()


# Inside torchtune's own datasets, whose rows do not pass our encoders.


class TunesDataset:
    """torchtune's SFTDataset over rows in memory."""

    def __init__(self, rows: list[dict[str, Any]], transform: Any) -> None:
        from torchtune.datasets._sft import SFTTransform

        self.rows = rows
        self._prepare_sample = SFTTransform(message_transform=transform, model_transform=Words())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self._prepare_sample(self.rows[index])


DOORS = {
    "stream": lambda ds: list(IterablePackedDataset(ds, max_seq_len=16)),
    "mixture": lambda ds: list(
        IterablePackedDataset(Mix([{"name": "a", "source": MapSource(ds), "weight": 1}]), max_seq_len=16)
    ),
    "map-style": lambda ds: PackedDataset(ds, max_seq_len=16),
    "methods": lambda ds: list(method_loader(ds, method="exact_fit", max_seq_len=16, batch_size=1)),
}


@pytest.mark.parametrize("door", sorted(DOORS))
def test_torchtunes_datasets_are_guarded(door: str) -> None:
    bad = chat(USER, {"role": "assistant", "content": None})
    DOORS[door](TunesDataset([chat(USER, ANSWER)] * 2, tune_data.OpenAIToMessages()))
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) has no content \(null\)"):
        DOORS[door](TunesDataset([chat(USER, ANSWER), bad], tune_data.OpenAIToMessages()))


def test_torchtunes_builders_with_a_hugging_face_tokenizer(tmp_path: Any) -> None:
    """As a stock recipe does: the tokenizer from a config node, torchtune's dataset inside ours."""
    pytest.importorskip("datasets")
    from omegaconf import OmegaConf
    from torchtune import config

    from streampack import packed_dataset

    byte_level(bos_by_itself=True, template=MARKED).save_pretrained(tmp_path / "model")
    node = {"_component_": "streampack.HFTokenizer", "path": str(tmp_path / "model")}
    tokenizer = config.instantiate(OmegaConf.create(node))
    for rows in ([chat(USER, ANSWER)], [chat(USER, ANSWER), chat(USER, CALLING)]):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        loading = {"source": "json", "data_files": str(tmp_path / "rows.jsonl"), "split": "train"}
        loading["cache_dir"] = str(tmp_path / f"cache{len(rows)}")
        builder = {
            "_component_": "torchtune.datasets.chat_dataset", "conversation_column": "messages",
            "conversation_style": "openai", **loading,
        }  # fmt: skip
        if len(rows) == 2:
            with pytest.raises(ValueError, match="has tool calls"):
                packed_dataset(tokenizer, dataset=builder, max_seq_len=64, packed=True)
            continue
        [pack] = packed_dataset(tokenizer, dataset=builder, max_seq_len=64, packed=True)
        trained = pack["labels"][pack["labels"] != IGNORE_INDEX].tolist()
        assert tokenizer.decode(trained) == "go on<|im_end|>"


def test_guarding_reaches_nested_datasets_once() -> None:
    from torch.utils.data import Subset
    from torchtune.datasets import ConcatDataset

    inner = TunesDataset([chat(USER, ANSWER)] * 3, tune_data.OpenAIToMessages())
    for data in (ConcatDataset([inner]), Subset(inner, [0]), inner, None, "text", [1]):
        guard_datasets(data)
    assert inner._prepare_sample._message_transform.kind == "OpenAIToMessages"
    assert isinstance(inner._prepare_sample._message_transform.transform, tune_data.OpenAIToMessages)
    assert list(inner[0]["labels"])[-3:] == list(inner[0]["tokens"])[-3:]
