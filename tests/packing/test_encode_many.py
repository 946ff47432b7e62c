"""Rows encoded together equal rows encoded one by one, token by token and error by error, in forked processes too."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    AnswersEncoder,
    ChatEncoder,
    Group,
    HFTokenizer,
    MessagesEncoder,
    Sample,
    ShapeEncoder,
    TextEncoder,
    TokensEncoder,
)
from tests.harness.hf_tokenizers import CHATML, CROSSING, MARKED, Letters, byte_level, llama_like

tune_data = pytest.importorskip("torchtune.data")

TEXT = st.sampled_from(
    ["hello there", "", " ", "The answer is 42.", "a </s>", "<s> one", "one\n\ntwo", "bad \ud800", "x" * 200]
)
ROLE = st.sampled_from(["user", "assistant", "assistant", "system", "usre"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": TEXT}, optional={"weight": st.sampled_from([0, 1, 2])}
)
TALKS = st.one_of(
    st.lists(MESSAGE, max_size=5),
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4).map(
        lambda turns: [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    ),
)
ROWS = st.one_of(
    st.fixed_dictionaries({"text": st.one_of(TEXT, st.none(), st.just(5))}),
    st.fixed_dictionaries({"messages": TALKS}),
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}),
    st.fixed_dictionaries({"prompt": st.one_of(TEXT, TALKS), "chosen": TEXT, "rejected": TEXT}),
    st.fixed_dictionaries({"chosen": TALKS, "rejected": TALKS}),
    st.fixed_dictionaries({"instruction": TEXT, "output": TEXT}),
    st.just({"input_ids": [4, 5]}),
)
ENCODERS: dict[str, Any] = {
    "text": lambda: TextEncoder(byte_level()),
    "text with BOS": lambda: TextEncoder(llama_like(), add_bos=None),
    "text of torchtune's": lambda: TextEncoder(Letters()),
    "chat": lambda: ChatEncoder(byte_level(template=CHATML)),
    "chat with marks": lambda: ChatEncoder(byte_level(template=MARKED), answers="last"),
    "chat that crosses": lambda: ChatEncoder(byte_level(template=CROSSING)),
    "answers": lambda: AnswersEncoder(byte_level(template=CHATML)),
    "messages": lambda: MessagesEncoder(byte_level(), message_transform=tune_data.OpenAIToMessages()),
    "pairs": lambda: MessagesEncoder(byte_level(), message_transform=tune_data.ChosenRejectedToMessages()),
    "Alpaca": lambda: ShapeEncoder(byte_level(), shape="alpaca"),
    "shape of text": lambda: ShapeEncoder(byte_level(), shape="text"),
    "tokens": TokensEncoder,
}
MADE: dict[str, Any] = {}


def plain(made: Any) -> Any:
    """A sample as lists, or what an error says."""
    if isinstance(made, Exception):
        return type(made), str(made)
    assert isinstance(made, Sample)
    group = (made.lengths, made.parents) if isinstance(made, Group) else None
    return made.tokens.tolist(), made.labels.tolist(), made.tokens.dtype, group


def alone(encode: Any, row: Any) -> Any:
    try:
        return encode(row)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=40)
@given(rows=st.lists(ROWS, max_size=6))
def test_rows_encoded_together_equal_rows_encoded_alone(name: str, rows: list[Any]) -> None:
    encode = MADE.get(name) or MADE.setdefault(name, ENCODERS[name]())
    assert list(map(plain, encode.encode_many(rows))) == [plain(alone(encode, row)) for row in rows]


def test_the_rows_of_the_property_make_samples_and_errors_in_batches() -> None:
    texts = TextEncoder(byte_level())
    assert texts.batch_rows > 1 == TextEncoder(Letters()).batch_rows
    made = texts.encode_many([{"text": "a b"}, {"text": None}, {"text": "bad \ud800"}, {"text": "c"}])
    assert [type(each) for each in made] == [Sample, ValueError, ValueError, Sample]
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    for encode in (ENCODERS["chat"](), ENCODERS["chat with marks"](), ENCODERS["messages"]()):
        assert encode.batch_rows > 1
        assert all(isinstance(each, Sample) for each in encode.encode_many([{"messages": talk * 9}] * 3))


def test_a_subclass_with_its_own_call_is_called_for_each_row() -> None:
    class Upper(TextEncoder):
        def __call__(self, row: Any, /) -> Sample:
            return super().__call__({"text": row["text"].upper()})

    encode = Upper(byte_level())
    assert encode.batch_rows == 1
    [made, _] = encode.encode_many([{"text": "a"}, {"text": "b"}])
    assert plain(made) == plain(TextEncoder(byte_level())({"text": "A"}))


def _encode(encode: Any, results: Any) -> None:
    results.put([made.tokens.tolist() for made in encode.encode_many([{"text": "hello there"}] * 64)])


@pytest.mark.parametrize("threads", [None, "true", "false"])
def test_a_forked_process_encodes_without_the_threads_of_its_parent(
    threads: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library warns after a fork, and waits for its parent's threads for ever if they were asked for."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if threads is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    encode, context = TextEncoder(HFTokenizer(byte_level())), mp.get_context("fork")
    here = encode.encode_many([{"text": "hello there"}] * 64)  # the parent's threads start
    results: Any = context.Queue()
    child = context.Process(target=_encode, args=(encode, results), daemon=True)
    child.start()
    try:
        found = results.get(timeout=60)
    finally:
        child.kill()
        child.join()
    assert [np.array_equal(each, made.tokens) for each, made in zip(found, here, strict=True)] == [True] * 64
    assert "parallelism" not in capfd.readouterr().err
