"""Columns beside those that an encoder reads: used, refused, or named once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    InputOutputToMessages,
    OpenAIToMessages,
    ShareGPTToMessages,
)
from torchtune.datasets._stack_exchange_paired import StackExchangePairedToMessages

from streampack import (
    ChatEncoder,
    MessagesEncoder,
    PreferenceEncoder,
    PromptCompletionEncoder,
    RolloutEncoder,
)
from tests.harness.hf_tokenizers import CHATML, DEAF, byte_level

USER = {"role": "user", "content": "hello"}
GOOD = {"role": "assistant", "content": "hello there"}
BAD = {"role": "assistant", "content": "the answer"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"town": {"type": "string"}}}}


def pairs(**settings: Any) -> PreferenceEncoder:
    return PreferenceEncoder(
        byte_level(template=CHATML), message_transform=ChosenRejectedToMessages(), **settings
    )


def test_a_prompt_that_the_answers_do_not_repeat_is_refused_by_a_transform_that_does_not_read_it() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "hello", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hello", "chosen": [USER, GOOD], "rejected": [BAD]},
        {"prompt": "another", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ]
    for row in rows:
        with pytest.raises(
            ValueError, match=r"column 'prompt' is not repeated .* leave message_transform out"
        ):
            pairs()(row)
    assert pairs(ignore=["prompt"])(rows[-1]).lengths == pairs()({**rows[-1], "prompt": "hello"}).lengths
    plain = PreferenceEncoder(byte_level(template=CHATML))
    assert [plain(row).tokens.tolist() for row in rows[:2]] == 2 * [
        pairs()({"chosen": [USER, GOOD], "rejected": [USER, BAD]}).tokens.tolist()
    ], "the way out trains what the row says"


@pytest.mark.parametrize("prompt", ["hello", [USER], None, "", []])
def test_a_prompt_that_both_answers_repeat_changes_nothing(prompt: Any) -> None:
    row = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert pairs()({**row, "prompt": prompt}).tokens.tolist() == pairs()(row).tokens.tolist()


@pytest.mark.parametrize(
    ("encoder", "row", "unread"),
    [
        (lambda tok: MessagesEncoder(tok, message_transform=InputOutputToMessages()),
         {"input": "a", "output": "b", "instruction": "c", "context": "d", "n": 7}, "'context', 'instruction'"),
        (lambda tok: MessagesEncoder(tok, message_transform=AlpacaToMessages()),
         {"instruction": "a", "input": "b", "output": "c", "context": "d"}, "'context'"),
        (lambda tok: MessagesEncoder(tok, message_transform=OpenAIToMessages()),
         {"messages": [USER, GOOD], "prompt": "d"}, "'prompt'"),
        (lambda tok: PreferenceEncoder(tok, message_transform=ChosenRejectedToMessages()),
         {"chosen": [USER, GOOD], "rejected": [USER, BAD], "context": "d"}, "'context'"),
        (lambda tok: PreferenceEncoder(tok, message_transform=StackExchangePairedToMessages()),
         {"prompt": "a", "chosen": "b", "rejected": "c", "context": "d"}, "'context'"),
        (lambda tok: PreferenceEncoder(tok, fields=["score"]),
         {"prompt": "a", "chosen": "b", "rejected": "c", "score": [1, 2], "context": "d"}, "'context'"),
        (lambda tok: PreferenceEncoder(tok, message_transform=StackExchangePairedToMessages(
            column_map={"prompt": "question"})),
         {"question": "a", "chosen": "b", "rejected": "c", "prompt": "d"}, "'prompt'"),
        (ChatEncoder, {"messages": [USER, GOOD], "context": "d"}, "'context'"),
        (ChatEncoder, {"messages": [USER, GOOD], "conversations": [USER], "n": 1}, "'conversations'"),
        (PromptCompletionEncoder, {"prompt": "a", "completion": "b", "label": False, "image": b"c"},
         "'image', 'label'"),
        (PromptCompletionEncoder, {"prompt": "a", "completion": "b", "context": "d"}, "'context'"),
        (lambda tok: RolloutEncoder(tok, fields=["reward"]),
         {"prompt": "a", "completions": ["b"], "reward": [1], "context": "d"}, "'context'"),
    ],
)  # fmt: skip
def test_columns_that_nothing_reads_are_named_once(
    encoder: Any, row: dict[str, Any], unread: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = encoder(byte_level(template=CHATML))
    with caplog.at_level(logging.WARNING):
        tokens = made(row)
        made({**row, "context": None})
        made(row)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f" does not read {unread}: nothing of it is trained or seen" in said[0]
    caplog.clear()
    made({**row, "another": ["e"]})
    assert "'another'" in caplog.text
    assert tokens is not None


def test_prompts_with_completions_use_tools_and_refuse_what_would_be_left_out() -> None:
    encoder = PromptCompletionEncoder(byte_level(template=CHATML))
    row = {"prompt": [USER], "completion": [GOOD]}
    with_tools = {**row, "tools": [TOOL]}
    whole = ChatEncoder(byte_level(template=CHATML))({"messages": [USER, GOOD], "tools": [TOOL]})
    assert encoder(with_tools).tokens.tolist() == whole.tokens.tolist() != encoder(row).tokens.tolist()
    assert encoder({**row, "tools": None}).tokens.tolist() == encoder(row).tokens.tolist()
    ignoring = PromptCompletionEncoder(byte_level(template=CHATML), ignore=["tools", "system"])
    assert ignoring({**with_tools, "system": "be kind"}).tokens.tolist() == encoder(row).tokens.tolist()
    with pytest.raises(ValueError, match="column 'system' would be left out"):
        encoder({**row, "system": "be kind"})
    for column in ("tools", "system"):
        with pytest.raises(ValueError, match=f"column '{column}' would be left out"):
            encoder({"prompt": "a", "completion": "b", column: "c"})
    with pytest.raises(ValueError, match="leaves out the tool .weather."):
        PromptCompletionEncoder(byte_level(template=DEAF))(with_tools)


@pytest.mark.parametrize(
    ("encoder", "row"),
    [
        (PreferenceEncoder, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (PreferenceEncoder, {"chosen": "a b", "rejected": "a c"}),
        (RolloutEncoder, {"prompt": "a", "completions": ["b"]}),
        (RolloutEncoder, {"prompt": "a", "completions": [[5, 6]]}),
    ],
)
def test_tools_beside_texts_are_refused_because_only_templates_render_them(encoder: Any, row: Any) -> None:
    tok = byte_level(template=CHATML)
    with pytest.raises(ValueError, match="column 'tools' would be left out"):
        encoder(tok)(row | {"tools": [TOOL]})
    ignoring = encoder(tok, ignore=["tools"])(row | {"tools": [TOOL]})
    assert ignoring.tokens.tolist() == encoder(tok)(row | {"tools": []}).tokens.tolist()


SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("encoder", "row"),
    [
        (PreferenceEncoder, {"prompt": "another", "chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        (PreferenceEncoder, {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]}),
        (PreferenceEncoder, {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        (PreferenceEncoder, {"prompt": [USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}),
        (PromptCompletionEncoder, {"prompt": [USER], "completion": [USER, GOOD]}),
        (RolloutEncoder, {"prompt": [USER], "completions": [[GOOD], [USER, GOOD]]}),
    ],
)
def test_an_answer_that_repeats_another_prompt_than_the_row_has_is_refused(encoder: Any, row: Any) -> None:
    """The row's prompt was left out, or the user asked twice."""
    with pytest.raises(ValueError, match="does not repeat the prompt, which ends with one of the user"):
        encoder(byte_level(template=CHATML))(row)


@pytest.mark.parametrize("flag", ["train", "loss", "masked"])
def test_flags_of_other_programs_that_leave_a_message_out_are_refused(flag: str) -> None:
    tok = byte_level(template=CHATML)
    turn = {"from": "gpt", "value": "b", flag: False}
    rows: list[tuple[Any, dict[str, Any]]] = [
        (ChatEncoder(tok), {"messages": [USER, GOOD | {flag: False}]}),
        (MessagesEncoder(tok, message_transform=ShareGPTToMessages()),
         {"conversations": [{"from": "human", "value": "a"}, turn]}),
        (MessagesEncoder(tok, message_transform=OpenAIToMessages()), {"messages": [USER, GOOD | {flag: False}]}),
        (pairs(), {"chosen": [USER, GOOD | {flag: False}], "rejected": [USER, BAD]}),
        (RolloutEncoder(tok), {"prompt": [USER], "completions": [[GOOD | {flag: False}]]}),
    ]  # fmt: skip
    for encoder, row in rows:
        with pytest.raises(
            ValueError, match=rf"has {flag}=False, which is not read; say .* by weight, 0 or 1"
        ):
            encoder(row)
    assert ChatEncoder(tok)({"messages": [USER, GOOD | {flag: None}]}).tokens.size, (
        "as tables fill what is absent"
    )
