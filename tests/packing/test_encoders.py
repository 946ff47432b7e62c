"""Encoders of every kind: of texts, of rows with columns that they do not read, and in new processes."""

from __future__ import annotations

import json
import multiprocessing as mp
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    IGNORE_INDEX,
    AnswersEncoder,
    ChatEncoder,
    IterablePackedDataset,
    MessagesEncoder,
    ShapeEncoder,
    TextEncoder,
)
from tests.harness.hf_tokenizers import CHATML, byte_level

tune_data = pytest.importorskip("torchtune.data")
InputOutput, OpenAI, ShareGPT = (
    tune_data.InputOutputToMessages, tune_data.OpenAIToMessages, tune_data.ShareGPTToMessages
)  # fmt: skip
Pairs = tune_data.ChosenRejectedToMessages


class WordTokenizer:
    """A tokenizer with torchtune's interface: a word is a token, a role a token of its own, cut at max_seq_len."""

    bos_id, eos_id, pad_id = 1, 2, 0

    def __init__(self, *, max_seq_len: int | None = None) -> None:
        self.max_seq_len = max_seq_len

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        words = [10 + sum(word.encode()) % 80 for word in text.split()]
        return ([self.bos_id] * add_bos + words + [self.eos_id] * add_eos)[: self.max_seq_len]

    def tokenize_messages(self, messages: list[Any]) -> tuple[list[int], list[bool]]:
        tokens, mask = [self.bos_id], [True]
        for message in messages:
            content = [7, *self.encode(message.text_content, add_bos=False, add_eos=False)]
            tokens += content
            mask += [message.masked] * len(content)
        return tokens[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        sample["tokens"], sample["mask"] = self.tokenize_messages(sample.pop("messages"))
        return sample


class OfTokenizers(WordTokenizer):
    """One of torchtune's that calls the tokenizers library."""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        byte_level().backend_tokenizer.encode(text)
        return super().encode(text, add_bos, add_eos)


# Plain text.


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
@pytest.mark.parametrize("text", ["a b c", ""])
def test_every_token_of_a_text_is_trained(add_bos: bool, add_eos: bool, text: str) -> None:
    encode = TextEncoder(WordTokenizer(), add_bos=add_bos, add_eos=add_eos, column="body")
    sample = encode({"body": text, "text": "no"})
    assert sample.tokens.tolist() == WordTokenizer().encode(text, add_bos=add_bos, add_eos=add_eos)
    assert sample.labels.tolist() == sample.tokens.tolist()
    assert sample.tokens.dtype == np.int32


class ParsesSpecials(WordTokenizer):
    """Takes the text of BOS and EOS for these tokens, as torchtune's tokenizer of Qwen does."""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        specials = {"<s>": self.bos_id, "</s>": self.eos_id}
        words = [specials.get(word, 10 + sum(word.encode()) % 80) for word in text.split()]
        return [self.bos_id] * add_bos + words + [self.eos_id] * add_eos


@pytest.mark.parametrize("make", [byte_level, ParsesSpecials])
def test_one_bos_and_one_eos_enclose_a_text_that_has_them(make: Any) -> None:
    """Otherwise a model would be trained to say a second EOS after the first."""
    bare, ended = "hello there", "<s> hello there </s>"
    text = TextEncoder(make(), add_bos=True)
    ids = [text({"text": each}).tokens.tolist() for each in (bare, ended, "", f"{bare} </s>")]
    eos, bos = text.tokenizer.eos_id, text.tokenizer.bos_id
    assert [(each.count(bos), each.count(eos)) for each in ids] == [(1, 1)] * 4
    assert all((each[0], each[-1]) == (bos, eos) for each in ids)
    kept = TextEncoder(make(), add_bos=False, add_eos=False)({"text": "a </s> </s>"}).tokens
    assert kept.tolist().count(eos) == 2, "what is not asked for is not changed"

    chat = ChatEncoder(make(), add_bos=True)
    for prompt, answer in (("<s> one", " two </s>"), ("one </s>", ""), ("<s> one </s>", " two")):
        tokens, labels = chat({"prompt": prompt, "completion": answer})
        assert tokens.tolist().count(bos) == 1
        trained = labels[labels != -100].tolist()
        assert trained[-1:] == [eos]
        assert trained.count(eos) == 1
    pair = AnswersEncoder(make(), add_bos=True)({"chosen": "<s> a b </s>", "rejected": "<s> a c"})
    assert [each.tokens.tolist().count(eos) for each in pair.answers()] == [1, 1]
    assert [each.tokens.tolist().count(bos) for each in pair.answers()] == [1, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, "column 'text' holds no text (null); mend the row, or set skip_bad=True, which counts"),
        ({"text": 5}, "column 'text' holds a int; mend the row"),
    ],
)  # fmt: skip
def test_bad_text(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        TextEncoder(WordTokenizer())(row)
    assert str(error.value).startswith(message)


TALK = [{"role": "user", "content": "bad \ud800"}, {"role": "assistant", "content": "fine"}]


@pytest.mark.parametrize(
    ("encoder", "row"),
    [
        (TextEncoder, {"text": "bad \ud800"}),
        (ChatEncoder, {"messages": TALK}),
        (ChatEncoder, {"prompt": "fine", "completion": " bad \ud800"}),
        (AnswersEncoder, {"chosen": "bad \ud800 one", "rejected": "bad \ud800 two"}),
        (AnswersEncoder, {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]}),
        (lambda tok: MessagesEncoder(tok, message_transform=OpenAI()), {"messages": TALK}),
        (lambda tok: MessagesEncoder(OfTokenizers(), message_transform=OpenAI()), {"messages": TALK}),
        (lambda tok: TextEncoder(OfTokenizers()), {"text": "bad \ud800"}),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_an_error_with_its_place(encoder: Any, row: Any, tmp_path: Path) -> None:
    """JSON may hold one; the tokenizers library says of it that it is no str."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="ascii")
    data = IterablePackedDataset(str(path), encoder=encoder(byte_level()), max_seq_len=64, num_lanes=1)
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: a text has '\\ud800' at character")):
        next(iter(data))


def test_the_ledger_counts_what_a_tokenizer_would_have_cut() -> None:
    tokenizer = WordTokenizer(max_seq_len=5)
    rows = [{"text": "a b c d e f"}, {"text": "a b"}]
    data = IterablePackedDataset(rows, encoder=TextEncoder(tokenizer), max_seq_len=5, overlong="truncate")
    assert [pack["num_seqs"] for pack in data] == [1, 1]
    assert (data.ledger().dropped["truncated"], data.ledger().tokens_in) == (3, 8 + 4)
    assert tokenizer.max_seq_len == 5, "the caller's tokenizer is not changed"
    talk = {"input": "a b c", "output": "d e f"}
    cut, whole = (
        MessagesEncoder(each, message_transform=InputOutput())(talk).tokens.tolist()
        for each in (tokenizer, WordTokenizer())
    )
    assert cut == whole


# Columns beside those that an encoder reads: used, refused, or named once.

USER = {"role": "user", "content": "hello"}
GOOD = {"role": "assistant", "content": "hello there"}
BAD = {"role": "assistant", "content": "the answer"}
SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"town": {"type": "string"}}}}
TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}


def pairs(tok: Any, **settings: Any) -> MessagesEncoder:
    return MessagesEncoder(tok, message_transform=Pairs(), **settings)


@pytest.fixture(scope="module")
def tok() -> Any:
    return byte_level(template=CHATML)


@pytest.mark.parametrize("kind", ["chat", "answers", "messages"])
def test_columns_that_nothing_reads_are_named_once(
    tok: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made: Any
    if kind == "chat":
        made, row = ChatEncoder(tok), {"messages": [USER, GOOD], "conversations": [USER], "n": 1}
    elif kind == "answers":
        made, row = AnswersEncoder(tok, fields=["score"]), {**TEXTS, "score": [1, 2], "conversations": "d"}
    else:
        row = {"input": "a", "output": "b", "conversations": "c", "n": 7}
        made = MessagesEncoder(tok, message_transform=InputOutput())
    for again in (row, {**row, "conversations": None}, row, {**row, "another": ["e"]}):
        made(again)
    first, second = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert " does not read 'conversations': nothing of it is trained or seen" in first
    assert "'another'" in second


@pytest.mark.parametrize(
    ("encoder", "row", "column"),
    [
        (AnswersEncoder, TEXTS, "tools"),
        (AnswersEncoder, {"chosen": "a b", "rejected": "a c"}, "tools"),
        (AnswersEncoder, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "system"),
        (AnswersEncoder, {"prompt": "a", "completions": ["b"]}, "tools"),
        (ChatEncoder, {"prompt": "a", "completion": "b"}, "tools"),
        (ChatEncoder, {"prompt": "a", "completion": "b"}, "system"),
        (ChatEncoder, {"messages": [USER, GOOD]}, "system"),
    ],
)
def test_columns_that_change_the_prompt_are_refused_unless_ignored(
    tok: Any, encoder: Any, row: dict[str, Any], column: str
) -> None:
    """Only templates render tools; a system column is not rendered at all."""
    with pytest.raises(ValueError, match=f"column '{column}' would be ignored"):
        encoder(tok)(row | {column: [TOOL]})
    ignoring = encoder(tok, ignore=[column])(row | {column: [TOOL]})
    assert ignoring.tokens.tolist() == encoder(tok)(row | {column: []}).tokens.tolist()


KTO = r"column 'label' holds .*: .*judged.*, as for KTO.*; leave the bad ones out and say ignore: \[label\], or give"
UNTRAINED = r"column '{}' holds .*, which says that the row is not trained, .*leave such rows out, or .*ignore: \[{}\]"
SEES = r"column 'images' would be ignored, and the model trained on the words .*; VisionEncoder.*ignore: \[images\]"


@pytest.mark.parametrize(
    ("encoder", "row", "column", "values", "message"),
    [
        (ChatEncoder, {"messages": [USER, GOOD]}, "label", (False, True, 0, 1, np.bool_(True), 1.0, 2, -1), KTO),
        (ChatEncoder, {"conversations": [USER, GOOD]}, "kto_tag", (False,), KTO.replace("label", "kto_tag")),
        (ChatEncoder, {"prompt": "a", "completion": "b"}, "label", (False,), KTO),
        (ChatEncoder, {"prompt": [USER], "completion": [GOOD]}, "label", (True,), KTO),
        (AnswersEncoder, {"prompt": "a", "chosen": "b", "rejected": "c"}, "label", (0,), KTO),
        (AnswersEncoder, {"prompt": "a", "completions": ["b", "c"]}, "labels", ([True, False],),
         KTO.replace("label", "labels")),
        (lambda tok, **how: MessagesEncoder(tok, message_transform=OpenAI(), **how), {"messages": [USER, GOOD]},
         "label", (False,), KTO),
        (ChatEncoder, {"messages": [USER, GOOD]}, "weight", (0, 0.0, np.int64(0)),
         UNTRAINED.format("weight", "weight")),
        (ChatEncoder, {"prompt": "a", "completion": "b"}, "masked", (1, True), UNTRAINED.format("masked", "masked")),
        (AnswersEncoder, TEXTS, "train", (False,), UNTRAINED.format("train", "train")),
        (ChatEncoder, {"messages": [{**USER, "content": "<image>What?"}, GOOD]}, "images", (["a.png"], "a.png"), SEES),
        (ChatEncoder, {"messages": [USER, GOOD]}, "image", (b"GIF",), SEES.replace("images", "image")),
        (ChatEncoder, {"messages": [USER, GOOD]}, "videos", (["a.mp4"],), SEES.replace("images", "videos")),
        (AnswersEncoder, TEXTS, "images", (["a.png"],), SEES),
        (lambda tok, **how: MessagesEncoder(tok, message_transform=InputOutput(), **how), {"input": "a", "output": "b"},
         "images", (["a.png"],), SEES),
    ],
)  # fmt: skip
def test_rows_of_another_task_are_refused_unless_the_column_is_ignored(
    tok: Any, encoder: Any, row: dict[str, Any], column: str, values: Any, message: str
) -> None:
    alone = encoder(tok)(row).tokens.tolist()
    for value in values:
        made = encoder(tok)
        assert made({**row, column: None}).tokens.tolist() == alone
        with pytest.raises(ValueError, match=message):
            made({**row, column: value})
        assert encoder(tok, ignore=[column])({**row, column: value}).tokens.tolist() == alone
        made({**row, "another": "x", **({column: "math"} if "label" in column else {})})
        with pytest.raises(ValueError, match=message):  # not only in the first row
            made({**row, column: value})


@pytest.mark.parametrize(
    "column", [{"weight": 1}, {"weight": 0.7}, {"masked": 0}, {"loss": 2}, {"train": "no"}]
)
def test_other_numbers_of_a_row_are_let_be(tok: Any, column: dict[str, Any]) -> None:
    row, encoder = {"messages": [USER, GOOD]}, ChatEncoder(tok)
    assert encoder({**row, **column}).tokens.tolist() == encoder(row).tokens.tolist()


@pytest.mark.parametrize(
    "empty", [None, [], "", [None], [[]], {"bytes": None, "path": None}, [{"bytes": None}]]
)
def test_columns_of_images_without_any_are_no_images(tok: Any, empty: Any) -> None:
    """A table has such values in its rows of text alone."""
    row, encoder = {"messages": [USER, GOOD]}, ChatEncoder(tok)
    assert encoder({**row, "images": empty}).tokens.tolist() == encoder(row).tokens.tolist()


def test_a_text_with_a_mark_of_an_image_is_refused_beside_its_images(tok: Any) -> None:
    encoder = TextEncoder(tok)
    with pytest.raises(ValueError, match=r"column 'images' would be ignored.*'<image>'.*VisionEncoder"):
        encoder({"text": "<image> hello", "images": ["a.png"]})
    for row in ({"text": "<image> hello"}, {"text": "<image> hello", "images": [None]}):
        assert encoder(row).tokens.tolist() == encoder({"text": "<image> hello"}).tokens.tolist()
    assert encoder({"text": "hello", "image": b"GIF"}).tokens.size > 0, "a caption is a text, too"


@pytest.mark.parametrize("kind", [np.array, np.float32, np.str_, np.bool_])
def test_arrays_and_scalars_of_numpy_in_tool_calls_are_trained_as_what_they_hold(tok: Any, kind: Any) -> None:
    """transformers writes an array as the text "<ndarray>"."""

    def row(value: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": [{"y": value}]}}}
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    value = kind([1, 2]) if kind is np.array else kind(1)
    encoder = ChatEncoder(tok)
    assert encoder(row(value)).tokens.tolist() == encoder(row(value.tolist())).tokens.tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "add", "input": "two", "output": "three"},
        {"instruction": "add", "output": "three"},
        {"question": "a", "answer": "b"},
        {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "completions": ["b", "c"]},
        {"messages": [USER, GOOD]},
        {"conversations": [USER, GOOD]},
        {"prompt": "a", "completion": " b"},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("encoder", [None, ChatEncoder, AnswersEncoder, TextEncoder])
def test_the_encoder_that_an_error_names_takes_the_row(tok: Any, encoder: Any, row: dict[str, Any]) -> None:
    made = encoder and encoder(tok)
    try:
        next(iter(IterablePackedDataset([row], encoder=made, max_seq_len=400)))
    except ValueError as error:
        said = str(error)
        names = {"tokenizer": tok, "AlpacaToMessages": tune_data.AlpacaToMessages} | {
            kind.__name__: kind for kind in (AnswersEncoder, ChatEncoder, MessagesEncoder, ShapeEncoder)
        }
        [named] = re.findall(r"need an encoder: (?:encoder=)?(\w+\(.*\))", said)
        there = eval(named, names)
        next(iter(IterablePackedDataset([row], encoder=there, max_seq_len=400)))
    else:
        assert "answer" not in row
        assert encoder in (ChatEncoder, AnswersEncoder)


def test_answers_without_their_prompt_are_refused_by_a_transform_that_reads_none(tok: Any) -> None:
    for row in (
        {"prompt": "hello", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hello", "chosen": [USER, GOOD], "rejected": [BAD]},
    ):
        with pytest.raises(ValueError, match="Messages must be at least length 2, but got 1"):
            pairs(tok)(row)
    whole = pairs(tok)({"chosen": [USER, GOOD], "rejected": [USER, BAD]})
    found = AnswersEncoder(tok)({"prompt": "hello", "chosen": [GOOD], "rejected": [BAD]}).tokens
    assert found.tolist() == whole.tokens.tolist(), "the way out trains what the row says"


@pytest.mark.parametrize(
    ("encoder", "row"),
    [
        (AnswersEncoder, {"prompt": "another", "chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        (AnswersEncoder, {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]}),
        (AnswersEncoder, {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        (AnswersEncoder, {"prompt": [USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}),
        (ChatEncoder, {"prompt": [USER], "completion": [USER, GOOD]}),
        (AnswersEncoder, {"prompt": [USER], "completions": [[GOOD], [USER, GOOD]]}),
    ],
)
def test_an_answer_that_asks_behind_a_prompt_that_asks_is_refused(tok: Any, encoder: Any, row: Any) -> None:
    """The row's prompt would be ignored, or the user would ask twice."""
    with pytest.raises(ValueError, match="after a prompt that ends with one of the user; give the"):
        encoder(tok)(row)


FLAGS = {"weight": 0, "train": False, "training": 0, "train_on_turn": False, "loss": 0, "loss_weight": 0.0,
         "loss_mask": 0, "masked": True}  # fmt: skip
"""How programs say that a message is not trained; the opposite says that it is."""


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_messages_mean_what_they_mean_to_other_programs(tok: Any, flag: str) -> None:
    encoder, value = ChatEncoder(tok), FLAGS[flag]
    talk = [USER, GOOD, USER, BAD]
    whole, last = encoder({"messages": talk}), ChatEncoder(tok, answers="last")({"messages": talk})
    assert whole.labels.tolist() != last.labels.tolist()
    share = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello there"}]
    for no, yes in ((value, 1 - value), (bool(value), not value), (np.bool_(value), np.bool_(not value))):
        for answer in (GOOD, share[1]):
            flagged = [
                {**talk[0], flag: no} if flag != "masked" else USER,
                {**answer, flag: no},
                USER,
                {**BAD, flag: yes},
            ]
            assert encoder({"messages": flagged}).labels.tolist() == last.labels.tolist()
    both = [USER, {**GOOD, flag: value, "weight": 0}, USER, BAD]
    assert encoder({"messages": both}).labels.tolist() == last.labels.tolist()
    none = [USER, {**GOOD, flag: None}, USER, BAD]
    assert encoder({"messages": none}).labels.tolist() == whole.labels.tolist(), (
        "as tables fill what is absent"
    )
    pair = AnswersEncoder(tok)(
        {"prompt": [USER], "chosen": [{**GOOD, flag: value}, USER, BAD], "rejected": [BAD]}
    )
    assert tok.decode(pair.labels[pair.labels != IGNORE_INDEX]).count("hello there") == 0


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {**GOOD, "loss_weight": 0.5}], r"message 1 \(assistant\) has loss_weight=0.5; it must be 0 .* or 1"),
        ([USER, {**GOOD, "train": "false"}], r"message 1 \(assistant\) has train='false'; it must be"),
        ([USER, {**GOOD, "loss": [0, 1]}], r"message 1 \(assistant\) has loss=\[0, 1\]; it must be"),
        ([USER, {**GOOD, "train": True, "weight": 0}], "has weight=0 and train=True, which contradict one another"),
        ([{**USER, "train": True}, GOOD], r"message 0 \(user\) has train=True, and only answers are trained; give it"),
        ([{**USER, "masked": False}, GOOD], r"message 0 \(user\) has masked=False, and only answers are trained"),
        ([USER, {**GOOD, "mask": 1}], r"message 1 \(assistant\) has a key 'mask', .* by weight, 0 or 1, or"),
        ([USER, {**GOOD, "train_detail": [{"begin_offset": 0}]}], "has a key 'train_detail'.* ignore: .train_d"),
        ([USER, {**GOOD, "lossScale": 0}], "has a key 'lossScale'"),
    ],
)  # fmt: skip
def test_flags_of_an_unknown_meaning_are_refused(tok: Any, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatEncoder(tok)({"messages": messages})
    row = {"prompt": messages[:1], "chosen": messages[1:], "rejected": [BAD]}
    with pytest.raises(
        ValueError, match=message.replace("message 1", "message .").replace("message 0", "message .")
    ):
        AnswersEncoder(tok)(row)
    if "mask" in messages[1]:
        assert AnswersEncoder(tok, ignore=["mask"])(row).tokens.size


def test_keys_of_messages_that_a_template_reads_are_the_templates(tok: Any) -> None:
    asks = {**USER, "weight": 1, "training_level": 3}
    reads = byte_level(template="{{ messages[0].training_level }}" + CHATML)
    level = ChatEncoder(reads)({"messages": [asks, GOOD]})
    assert reads.decode(level.tokens).startswith("3")
    ignoring = ChatEncoder(tok, ignore=["training_level"])({"messages": [asks, GOOD]})
    assert ignoring.tokens.tolist() == ChatEncoder(tok)({"messages": [USER, GOOD]}).tokens.tolist()
    with pytest.raises(ValueError, match="has a key 'training_level'"):
        ChatEncoder(tok)({"messages": [asks, GOOD]})


@pytest.mark.parametrize("flag", [*FLAGS, "mask"])
@pytest.mark.parametrize(
    ("transform", "row_of"),
    [
        (ShareGPT(),
         lambda flag: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"} | flag]}),
        (OpenAI(), lambda flag: {"messages": [USER, GOOD | flag]}),
        (Pairs(), lambda flag: {"chosen": [USER, GOOD | flag], "rejected": [USER, BAD]}),
    ],
)  # fmt: skip
def test_flags_that_torchtunes_transforms_leave_out_are_refused(
    tok: Any, transform: Any, row_of: Any, flag: str
) -> None:
    encoder, value = MessagesEncoder(tok, message_transform=transform), FLAGS.get(flag, 1)
    with pytest.raises(ValueError, match=rf"has {flag}=.*, which torchtune's transform drops"):
        encoder(row_of({flag: value}))
    assert encoder(row_of({flag: None})).tokens.size, "as tables fill what is absent"
    if flag in FLAGS:
        assert encoder(row_of({flag: 1 - value})).tokens.size


def encode_in_a_child(encoder: TextEncoder, out: Any) -> None:
    out.put(encoder({"text": "hello there"}).tokens.tolist())


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_encoders_survive_a_new_process(start: str, capfd: pytest.CaptureFixture[str]) -> None:
    encoder = TextEncoder(byte_level(bos_by_itself=True))
    expected = encoder({"text": "hello there"}).tokens.tolist()
    context = mp.get_context(start)
    out = context.Queue()
    child = context.Process(target=encode_in_a_child, args=(encoder, out))
    child.start()
    assert out.get(timeout=100) == expected
    child.join()
    assert "parallelism" not in capfd.readouterr().err, "tokenizers warns of threads begun before a fork"
