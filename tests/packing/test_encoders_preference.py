"""Preference pairs: every form of row, the same tokens as TRL and torchtune make of it, and the prompt kept once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    ChatEncoder,
    Group,
    IterablePackedDataset,
    PackedDataLoader,
    ParquetSource,
    PreferenceEncoder,
    PromptCompletionEncoder,
)
from tests.harness.hf_tokenizers import CHATML, MARKED, byte_level

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


def pair(**row: Any) -> dict[str, Any]:
    return {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], **row}


def test_an_answer_is_encoded_as_the_encoder_of_completions_does(chatml: Any) -> None:
    """Text and messages: prefix and answer are the whole, and the labels are those of the answer alone."""
    alone = PromptCompletionEncoder(chatml)
    texts = {"prompt": "What is", "chosen": " the answer?", "rejected": " 42"}
    for row in (texts, pair(), pair(prompt=TALK), pair(chosen=[GOOD, USER, GOOD])):
        group = PreferenceEncoder(chatml)(row)
        wholes = [
            alone({"prompt": row["prompt"], "completion": row[name]}) for name in ("chosen", "rejected")
        ]
        assert group.parents == (-1, 0, 0)
        assert sequences(group) == [whole.tokens.tolist() for whole in wholes]
        for whole, labels in zip(wholes, trained(group), strict=True):
            assert labels == whole.labels[whole.labels != IGNORE_INDEX].tolist()
        assert (group.labels[: group.lengths[0]] == IGNORE_INDEX).all(), "the prompt is not trained"
        assert (group.labels[group.bounds[1][0]] != IGNORE_INDEX).all()


def test_answers_that_begin_alike_keep_their_beginning(chatml: Any) -> None:
    group = PreferenceEncoder(chatml)(pair())
    encoder = PreferenceEncoder(chatml)
    assert encoder.decode(group.tokens[: group.lengths[0]].tolist()).endswith("assistant\n")
    assert [encoder.decode(tokens) for tokens in trained(group)] == [
        "The answer is 42.<|im_end|>\n",
        "The answer is one.<|im_end|>\n",
    ]


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
    expected, found = PreferenceEncoder(chatml)(pair()), PreferenceEncoder(chatml)(FORMS[form])
    assert (found.tokens.tolist(), found.labels.tolist()) == (
        expected.tokens.tolist(),
        expected.labels.tolist(),
    )
    assert (found.lengths, found.parents) == (expected.lengths, expected.parents)


def test_openais_form_has_tools_beside_the_prompt(chatml: Any) -> None:
    encoder = PreferenceEncoder(
        chatml, prompt="input", chosen="preferred_output", rejected="non_preferred_output"
    )
    row = {
        "input": {"messages": [USER], "tools": [TOOL]},
        "preferred_output": [CALL],
        "non_preferred_output": [BAD],
    }
    same = PreferenceEncoder(chatml)(pair(chosen=[CALL], tools=json.dumps([TOOL])))
    assert encoder(row).tokens.tolist() == same.tokens.tolist()
    assert '"parameters"' in encoder.decode(same.tokens.tolist())
    without = PreferenceEncoder(chatml, ignore=["tools"])(pair(chosen=[CALL], tools=[TOOL]))
    assert without.tokens.size < same.tokens.size


def test_conversations_share_their_common_messages(chatml: Any) -> None:
    """An earlier answer in both is of the prompt; after the first difference all answers are trained."""
    encoder = PreferenceEncoder(chatml)
    row = {"chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}
    assert encoder(row).tokens.tolist() == encoder(pair(prompt=TALK)).tokens.tolist()
    apart = encoder({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, BAD, USER, BAD]})
    assert [encoder.decode(tokens).count("The answer") for tokens in trained(apart)] == [2, 2]
    longer = encoder({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]})
    assert [encoder.decode(tokens).count("The answer") for tokens in trained(longer)] == [1, 2]
    systems = encoder({"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]})
    assert encoder.decode(systems.tokens[: systems.lengths[0]].tolist()) == "<s><|im_start|>", (
        "little is shared"
    )
    assert sequences(systems)[0] == ChatEncoder(chatml)({"messages": [SYSTEM, USER, GOOD]}).tokens.tolist()
    tools = encoder(pair(chosen=[CALL, {"role": "tool", "content": "rain"}, GOOD]))
    assert encoder.decode(trained(tools)[0]).count("<|im_end|>") == 2, "what a tool says is not trained"


def test_equal_answers_are_kept(chatml: Any) -> None:
    """As in TRL and torchtune: such pairs are in public data sets, and their loss has no gradient."""
    for row in (pair(rejected=[GOOD]), {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}):
        group = PreferenceEncoder(chatml)(row)
        assert len(set(map(tuple, trained(group)))) == 1
        assert len(group.lengths) == 3
    with pytest.raises(
        ValueError, match=r"are equal, so there is no telling where their prompt ends; leave the row"
    ):
        PreferenceEncoder(chatml)({"chosen": "one two", "rejected": "one two"})


def test_unshared(chatml: Any) -> None:
    row = pair(prompt=TALK, margin=1.5)
    shared, apart = (
        PreferenceEncoder(chatml, share_prefix=flag, fields=["margin"])(row) for flag in (True, False)
    )
    expected = shared.unshared()
    assert apart.tokens.tolist() == expected.tokens.tolist()
    assert apart.labels.tolist() == expected.labels.tolist()
    assert (apart.lengths, apart.parents) == (expected.lengths, (-1, -1))
    assert apart.fields["margin"].tolist() == expected.fields["margin"].tolist() == [1.5, 1.5]


words = st.text(alphabet="ab c\n42?", max_size=9)


@given(words, words, words, st.booleans(), st.booleans())
def test_texts_are_never_changed(
    prompt: str, chosen: str, rejected: str, add_eos: bool, implicit: bool
) -> None:
    """With a prompt or without: prefix and answer are the tokens of the whole text."""
    tokenizer = LETTERS
    encoder = PreferenceEncoder(tokenizer, add_eos=add_eos)
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected} if implicit else {
        "prompt": prompt, "chosen": chosen, "rejected": rejected
    }  # fmt: skip
    wholes = [
        tokenizer.encode(prompt + answer, add_bos=True, add_eos=add_eos) for answer in (chosen, rejected)
    ]
    try:
        group = encoder(row)
    except ValueError as error:
        empty = not add_eos and not (chosen and rejected)
        assert empty or (implicit and wholes[0] == wholes[1]) or len(min(wholes, key=len)) == 1, error
        return
    assert sequences(group) == wholes
    assert min(group.lengths) >= 1
    if not implicit:
        ends = [2] if add_eos else []
        assert trained(group) == [[*answer.encode(), *ends] for answer in (chosen, rejected)]


class Letters:
    """A tokenizer of bytes."""

    bos_id, eos_id = 1, 2

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [1] * add_bos + list(text.encode()) + [2] * add_eos


LETTERS = Letters()


class WithoutBOS(Letters):
    bos_id = None  # type: ignore[assignment]

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = True) -> list[int]:
        return super().encode(text, add_bos=False, add_eos=add_eos)


def test_texts_without_a_common_token_stand_side_by_side() -> None:
    encoder = PreferenceEncoder(WithoutBOS(), add_bos=False)
    group = encoder({"chosen": "ab", "rejected": "ca"})
    assert (group.lengths, group.parents) == ((3, 3), (-1, -1))
    assert sequences(group) == [[97, 98, 2], [99, 97, 2]]
    one = PreferenceEncoder(WithoutBOS(), add_bos=False, add_eos=False)({"chosen": "abc", "rejected": "ab"})
    assert (one.tokens.tolist(), one.lengths) == ([*b"abcb"], (1, 2, 1)), "each keeps a token"


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
    group = PreferenceEncoder(chatml)(row)
    assert sequences(group) == [before + answer for answer in answers]
    assert trained(group) == answers
    ready = {"prompt_ids": before, "chosen_ids": answers[0], "rejected_ids": answers[1]}
    former = {"prompt_input_ids": before, "chosen_input_ids": answers[0], "rejected_input_ids": answers[1]}
    for tokenized in (ready, former):
        again = PreferenceEncoder(chatml)(tokenized)
        assert (again.tokens.tolist(), again.labels.tolist()) == (
            group.tokens.tolist(),
            group.labels.tolist(),
        )


# Against torchtune.


def tune_tokenizer(kind: str, folder: Path) -> Any:
    """torchtune's tokenizer of Llama 3, with the 256 bytes for its vocabulary; or ours, through its interface."""
    if kind == "ours":
        from streampack import HFTokenizer

        return HFTokenizer(byte_level(template=MARKED))
    llama3 = pytest.importorskip("torchtune.models.llama3")
    path = folder / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    return llama3.llama3_tokenizer(str(path))


TUNE_ROWS = [
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]},
    {"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, BAD]},
]


@pytest.mark.parametrize("kind", ["llama3", "ours"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"new_system_prompt": "be brief"}, {"train_on_input": True}],
    ids=["plain", "system", "input"],
)
def test_torchtunes_transform_gives_what_its_dataset_gives(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    """The same tokens and masks; also as rows that are tokens already, of its dataset as a source."""
    datasets = pytest.importorskip("torchtune.datasets")
    from torchtune.data import ChosenRejectedToMessages

    tokenizer = tune_tokenizer(kind, tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(TUNE_ROWS))
    theirs = datasets.PreferenceDataset(
        source="json", data_files=str(tmp_path / "rows.json"), split="train", tokenizer=tokenizer,
        message_transform=ChosenRejectedToMessages(**settings), cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    encoder = PreferenceEncoder(tokenizer, message_transform=ChosenRejectedToMessages(**settings))
    for row, expected in zip(TUNE_ROWS, theirs, strict=True):
        for group in (encoder(row), PreferenceEncoder(tokenizer)(expected)):
            apart = group.unshared()
            for (start, stop), name in zip(apart.bounds, ("chosen", "rejected"), strict=True):
                assert apart.tokens[start:stop].tolist() == expected[f"{name}_input_ids"]
                labels = [int(label) for label in expected[f"{name}_labels"]]
                assert apart.labels[start:stop].tolist() == [IGNORE_INDEX, *labels[1:]], (
                    "the first is never trained"
                )
    assert row == TUNE_ROWS[-1]
    assert "masked" not in str(TUNE_ROWS), "torchtune's transform writes into the row that it is given"


def test_earlier_answers_of_both_can_be_masked(tmp_path: Path) -> None:
    pytest.importorskip("torchtune")
    from torchtune.data import ChosenRejectedToMessages

    tokenizer, transform = tune_tokenizer("llama3", tmp_path), ChosenRejectedToMessages()
    both, masked = (
        PreferenceEncoder(tokenizer, message_transform=transform, mask_shared=flag)(TUNE_ROWS[1])
        for flag in (False, True)
    )
    assert sequences(both) == sequences(masked)
    assert masked.lengths[0] > both.lengths[0]
    assert b"hello there" in bytes(
        token for token in masked.tokens[: masked.lengths[0]].tolist() if token < 256
    )
    assert [bytes(t for t in tokens if t < 256) for tokens in trained(masked)] == [
        b"assistant\n\n" + answer["content"].encode() for answer in (GOOD, BAD)
    ], "its tokenizer trains the header of an answer, too"


def test_question_and_answers_in_columns(tmp_path: Path) -> None:
    stack = pytest.importorskip("torchtune.datasets._stack_exchange_paired")
    tokenizer = tune_tokenizer("llama3", tmp_path)
    transform = stack.StackExchangePairedToMessages(
        column_map={"prompt": "question", "chosen": "better", "rejected": "worse"}
    )
    encoder = PreferenceEncoder(tokenizer, message_transform=transform)
    row = {"question": USER["content"], "better": GOOD["content"], "worse": BAD["content"]}
    from torchtune.data import ChosenRejectedToMessages

    same = PreferenceEncoder(tokenizer, message_transform=ChosenRejectedToMessages())(TUNE_ROWS[0])
    assert encoder(row).tokens.tolist() == same.tokens.tolist()
    with pytest.raises(ValueError, match="column 'worse' holds a NoneType; it must be text"):
        encoder({**row, "worse": None})
    with pytest.raises(ValueError, match="column 'worse' is missing"):
        encoder({"question": "a", "better": "b"})


# Fields.


def test_fields_arrive_at_their_answers(chatml: Any) -> None:
    row = pair(ref_logps=[-1.5, -2], margin=3, good=[1], bad=2)
    encoder = PreferenceEncoder(
        chatml, fields={"ref_logps": "ref_logps", "margin": "margin", "score": ["margin", "bad"]}
    )
    fields = encoder(row).fields
    expected = {"ref_logps": [-1.5, -2.0], "margin": [3.0, 3.0], "score": [3.0, 2.0]}
    for name, values in expected.items():
        assert np.isnan(fields[name][0]), "the prompt has none"
        assert fields[name][1:].tolist() == values
    batch = next(iter(IterablePackedDataset([row], encoder=encoder, max_seq_len=128)))
    assert batch["groups"].fields["ref_logps"][1:].tolist() == [-1.5, -2.0]


def test_rows_of_tables(chatml: Any, tmp_path: Path) -> None:
    """Of `datasets` and Parquet, which hold a null wherever another row's message has a key."""
    datasets = pytest.importorskip("datasets")
    rows = [pair(ref=[-1.0, -2.0]), pair(chosen=[CALL, GOOD], ref=[0.5, 1.0])]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    encoder = PreferenceEncoder(chatml, fields=["ref"])
    expected = [encoder(row) for row in rows]
    for source in (table, ParquetSource(str(tmp_path / "rows.parquet"))):
        packs = IterablePackedDataset(
            source, encoder=encoder, max_seq_len=99, strategy="next_fit", num_lanes=1
        )
        for pack, group in zip(packs, expected, strict=True):
            assert pack["tokens"][: group.tokens.size].tolist() == group.tokens.tolist()
            assert pack["groups"].fields["ref"][1:].tolist() == group.fields["ref"][1:].tolist()


@pytest.mark.parametrize(
    ("fields", "row", "message"),
    [
        (["margin"], {}, "column 'margin' is missing; the row's columns are"),
        (["margin"], {"margin": None}, "'margin' holds None; give finite numbers, and leave out rows that lack them"),
        (["margin"], {"margin": [1, None]}, "column 'margin' holds .1, None.; give finite numbers"),
        (["margin"], {"margin": [1.0, float("nan")]}, "column 'margin' holds .1.0, nan."),
        (["margin"], {"margin": "high"}, "column 'margin' holds 'high'; give finite numbers"),
        (["margin"], {"margin": [1, 2, 3]}, "has shape .3. for 2 sequences; give one number for each, or one for all"),
        ({"score": ["a", "b"]}, {"a": 1, "b": [1, 2]}, "column 'b' has shape .2.; give one number"),
    ],
)  # fmt: skip
def test_bad_fields_name_the_column(chatml: Any, fields: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceEncoder(chatml, fields=fields)(pair(**row))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fields": "margin"}, r"fields='margin' is text; write \[column, ...\] or \{field: column\}"),
        ({"fields": {"score": ["a"]}}, r"fields has 'score': \['a'\]; write .* with 2 columns"),
        ({"fields": {"score": 3}}, "fields has 'score': 3"),
        ({"mask_shared": True}, "mask_shared=True needs a message_transform"),
    ],
)
def test_settings_that_cannot_be_are_refused(chatml: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceEncoder(chatml, **settings)


def test_pairs_in_the_config_of_a_recipe(tmp_path: Path) -> None:
    """The encoder is handed the run's tokenizer; train and held-out batches hold whole pairs with their numbers."""
    pytest.importorskip("torchtune")
    from streampack.instantiate import build
    from streampack.training.config import config_problems, read_config, to_plain
    from streampack.training.data import build_data
    from tests.harness.tiny import tiny_config

    byte_level(template=MARKED).save_pretrained(tmp_path / "tokenizer")
    tokenizer = {"_component_": "streampack.HFTokenizer", "path": str(tmp_path / "tokenizer")}
    rows = [{"chosen": [USER, GOOD], "rejected": [USER, BAD], "ref": [-1.5, -i]} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for transform in (None, {"_component_": "torchtune.data.ChosenRejectedToMessages"}):
        encoder = {"_component_": "streampack.PreferenceEncoder", "fields": {"ref_logps": "ref"}}
        encoder |= {"message_transform": transform} if transform else {}
        sizes = {"data.max_seq_len": 128, "model.max_seq_len": 128}
        config = tiny_config(tmp_path, tokenizer=tokenizer, **{"data.encoder": encoder, **sizes})
        config.data.source.paths = str(tmp_path / "pairs.jsonl")
        assert config_problems(to_plain(config)) == []
        data, held_out = build_data(read_config(config), tokenizer=build(tokenizer), vocab_size=400)
        for batch in [next(iter(PackedDataLoader(data))), *held_out[""].batches]:
            assert batch.groups is not None
            for parents, values in zip(
                batch.groups.parents, batch.groups.fields["ref_logps"].tolist(), strict=True
            ):
                assert parents == tuple(number for at in range(0, len(parents), 3) for number in (-1, at, at))
                assert set(values[1 : len(parents) : 3]) == {-1.5}
