"""Rollouts: a prompt with any number of completions, and the numbers of completions and of tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    PackedDataLoader,
    PromptCompletionEncoder,
    RolloutEncoder,
)
from tests.harness.hf_tokenizers import CHATML, DEAF, byte_level
from tests.packing.test_encoders_preference import GOOD, LETTERS, TALK, TOOL, USER, sequences, trained

ids = st.lists(st.integers(5, 8), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def chatml() -> Any:
    return byte_level(bos_by_itself=True, template=CHATML)


@given(ids, st.lists(ids, min_size=1, max_size=4), st.booleans(), st.data())
def test_ids_are_taken_as_they_are(
    prompt: list[int], completions: list[list[int]], share_prefix: bool, data: st.DataObject
) -> None:
    """Every number arrives at its token, the masked ones at theirs; completions that begin alike keep their own."""
    masks = [
        [1, *data.draw(st.lists(st.integers(0, 1), min_size=len(c) - 1, max_size=len(c) - 1))]
        for c in completions
    ]
    logps = [[-10.0 * i - at for at in range(len(c))] for i, c in enumerate(completions)]
    encoder = RolloutEncoder(
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
    assert not share_prefix or np.isnan(group.fields["advantage"][0])
    if not share_prefix:
        whole = RolloutEncoder(LETTERS)({"prompt": prompt, "completions": completions}).unshared()
        assert (group.tokens.tolist(), group.lengths) == (whole.tokens.tolist(), whole.lengths)


def test_texts_and_messages_are_encoded_as_prompts_with_completions(chatml: Any) -> None:
    alone, encoder = PromptCompletionEncoder(chatml), RolloutEncoder(chatml)
    said = [
        {"role": "assistant", "content": text} for text in ("The answer is 42.", "The answer is one.", "no")
    ]
    texts = [message["content"] for message in said]
    for prompt, completions, each in (
        ("one", [" two", " three", " two four"], [" two", " three", " two four"]),
        (TALK, said, [[message] for message in said]),
        (TALK, texts, [[message] for message in said]),
        (TALK, [[message, USER, GOOD] for message in said], [[message, USER, GOOD] for message in said]),
    ):
        group = encoder({"prompt": prompt, "completions": completions})
        wholes = [alone({"prompt": prompt, "completion": completion}) for completion in each]
        assert sequences(group) == [whole.tokens.tolist() for whole in wholes]
        assert trained(group) == [whole.labels[whole.labels != IGNORE_INDEX].tolist() for whole in wholes]
        assert len(group.lengths) == 4
    asked = [{"role": "user", "content": "one"}]
    assert encoder({"prompt": "one", "completions": said}).tokens.tolist() == (
        encoder({"prompt": asked, "completions": said}).tokens.tolist()
    ), "a text beside messages is one of the user's"


def test_a_prompt_before_ids_is_that_of_inference(chatml: Any) -> None:
    encoder = RolloutEncoder(chatml)
    group = encoder({"prompt": TALK, "completions": [[5], [6, 7]], "tools": json.dumps([TOOL])})
    expected = chatml.apply_chat_template(TALK, add_generation_prompt=True, tools=[TOOL], return_dict=True)[
        "input_ids"
    ]
    assert group.tokens.tolist() == [*expected, 5, 6, 7]
    assert encoder({"prompt": "one", "completions": [[5]]}).tokens.tolist() == [
        *chatml("one")["input_ids"],
        5,
    ]
    without = RolloutEncoder(chatml, ignore=["tools"])(
        {"prompt": TALK, "completions": [[5]], "tools": [TOOL]}
    )
    assert without.tokens.size < group.tokens.size
    tensors = encoder({"prompt": torch.tensor([3, 4]), "completions": [torch.tensor([5]), np.array([6])]})
    assert tensors.tokens.tolist() == [3, 4, 5, 6]


ROW: dict[str, Any] = {
    "prompt": [5, 6],
    "completions": [[7], [8, 9]],
    "logprobs": [[-1], [-2, -3]],
    "reward": [0, 1],
}


def test_numbers_arrive_in_the_pack() -> None:
    encoder = RolloutEncoder(LETTERS, fields=["reward"], token_fields={"old_logps": "logprobs"})
    [pack] = IterablePackedDataset([ROW], encoder=encoder, max_seq_len=8)
    assert pack["groups"].fields["reward"][1:].tolist() == [0, 1]
    assert pack["groups"].token_fields["old_logps"].tolist()[2:5] == [-1, -2, -3]
    one = RolloutEncoder(LETTERS, fields={"difficulty": "d"})({**ROW, "d": 0.5})
    assert one.fields["difficulty"][1:].tolist() == [0.5, 0.5], "one number for all"


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncated_rollouts_cross_worker_processes_with_their_numbers(side: str) -> None:
    """Ids are their own numbers, so each number shows its token; a resume goes on with them."""
    rows = [
        {
            "prompt": [9] * 4,
            "completions": [[*range(10, 12 + i % 9)], [*range(30, 33)]],
            "reward": [10, 30],
            "i": i,
        }
        for i in range(40)
    ]
    for row in rows:
        row["ids"] = [[float(token) for token in ids] for ids in row["completions"]]
    encoder = RolloutEncoder(LETTERS, fields=["reward"], token_fields=["ids"])

    def loader(num_workers: int) -> PackedDataLoader:
        data = IterablePackedDataset(
            rows,
            encoder=encoder,
            max_seq_len=13,
            overlong="truncate",
            truncate_side=side,
            num_lanes=2,
            shuffle=True,
        )
        return PackedDataLoader(data, batch_size=2, num_workers=num_workers)

    begun = loader(1)
    batches = [next(iter(begun)) for _ in range(1)]
    resumed = loader(0)
    resumed.load_state_dict(begun.state_dict())
    batches += resumed
    assert len(batches) > 10
    groups = 0
    for batch in batches:
        assert batch.groups is not None
        ids = batch.groups.token_fields["ids"]
        numbered = ~ids.isnan()
        assert torch.equal(ids[numbered].long(), batch.tokens[numbered])
        assert torch.equal(numbered, batch.tokens > 9)
        rewards = batch.groups.fields["reward"]
        firsts = batch.groups.first_labels
        assert torch.equal(rewards[~rewards.isnan()].long(), firsts[firsts != IGNORE_INDEX])
        groups += int((firsts == 10).sum())
    assert groups == sum(1 for row in rows if side == "right" or len(row["completions"][0]) <= 9)


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({}, {"completions": "text"}, "column 'completions' holds a str; give a list with one entry for each"),
        ({}, {"completions": None}, "column 'completions' holds a NoneType"),
        ({}, {"completions": {"role": "assistant"}}, "column 'completions' holds a dict"),
        ({}, {"completions": []}, "column 'completions' holds no completion; leave the row out"),
        ({}, {"completions": [[7], "x"]}, "holds ids and texts or messages; give one kind in a row"),
        ({}, {"completions": ["x", None], "prompt": "a"}, r"column 'completions\[1\]' is null"),
        ({}, {"completions": [[7], []]}, r"column 'completions\[1\]' has no token to train"),
        ({}, {"completions": [[7], [0.5]]}, r"column 'completions\[1\]': column 'ids' has shape .* it must be a flat"),
        ({}, {"completions": ["x"]}, "column 'prompt' holds ids and 'completions' does not; give both as ids"),
        ({}, {"prompt": []}, "column 'prompt' holds no token, so nothing predicts the completions' first"),
        ({}, {"prompt": None}, "column 'prompt' is null"),
        ({}, {"prompt": [USER]}, "a Letters has no chat template; .*give texts or ids"),
        ({}, {"system": "x"}, "column 'system' would be left out"),
        ({"prompt": "query"}, {}, "column 'query' is missing"),
        ({"fields": ["advantage"]}, {}, "column 'advantage' is missing"),
        ({"fields": ["reward"]}, {"reward": [1]}, r"column 'reward' has shape \[1\] for 2 sequences"),
        ({"fields": ["reward"]}, {"reward": [1, None]}, "column 'reward' holds .1, None."),
        ({"token_fields": ["logprobs"]}, {"logprobs": None}, "column 'logprobs' has a NoneType for 2 completions"),
        ({"token_fields": ["logprobs"]}, {"logprobs": [[1]]}, "column 'logprobs' has 1 entries for 2 completions"),
        ({"token_fields": ["logprobs"]}, {"logprobs": [[1], [2]]},
         r"column 'logprobs\[1\]' has shape \[1\]; give 2 numbers, one for each token"),
        ({"token_fields": ["logprobs"]}, {"logprobs": [[1], [2, None]]}, r"column 'logprobs\[1\]' holds \[2, None\]"),
        ({"token_fields": ["missing"]}, {}, "column 'missing' is missing"),
        ({"token_fields": ["logprobs"]}, {"prompt": "a", "completions": ["b", "c"]},
         "'logprobs' has a number for each token, and column 'completions' holds no ids.*give the completions as ids"),
        ({"mask": "mask"}, {"mask": [[0], [1, 1]]}, r"column 'completions\[0\]' has no token to train"),
        ({"mask": "mask"}, {"mask": [[1], [1]]}, r"'mask\[1\]' has shape \[1\] for 2 tokens"),
        ({"mask": "mask"}, {"prompt": "a", "completions": ["b", "c"]}, "'mask' has a number for each token"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(settings: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutEncoder(LETTERS, **settings)({**ROW, **changed})


def test_what_a_template_leaves_out_of_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the chat template leaves out message 0, of role 'system'"):
        RolloutEncoder(byte_level(template=DEAF))({"prompt": TALK, "completions": [[5]]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fields": "reward"}, "fields='reward' is text; write"),
        ({"fields": {"reward": ["a", "b"]}}, r"fields has 'reward': .*; write \[column, ...\] or \{field: column\}$"),
        ({"token_fields": {"logps": None}}, "token_fields has 'logps': None"),
        ({"fields": ["x"], "token_fields": ["x"]}, "'x' is in fields and in token_fields; give it two names"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutEncoder(LETTERS, **settings)


def test_the_fingerprint_covers_all_settings() -> None:
    one, two = byte_level(template=CHATML), byte_level(template=DEAF)
    encoders = [
        RolloutEncoder(one), RolloutEncoder(two), RolloutEncoder(one, prompt="x"),
        RolloutEncoder(one, completions="x"), RolloutEncoder(one, tools="x"), RolloutEncoder(one, mask="x"),
        RolloutEncoder(one, add_bos=True), RolloutEncoder(one, add_eos=False), RolloutEncoder(one, fields=["x"]),
        RolloutEncoder(one, token_fields=["x"]), RolloutEncoder(one, share_prefix=False),
        RolloutEncoder(one, ignore=["tools"]),
    ]  # fmt: skip
    prints = [encoder.fingerprint() for encoder in encoders]
    assert len(set(prints)) == len(prints)
    assert RolloutEncoder(byte_level(template=CHATML)).fingerprint() == prints[0]
    assert RolloutEncoder(one).decode(one("one two")["input_ids"]) == "one two"
