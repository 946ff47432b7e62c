"""Preference pairs and rollouts: every form of row, what TRL and torchtune make of it, and the prompt kept once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    AnswersEncoder,
    ChatEncoder,
    Group,
    HFTokenizer,
    IterablePackedDataset,
    MessagesEncoder,
    ParquetSource,
)
from tests.harness.groups import without_sharing
from tests.harness.hf_tokenizers import CHATML, CROSSING, DEAF, FORGETFUL, MARKED, Letters, byte_level

tune = pytest.importorskip("torchtune.data")

USER = {"role": "user", "content": "What is the answer?"}
SYSTEM = {"role": "system", "content": "be kind"}
GOOD = {"role": "assistant", "content": "The answer is 42."}
BAD = {"role": "assistant", "content": "The answer is one."}
TALK = [SYSTEM, {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}, USER]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"town": {"type": "string"}}}}
LETTERS = Letters()
TRANSFORM = tune.ChosenRejectedToMessages


@pytest.fixture(scope="module")
def chatml() -> Any:
    return byte_level(bos_by_itself=True, template=CHATML)


def sequences(group: Group) -> list[list[int]]:
    """The tokens of each answer, with its prompt."""
    bounds = group.bounds
    return [
        [token for segment in group.paths()[leaf] for token in group.tokens[slice(*bounds[segment])].tolist()]
        for leaf in group.leaves
    ]


def trained(group: Group) -> list[list[int]]:
    """The trained tokens of each answer."""
    return [[label for label in group.labels[slice(*group.bounds[leaf])].tolist() if label != IGNORE_INDEX]
            for leaf in group.leaves]  # fmt: skip


def content(group: Group) -> Any:
    return group.tokens.tolist(), group.labels.tolist(), group.lengths, group.parents


def pair(**row: Any) -> dict[str, Any]:
    return {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], **row}


# Against the encoder of completions, which knows no groups.


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("What is", [" the answer?", " 42", " the end"]),
        ([USER], [[GOOD], [BAD], [{"role": "assistant", "content": "no"}]]),
        (TALK, [[GOOD], [BAD]]),
        (TALK, [[GOOD, USER, GOOD], [BAD, USER, GOOD]]),
        ([USER], [[GOOD], [GOOD]]),  # as in public data sets; their loss has no gradient
    ],
)
def test_answers_are_encoded_as_completions_of_their_prompt(chatml: Any, prompt: Any, answers: Any) -> None:
    """Prefix and answer are the whole, and the labels are those of the answer alone."""
    wholes = [ChatEncoder(chatml)({"prompt": prompt, "completion": each}) for each in answers]
    pairs = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    for group in (
        AnswersEncoder(chatml)({"prompt": prompt, "completions": answers}),
        AnswersEncoder(chatml)(pairs),
    ):
        count = len(group.leaves)
        assert group.parents == (-1, *[0] * count)
        assert sequences(group) == [whole.tokens.tolist() for whole in wholes[:count]]
        assert trained(group) == [
            whole.labels[whole.labels != IGNORE_INDEX].tolist() for whole in wholes[:count]
        ]
        assert (group.labels[: group.lengths[0]] == IGNORE_INDEX).all(), "the prompt is not trained"
    apart = AnswersEncoder(chatml, share_prefix=False, fields=["margin"])({**pairs, "margin": 1.5})
    assert content(apart) == content(without_sharing(AnswersEncoder(chatml)(pairs)))
    assert apart.fields["margin"].tolist() == [1.5, 1.5]


PARTS = [{"type": "text", "text": GOOD["content"]}]
FORMS: dict[str, dict[str, Any]] = {
    "implicit": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "explicit, and in the answers": {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback": {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": []},
    "text and messages": {"prompt": USER["content"], "chosen": [GOOD], "rejected": [BAD]},
    "messages and text": {"prompt": [USER], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "one message each": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "JSON text": {name: json.dumps(value) for name, value in pair().items()},
    "ShareGPT": {
        "prompt": [{"from": "human", "value": USER["content"]}],
        "chosen": {"from": "gpt", "value": GOOD["content"]},
        "rejected": {"from": "gpt", "value": BAD["content"]},
    },
    "arrays": {name: np.array(value, dtype=object) for name, value in pair().items()},
    "nulls and parts": pair(chosen=[{**GOOD, "tool_calls": None, "content": PARTS}], tools=None),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_pair_give_the_same_tokens(chatml: Any, form: str) -> None:
    assert content(AnswersEncoder(chatml)(FORMS[form])) == content(AnswersEncoder(chatml)(pair()))


def test_tools_of_pairs_and_of_rollouts_are_rendered(chatml: Any) -> None:
    called = AnswersEncoder(chatml)(pair(chosen=[CALL], tools=json.dumps([TOOL])))
    assert '"parameters"' in AnswersEncoder(chatml).decode(called.tokens.tolist())
    row = {"prompt": TALK, "completions": [[5], [6, 7]], "tools": json.dumps([TOOL])}
    expected = chatml.apply_chat_template(TALK, add_generation_prompt=True, tools=[TOOL], return_dict=True)
    group = AnswersEncoder(chatml)(row)
    assert group.tokens.tolist() == [*expected["input_ids"], 5, 6, 7], (
        "a prompt before ids is that of inference"
    )
    assert AnswersEncoder(chatml, ignore=["tools"])(row).tokens.size < group.tokens.size


def test_conversations_share_their_common_messages(chatml: Any) -> None:
    """An earlier answer in both is of the prompt; after the first difference all answers are trained."""
    encoder = AnswersEncoder(chatml)
    row = {"chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}
    assert encoder(row).tokens.tolist() == encoder(pair(prompt=TALK)).tokens.tolist()
    apart = encoder({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, BAD, USER, BAD]})
    assert [encoder.decode(tokens).count("The answer") for tokens in trained(apart)] == [2, 2]
    longer = encoder({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]})
    assert [encoder.decode(tokens).count("The answer") for tokens in trained(longer)] == [1, 2]
    systems = encoder({"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]})
    shared = encoder.decode(systems.tokens[: systems.lengths[0]].tolist())
    assert shared == "<s><|im_start|>", "little is shared"
    assert sequences(systems)[0] == ChatEncoder(chatml)({"messages": [SYSTEM, USER, GOOD]}).tokens.tolist()
    tools = encoder(pair(chosen=[CALL, {"role": "tool", "content": "rain"}, GOOD]))
    assert encoder.decode(trained(tools)[0]).count("<|im_end|>") == 2, "what a tool says is not trained"


words = st.text(alphabet="ab c\n42?", max_size=9)


@example(prompt="ab", chosen="", rejected="c", add_eos=False, implicit=True)  # one begins with the other
@given(words, words, words, st.booleans(), st.booleans())
def test_texts_are_never_changed(
    prompt: str, chosen: str, rejected: str, add_eos: bool, implicit: bool
) -> None:
    """With a prompt or without: prefix and answer are the tokens of the whole text, or the pair is refused."""
    encoder = AnswersEncoder(LETTERS, add_eos=add_eos)
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected} if implicit else {
        "prompt": prompt, "chosen": chosen, "rejected": rejected
    }  # fmt: skip
    wholes = [LETTERS.encode(prompt + answer, add_eos=add_eos) for answer in (chosen, rejected)]
    no_answer = not add_eos and not (chosen and rejected)
    nothing_apart = implicit and wholes[0] == wholes[1]
    try:
        group = encoder(row)
    except ValueError as error:
        assert (no_answer and not implicit) or nothing_apart or len(min(wholes, key=len)) <= 1, error
    else:
        assert sequences(group) == wholes
        assert min(group.lengths) >= 1
        answers = [[*answer.encode(), *([2] * add_eos)] for answer in (chosen, rejected)]
        assert implicit or trained(group) == answers


# Against TRL.


def trl_of(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[list[int]]]:
    """What TRL's DPOTrainer tokenizes a row to, by the lines of its `_prepare_dataset`."""
    trl = pytest.importorskip("trl")
    row = trl.maybe_extract_prompt(row)

    def ids(text: Any, **settings: Any) -> list[int]:
        if isinstance(text, str):
            return list(tokenizer(text)["input_ids"])
        return list(tokenizer.apply_chat_template(text, return_dict=True, **settings)["input_ids"])

    if isinstance(row["prompt"], str):
        row = {**row, **{name: row[name] + tokenizer.eos_token for name in ("chosen", "rejected")}}
        before = ids(row["prompt"])
    else:
        before = ids(row["prompt"], add_generation_prompt=True)
    wholes = [ids(row["prompt"] + row[name]) for name in ("chosen", "rejected")]
    assert all(whole[: len(before)] == before for whole in wholes)
    return before, [whole[len(before) :] for whole in wholes]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        pair(),
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]},
    ],
    ids=["explicit", "implicit", "messages", "implicit messages", "text in messages", "several turns"],
)
def test_trls_documented_formats_give_trls_tokens(chatml: Any, row: dict[str, Any]) -> None:
    before, answers = trl_of(row, chatml)
    group = AnswersEncoder(chatml)(row)
    assert sequences(group) == [before + answer for answer in answers]
    assert trained(group) == answers
    columns = ["chosen_ids", "rejected_ids"]  # of rows that are tokens already
    of_ids = AnswersEncoder(chatml, prompt="prompt_ids", answers=columns)
    again = of_ids({"prompt_ids": before, **dict(zip(columns, answers, strict=True))})
    assert content(again)[:2] == content(group)[:2]


# Against torchtune.


def tune_tokenizer(kind: str, folder: Path) -> Any:
    """torchtune's tokenizer of Llama 3, with the 256 bytes for its vocabulary; or ours, through its interface."""
    if kind == "ours":
        return HFTokenizer(byte_level(template=MARKED))
    from torchtune.models.llama3 import llama3_tokenizer

    path = folder / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    return llama3_tokenizer(str(path))


TUNE_ROWS = [
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]},
    {"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, BAD]},
]


@pytest.mark.parametrize("kind", ["llama3", "ours"])
@pytest.mark.parametrize(
    "settings", [{}, {"new_system_prompt": "be brief"}, {"train_on_input": True}], ids=str
)
def test_torchtunes_transform_gives_what_its_dataset_gives(tmp_path: Path, kind: str, settings: Any) -> None:
    datasets = pytest.importorskip("torchtune.datasets")
    tokenizer = tune_tokenizer(kind, tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(TUNE_ROWS))
    theirs = datasets.PreferenceDataset(
        source="json", data_files=str(tmp_path / "rows.json"), split="train", tokenizer=tokenizer,
        message_transform=TRANSFORM(**settings), cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    encoder = MessagesEncoder(tokenizer, message_transform=TRANSFORM(**settings))
    for row, expected in zip(TUNE_ROWS, theirs, strict=True):
        apart = without_sharing(encoder(row))
        for (start, stop), name in zip(apart.bounds, ("chosen", "rejected"), strict=True):
            assert apart.tokens[start:stop].tolist() == expected[f"{name}_input_ids"]
            labels = [int(label) for label in expected[f"{name}_labels"]]
            assert apart.labels[start:stop].tolist() == [IGNORE_INDEX, *labels[1:]]
    assert "masked" not in str(TUNE_ROWS), "torchtune's transform writes into the row that it is given"


# Numbers of answers and of tokens.


def test_fields_arrive_at_their_answers_also_from_tables(chatml: Any, tmp_path: Path) -> None:
    """Of `datasets` and Parquet, which hold a null wherever another row's message has a key."""
    datasets = pytest.importorskip("datasets")
    rows = [pair(ref=[-1.0, -2.0], margin=3, bad=2), pair(chosen=[CALL, GOOD], ref=[0.5, 1], margin=4, bad=5)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    encoder = AnswersEncoder(chatml, fields={"ref": "ref", "margin": "margin", "score": ["margin", "bad"]})
    for source in (rows, table, ParquetSource(str(tmp_path / "rows.parquet"))):
        packs = IterablePackedDataset(
            source, encoder=encoder, max_seq_len=99, strategy="next_fit", num_lanes=1
        )
        for pack, row in zip(packs, rows, strict=True):
            tokens = encoder(row).tokens.tolist()
            assert pack["tokens"][: len(tokens)].tolist() == tokens
            for name, values in {
                "ref": row["ref"], "margin": [row["margin"]] * 2, "score": [row["margin"], row["bad"]],
            }.items():  # fmt: skip
                assert np.isnan(pack["groups"].fields[name][0]), "the prompt has none"
                assert pack["groups"].fields[name][1:].tolist() == values


ids = st.lists(st.integers(5, 8), min_size=1, max_size=5)


@given(ids, st.lists(ids, min_size=1, max_size=4), st.booleans(), st.data())
def test_ids_of_rollouts_are_taken_as_they_are(
    prompt: list[int], completions: list[list[int]], share_prefix: bool, data: st.DataObject
) -> None:
    """Every number arrives at its token, the masked ones at theirs; completions that begin alike keep their own."""
    masks = [
        [1, *data.draw(st.lists(st.integers(0, 1), min_size=len(c) - 1, max_size=len(c) - 1))]
        for c in completions
    ]
    logps = [[-10.0 * i - at for at in range(len(c))] for i, c in enumerate(completions)]
    encoder = AnswersEncoder(
        LETTERS, mask="mask", fields={"advantage": "advantages"}, token_fields={"old_logps": "logprobs"},
        share_prefix=share_prefix,
    )  # fmt: skip
    row = {"prompt": prompt, "completions": completions, "mask": masks, "logprobs": logps}
    group = encoder({**row, "advantages": [*range(len(completions))]})
    assert sequences(group) == [prompt + completion for completion in completions]
    assert trained(group) == [
        [token for token, kept in zip(completion, mask, strict=True) if kept]
        for completion, mask in zip(completions, masks, strict=True)
    ]
    assert group.parents == ((-1, *[0] * len(completions)) if share_prefix else (-1,) * len(completions))
    for i, leaf in enumerate(group.leaves):
        assert group.fields["advantage"][leaf] == i
        start, stop = group.bounds[leaf]
        start += 0 if share_prefix else len(prompt)
        assert group.token_fields["old_logps"][start:stop].tolist() == logps[i]
    assert np.isfinite(group.token_fields["old_logps"]).sum() == sum(map(len, completions))
    tensors = {"prompt": torch.tensor(prompt), "completions": [np.array(each) for each in completions]}
    assert sequences(AnswersEncoder(LETTERS)(tensors)) == sequences(group)


# What is refused: each error names the row's problem and the way out.

ROLLOUT: dict[str, Any] = {
    "prompt": [5, 6], "completions": [[7], [8, 9]], "logprobs": [[-1], [-2, -3]], "reward": [0, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, {"prompt": "a", "chosen": "b"}, "column 'rejected' is missing; the row's columns are"),
        (CHATML, pair(rejected=None), "column 'rejected' is null; mend the row, or leave it out"),
        (CHATML, pair(prompt=None), "column 'prompt' is null"),
        (CHATML, pair(rejected=[USER]), "column 'rejected' begins with a message of the user, after a prompt"),
        (CHATML, pair(chosen=[{**GOOD, "weight": 0}]), "column 'chosen' has no token to train"),
        (CHATML, pair(system="be kind"), r"column 'system' would be ignored.*ignore: \[system\]"),
        (CHATML, {"question": "a", "chosen": "b", "rejected": "c"},
         "there is no column 'prompt', .*prompt: question, or ignore: .question."),
        (CHATML, {"chosen": [GOOD], "rejected": [USER, BAD]}, "no column 'prompt', and not every answer begins"),
        (DEAF, pair(prompt=[SYSTEM, USER]), "the chat template drops message 0, of role 'system'"),
        (CROSSING, pair(), "a token crosses a boundary of message 1"),
        (FORGETFUL, pair(chosen=[{**GOOD, "content": "<think>a</think>b"}, USER, GOOD]),
         "renders the first 2 message.s. in another way when others follow"),
        (CHATML, {"prompt": "the ans", "chosen": "wer", "rejected": "wers"}, "a token crosses from the prompt"),
        (CHATML, {"chosen": "one two", "rejected": "one two"}, "are equal, so there is no telling where their prompt"),
    ],
)  # fmt: skip
def test_pairs_that_are_refused(template: str, row: dict[str, Any], message: str) -> None:
    """By themselves, and in a stream, which says which sample it is, or leaves it out."""
    encoder = AnswersEncoder(byte_level(template=template))
    with pytest.raises(ValueError, match=f"sample 0: .*{message}"):
        next(iter(IterablePackedDataset([row], encoder=encoder, max_seq_len=99)))
    good = {"prompt": [5], "chosen": [6], "rejected": [7]}
    packs = IterablePackedDataset([row, good], encoder=encoder, max_seq_len=9, skip_bad=True)
    assert [pack["num_seqs"] for pack in packs] == [3]


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({}, {"completions": "text"}, "column 'completions' holds a str; give a list with one entry for each"),
        ({}, {"completions": []}, "column 'completions' holds no answer; leave the row out"),
        ({}, {"completions": [[7], "x"]}, "hold ids and texts or messages; give all answers as ids"),
        ({}, {"completions": [[7], []]}, r"column 'completions\[1\]' has no token to train"),
        ({}, {"completions": ["x"]}, "columns 'prompt' and 'completions' hold ids and texts or messages"),
        ({}, {"prompt": []}, "column 'prompt' holds no token, so nothing predicts the answers' first"),
        ({}, {"prompt": [USER]}, "a Letters has no chat template; .*rows of text or ids"),
        ({}, {"system": "x"}, "column 'system' would be ignored"),
        ({"fields": ["advantage"]}, {}, "column 'advantage' is missing"),
        ({"fields": ["reward"]}, {"reward": [1, None]}, "column 'reward' holds a list, .1, None.; give finite"),
        ({"token_fields": ["logprobs"]}, {"logprobs": [[1]]}, "column 'logprobs' has 1 entries for 2 answers"),
        ({"token_fields": ["logprobs"]}, {"logprobs": [[1], [2]]},
         r"column 'logprobs\[1\]' has shape \[1\]; give 2 numbers"),
        ({"token_fields": ["logprobs"]}, {"prompt": "a", "completions": ["b", "c"]},
         "'logprobs' has a number for each token, and column 'completions' holds no ids.*give the answers as ids"),
        ({"mask": "mask"}, {"mask": [[0], [1, 1]]}, r"column 'completions\[0\]' has no token to train"),
        ({"mask": "mask"}, {"mask": [[1], [1]]}, r"'mask\[1\]' has shape \[1\] for 2 tokens"),
        # Settings that fit no row.
        ({"fields": {"reward": 3}}, {}, r"fields=.*reward.* names no columns; write \[column, ...\], \{field: column"),
        ({"fields": {"reward": ["a", "b", "c"]}}, {"a": 1, "b": 2, "c": 3},
         r"'a, b, c' has shape \[3\]; give 2 numbers"),
        ({"fields": ["reward"], "token_fields": {"reward": "logprobs"}}, {},
         "'reward' for segments and for tokens; give it"),
    ],
)  # fmt: skip
def test_rollouts_that_are_refused(settings: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnswersEncoder(LETTERS, **settings)({**ROLLOUT, **changed})


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({"fields": ["margin"]}, {}, "column 'margin' is missing; the row's columns are"),
        ({"fields": ["margin"]}, {"margin": None}, "'margin' holds a NoneType, None; give finite numbers"),
        ({"fields": ["margin"]}, {"margin": [1.0, float("nan")]}, "column 'margin' holds a list, .1.0, nan."),
        ({"fields": ["margin"]}, {"margin": [1, 2, 3]}, r"'margin' has shape \[3\]; give 2 numbers or one number"),
        ({"fields": {"score": ["a", "b"]}}, {"a": 1, "b": [1, 2]}, "column 'a, b' holds lists of different lengths"),
        ({"tokenizer": LETTERS}, {}, "a Letters has no chat template; .*one of torchtune's message transforms"),
        ({"tokenizer": LETTERS, "message_transform": TRANSFORM()}, {}, "a Letters takes text only, no messages"),
        ({"tokenizer": SimpleNamespace(encode=lambda text, add_bos, add_eos: [5])}, {}, "adds no EOS, though add_eos"),
        ({"tokenizer": LETTERS, "add_eos": False}, {"prompt": "a", "chosen": "b", "rejected": ""},
         r"column 'rejected' has no token to train.*add_eos: True"),
        # What torchtune's transform would change.
        *(({"message_transform": TRANSFORM()}, {"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD], **row},
           message) for row, message in [
            ({"chosen": [USER, CALL]}, "has tool_calls=.* drops; .*AnswersEncoder"),
            ({"chosen": [USER, {**GOOD, "content": None}]}, "has no content"),
            ({"chosen": [USER]}, "must be at least length 2"),
            ({"chosen": [GOOD, USER]}, "Assistant message before expected user message"),
            ({"system": "x"}, "column 'system' would be ignored"),
        ]),
    ],
)  # fmt: skip
def test_settings_of_pairs_that_are_refused(chatml: Any, settings: Any, row: Any, message: str) -> None:
    encoder: Any = MessagesEncoder if "message_transform" in settings else AnswersEncoder
    with pytest.raises(ValueError, match=message):
        encoder(**{"tokenizer": chatml} | settings)(pair(**row))
