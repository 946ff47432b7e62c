"""Preference pairs that cannot be encoded: each error names the row's problem and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streampack import IterablePackedDataset, PreferenceEncoder
from tests.harness.hf_tokenizers import CHATML, CROSSING, DEAF, FORGETFUL, byte_level
from tests.packing.test_encoders_preference import BAD, CALL, GOOD, LETTERS, SYSTEM, USER, pair


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, {"prompt": "a", "chosen": "b"}, "column 'rejected' is missing; the row's columns are"),
        (CHATML, pair(rejected=None), "column 'rejected' is null; mend the row, or leave it out"),
        (CHATML, pair(prompt=None), "column 'prompt' is null"),
        (CHATML, pair(rejected=3), "column 'rejected' holds a int; give text, or messages"),
        (CHATML, pair(rejected=[]), "column 'rejected' holds no message"),
        (CHATML, pair(rejected=[{"role": "assistant", "content": None}]), r"\(assistant\) has no content"),
        (CHATML, pair(rejected=[USER]), "column 'rejected' holds no message of the assistant.*its roles are user"),
        (CHATML, pair(chosen=[{**GOOD, "weight": 0}]), "column 'chosen' has no token to train"),
        (CHATML, pair(system="be kind"), r"column 'system' would be left out.*ignore: \[system\]"),
        (CHATML, {"question": "a", "chosen": "b", "rejected": "c"},
         r"there is no column 'prompt', and column 'question' would be left out; say prompt: question, or ignore"),
        (CHATML, {"instruction": "a", "chosen": [GOOD], "rejected": [BAD]}, "say prompt: instruction"),
        (CHATML, {"chosen": [GOOD], "rejected": [USER, BAD]}, "an answer does not begin with a message of the user"),
        (DEAF, pair(prompt=[SYSTEM, USER]), "the chat template leaves out message 0, of role 'system'"),
        (DEAF, pair(chosen=[{**CALL, "content": "x"}]), "leaves out the tool_calls of message 1"),
        (CROSSING, pair(), "a token crosses a boundary of message 1"),
        (FORGETFUL, pair(chosen=[{**GOOD, "content": "<think>a</think>b"}, USER, GOOD]),
         "renders the first 2 message.s. in another way when others follow"),
        (CHATML, {"prompt": "the ans", "chosen": "wer", "rejected": "wers"}, "a token crosses from the prompt"),
        (CHATML, {"chosen_ids": [1], "rejected_ids": [1]}, "chosen and rejected are equal"),
        (CHATML, {"chosen_input_ids": [1, 2], "chosen_labels": [-100, -100], "rejected_input_ids": [1, 3],
                  "rejected_labels": [-100, 3]}, "column 'chosen_input_ids' has no token to train"),
        (CHATML, {"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [1]}, "'chosen_ids' has no token to train"),
    ],
)  # fmt: skip
def test_rows(template: str, row: dict[str, Any], message: str) -> None:
    encoder = PreferenceEncoder(byte_level(template=template))
    with pytest.raises(ValueError, match=message):
        encoder(row)
    with pytest.raises(ValueError, match=f"sample 0: .*{message}"):
        next(iter(IterablePackedDataset([row], encoder=encoder, max_seq_len=99)))


def test_an_empty_text_is_an_answer_only_with_eos() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": ""}
    assert PreferenceEncoder(LETTERS)(row).lengths == (2, 2, 1)
    with pytest.raises(ValueError, match=r"column 'rejected' has no token to train.*add_eos: True"):
        PreferenceEncoder(LETTERS, add_eos=False)(row)


def test_bad_pairs_can_be_skipped() -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": None}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    packs = IterablePackedDataset(
        rows, encoder=PreferenceEncoder(LETTERS), max_seq_len=16, on_bad_record="skip"
    )
    assert [pack["num_seqs"] for pack in packs] == [3]


def test_ignored_columns_are_left_out() -> None:
    tokenizer = byte_level(template=CHATML)
    expected = PreferenceEncoder(tokenizer)(pair()).tokens.tolist()
    assert PreferenceEncoder(tokenizer, ignore=["system"])(pair(system="x")).tokens.tolist() == expected
    texts = {"chosen": "one two", "rejected": "one three", "context": "x"}
    assert PreferenceEncoder(LETTERS, ignore=["context"])(texts).lengths[0] > 1


def test_tokenizers_and_transforms_that_do_not_fit() -> None:
    tune = pytest.importorskip("torchtune.data")
    hf = byte_level(template=CHATML)
    with pytest.raises(ValueError, match="a Letters has no chat template; .*ChosenRejectedToMessages"):
        PreferenceEncoder(LETTERS)(pair())
    with pytest.raises(ValueError, match="a Letters takes text only, no messages"):
        PreferenceEncoder(LETTERS, message_transform=tune.ChosenRejectedToMessages())
    with pytest.raises(ValueError, match="OpenAIToMessages makes one conversation of a row, not a pair"):
        PreferenceEncoder(hf, message_transform=tune.OpenAIToMessages())
    with pytest.raises(
        ValueError, match="column_map of ChosenRejectedToMessages has 'prompt', which it does not read"
    ):
        columns = {"chosen": "a", "rejected": "b", "prompt": "c"}
        PreferenceEncoder(hf, message_transform=tune.ChosenRejectedToMessages(column_map=columns))
    with pytest.raises(ValueError, match="has no chat template"):
        PreferenceEncoder(byte_level(template=None), message_transform=tune.ChosenRejectedToMessages())
    with pytest.raises(ValueError, match="adds no EOS, though add_eos is True"):
        PreferenceEncoder(SimpleNamespace(encode=lambda text, add_bos, add_eos: [5]))


def test_what_torchtunes_transform_would_change_is_refused() -> None:
    tune = pytest.importorskip("torchtune.data")
    tokenizer = byte_level(template=CHATML)
    encoder = PreferenceEncoder(tokenizer, message_transform=tune.ChosenRejectedToMessages())
    rows: list[tuple[dict[str, Any], str]] = [
        ({"chosen": [USER, GOOD]}, "column 'rejected' is missing"),
        ({"chosen": [USER, CALL], "rejected": [USER, BAD]}, "has tool calls.*without a message_transform"),
        ({"chosen": [USER, {**GOOD, "content": None}], "rejected": [USER, BAD]}, "has no content"),
        ({"chosen": [USER], "rejected": [USER, BAD]}, "the chosen answer has no token to train"),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD], "system": "x"},
            "column 'system' would be left out",
        ),
        ({"chosen": [USER, {**GOOD, "reasoning": "x"}], "rejected": [USER, BAD]}, r"ignore: \[reasoning\]"),
    ]
    for row, message in rows:
        with pytest.raises(ValueError, match=message):
            encoder(row)
    unweighted = encoder({"chosen": [USER, {**BAD, "weight": 0}, USER, GOOD], "rejected": [USER, BAD]})
    once = encoder({"chosen": [USER, GOOD], "rejected": [USER, BAD]})
    assert unweighted.lengths != once.lengths
    own = PreferenceEncoder(tokenizer, message_transform=lambda row: {"messages": []})
    with pytest.raises(ValueError, match="the message transform found no 'chosen'"):
        own({"x": 1})


def test_the_fingerprint_covers_all_settings() -> None:
    tune = pytest.importorskip("torchtune.data")
    one, two = byte_level(template=CHATML), byte_level(template=DEAF)
    transform = tune.ChosenRejectedToMessages
    encoders = [
        PreferenceEncoder(one), PreferenceEncoder(two), PreferenceEncoder(one, prompt="question"),
        PreferenceEncoder(one, chosen="better"), PreferenceEncoder(one, rejected="worse"),
        PreferenceEncoder(one, tools="functions"), PreferenceEncoder(one, add_bos=True),
        PreferenceEncoder(one, add_eos=False), PreferenceEncoder(one, fields=["margin"]),
        PreferenceEncoder(one, fields={"margin": "m"}), PreferenceEncoder(one, fields={"margin": ["a", "b"]}),
        PreferenceEncoder(one, share_prefix=False), PreferenceEncoder(one, ignore=["tools"]),
        PreferenceEncoder(one, message_transform=transform()),
        PreferenceEncoder(one, message_transform=transform(train_on_input=True)),
        PreferenceEncoder(one, message_transform=transform(), mask_shared=True),
        PreferenceEncoder(one, message_transform=transform(), ignore=["tools"]),
    ]  # fmt: skip
    prints = [encoder.fingerprint() for encoder in encoders]
    assert len(set(prints)) == len(prints)
    assert PreferenceEncoder(byte_level(template=CHATML)).fingerprint() == prints[0]
