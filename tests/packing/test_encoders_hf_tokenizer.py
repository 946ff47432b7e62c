"""Hugging Face tokenizers: BOS and EOS exactly as asked, no truncation, the same tokens in every process."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from streampack import IGNORE_INDEX, HFTokenizer, TextEncoder, VisionEncoder
from streampack.instantiate import build
from streampack.packing.model_positions import position_rule
from tests.harness.hf_tokenizers import BOS, END, EOS, MARKED, START, byte_level, llama_like

HABITS = {
    "plain": lambda: byte_level(),
    "bos": lambda: byte_level(bos_by_itself=True),
    "both": lambda: byte_level(bos_by_itself=True, eos_by_itself=True),
    "flags": lambda: byte_level(add_bos_token=True, add_eos_token=True),
    "llama": lambda: llama_like(),
}
BY_ITSELF = {"plain": [], "bos": [BOS], "both": [BOS], "flags": [BOS], "llama": [BOS]}


@pytest.fixture(scope="module")
def habits() -> dict[str, Any]:
    return {name: make() for name, make in HABITS.items()}


@pytest.mark.parametrize("habit", sorted(HABITS))
def test_text_gets_bos_and_eos_as_asked(habits: dict[str, Any], habit: str) -> None:
    raw = habits[habit]
    body = raw("hello there", add_special_tokens=False)["input_ids"]
    for add_bos, add_eos in product([None, True, False], [True, False]):
        sample = TextEncoder(raw, add_bos=add_bos, add_eos=add_eos)({"text": "hello there"})
        begin = BY_ITSELF[habit] if add_bos is None else [BOS] * add_bos
        assert sample.tokens.tolist() == begin + body + [EOS] * add_eos
        assert sample.labels is sample.tokens


def test_no_limit_truncates(tmp_path: Path) -> None:
    """Neither one in tokenizer.json, nor one set on the user's tokenizer in mid-run."""
    raw = byte_level(model_max_length=5)
    raw.backend_tokenizer.enable_truncation(4)
    raw.backend_tokenizer.enable_padding(length=400)
    raw.save_pretrained(tmp_path)
    text = "one two three four five six seven eight nine ten"
    for tokenizer in (HFTokenizer(tmp_path), HFTokenizer(raw)):
        encoder = TextEncoder(tokenizer, add_bos=False, add_eos=False)
        whole = encoder({"text": text}).tokens.tolist()
        assert encoder.decode(whole) == text
        raw(text, truncation=True, max_length=3)
        assert encoder({"text": text}).tokens.tolist() == whole
    assert len(raw(text, truncation=True, max_length=3)["input_ids"]) == 3, "the user's own is not changed"


class Deaf:
    """A tokenizer that ignores its arguments, as the ``encode`` of transformers does."""

    bos_id, eos_id = 1, 2

    def __init__(self, *, always: bool = False) -> None:
        self.always = always

    def encode(self, text: str, **swallowed: Any) -> list[int]:
        return [1] * self.always + [7] * len(text.split()) + [2] * self.always


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Deaf, {}, r"the tokenizer \(Deaf\) adds no EOS, though add_eos is True"),
        (Deaf, {"add_bos": True, "add_eos": False}, "adds no BOS, though add_bos is True"),
        (lambda: Deaf(always=True), {"add_eos": False}, "adds EOS, though add_eos is False; say add_eos: True"),
        (lambda: Deaf(always=True), {"add_bos": False}, "adds BOS, though add_bos is False"),
        (SimpleNamespace, {}, r"has no encode\(text, add_bos=, add_eos=\)"),
        (lambda: byte_level(bos_token=None), {"add_bos": True},
         "adds no BOS, though add_bos is True; say add_bos: False"),
        (lambda: byte_level(eos_token=None), {}, "has no EOS token; set its eos_token, or say add_eos: False"),
        (lambda: byte_level().backend_tokenizer, {}, r"\(Tokenizer\) has no encode\(.*give .* streampack.HFTokenizer"),
        (lambda: "my_model", {}, r"\(str\) has no encode\(.*give .* streampack.HFTokenizer, with a path"),
    ],
)  # fmt: skip
def test_tokenizers_that_cannot_do_as_asked_are_refused(make: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextEncoder(make(), **settings)


@pytest.mark.parametrize(
    "text", ["", " ", "naïve 漢字 \U0001f600", "a\x00b", "  two  spaces\n\n", np.str_("numpy")]
)
def test_text_survives_encoding_and_decoding(habits: dict[str, Any], text: str) -> None:
    for habit in ("plain", "bos", "flags"):
        encoder = TextEncoder(habits[habit])
        tokens = encoder({"text": text}).tokens
        ids = [i for i in tokens.tolist() if i not in (BOS, EOS)]
        assert encoder.decode(ids) == text


def test_the_text_of_a_special_token_is_that_token() -> None:
    """As everywhere in transformers, unless the tokenizer is told to split them."""
    assert TextEncoder(byte_level(), add_eos=False)({"text": "a</s>b"}).tokens.tolist()[1] == EOS
    split = byte_level(split_special_tokens=True)
    encoder = TextEncoder(split, add_eos=False)
    tokens = encoder({"text": "a</s>b"}).tokens.tolist()
    assert EOS not in tokens
    assert encoder.decode(tokens) == "a</s>b"


# In place of one of torchtune's.


def test_it_has_the_attributes_that_recipes_use(tmp_path: Path) -> None:
    byte_level(bos_by_itself=True, template=MARKED).save_pretrained(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (BOS, EOS, EOS)
    assert (tokenizer.stop_tokens, tokenizer.max_seq_len) == ([EOS], None)
    assert tokenizer.vocab_size == len(tokenizer.tokenizer)
    assert tokenizer.decode([START, EOS]) == "<|im_start|></s>"
    assert tokenizer.decode([START, EOS], skip_special_tokens=True) == ""
    assert tokenizer.encode("hello")[0] == BOS
    assert HFTokenizer(byte_level(pad_token="<|call|>")).pad_id == 4


def test_torchtunes_messages_are_rendered_by_the_chat_template() -> None:
    tokenizer = HFTokenizer(byte_level())
    messages = [
        SimpleNamespace(role="user", text_content="hello", masked=True),
        SimpleNamespace(role="assistant", text_content="hello there", masked=False),
    ]
    made = tokenizer({"messages": messages, "other": 1})
    text = "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello there<|im_end|>\n"
    assert tokenizer.decode(made["tokens"]) == text
    assert made["other"] == 1
    trained = [token for token, masked in zip(made["tokens"], made["mask"], strict=True) if not masked]
    assert tokenizer.decode(trained) == "hello there<|im_end|>\n"
    messages[0].masked = False  # train_on_input
    assert not any(tokenizer({"messages": messages})["mask"])

    asked = tokenizer({"messages": messages[:1]}, inference=True)["tokens"]
    messages[1].text_content = ""  # how torchtune's generation asks for an answer
    assert (
        tokenizer({"messages": messages}, inference=True)["tokens"] == asked == made["tokens"][: len(asked)]
    )


def test_the_error_of_a_missing_tokenizer_names_the_place(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            ValueError, match=f"no Hugging Face tokenizer at '{path}'; give a folder with its"
        ):
            HFTokenizer(path)


@pytest.mark.parametrize("offline", [False, True])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused_at_once(
    offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    asked: list[str] = []

    def no_name_service(host: Any, *more: Any, **settings: Any) -> Any:
        asked.append(str(host))
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_name_service)
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    doors: list[Callable[[], Any]] = [
        lambda: HFTokenizer("my_model"),
        lambda: VisionEncoder("my_model"),
        lambda: position_rule("my_model"),
    ]
    for door in doors:
        with pytest.raises(
            ValueError, match="^no .* at 'my_model'; give a folder with its .*json, or a name on"
        ):
            door()
    assert waits == [], "transformers waits 23 s for each file that it looks for"
    assert len(asked) <= (0 if offline else len(doors) + 1), (
        "each asks once, AutoProcessor for templates, too"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that begins with BOS, cuts at 4 tokens, and has a chat template."""
    made: Path = tmp_path_factory.mktemp("tokenizer")
    raw = byte_level(bos_by_itself=True, template=MARKED)
    raw.backend_tokenizer.enable_truncation(4)
    raw.save_pretrained(made)
    return made


def test_torchtunes_own_class_for_tokenizer_json(folder: Path) -> None:
    """It has no pad_id, always adds BOS, and truncates as the file says."""
    tokenizers = pytest.importorskip("torchtune.modules.transforms.tokenizers")
    theirs = tokenizers.HuggingFaceBaseTokenizer(
        str(folder / "tokenizer.json"), tokenizer_config_json_path=str(folder / "tokenizer_config.json")
    )
    text = "one two three four five six"
    assert len(theirs.encode(text)) == 5, "silently truncated"
    encoder = TextEncoder(theirs)
    assert (
        encoder({"text": text}).tokens.tolist()
        == TextEncoder(HFTokenizer(folder))({"text": text}).tokens.tolist()
    )
    assert len(theirs.encode(text)) == 5, "the user's own is not changed"
    with pytest.raises(ValueError, match="adds BOS, though add_bos is False"):
        TextEncoder(theirs, add_bos=False)


def test_tokenizers_work_in_the_config_of_a_recipe(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchtune")
    from streampack.training.checks import read_config
    from streampack.training.data import build_data
    from tests.harness.tiny import tiny_config

    rows = tmp_path / "chat.jsonl"
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "hello there"}]
    rows.write_text("".join(json.dumps({"messages": [*talk, *talk], "id": i}) + "\n" for i in range(40)))
    tokenizer = {"_component_": "streampack.HFTokenizer", "path": str(folder)}
    for encoder in (
        {"_component_": "streampack.ChatEncoder"},
        {"_component_": "streampack.MessagesEncoder",
         "message_transform": {"_component_": "torchtune.data.OpenAIToMessages"}},
    ):  # fmt: skip
        settings = {"data.encoder": encoder, "data.max_seq_len": 128, "model.max_seq_len": 128}
        config = tiny_config(tmp_path, tokenizer=tokenizer, **settings)
        config.data.source.paths = str(rows)
        data, held_out = build_data(read_config(config), tokenizer=build(tokenizer), vocab_size=400)
        for batch in held_out[""].batches:
            trained = batch.labels[batch.labels != IGNORE_INDEX].tolist()
            assert trained.count(END) == 2 * sum(map(len, batch.fragments))
            assert batch.tokens[0, 0] == BOS
        assert data.lane_config.padding_idx == EOS
