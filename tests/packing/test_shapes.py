"""Shapes of rows that people publish: each is read as it is meant, or refused with file, line and way out."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streampack import IGNORE_INDEX, Group, IterablePackedDataset, JSONLSource, ShapeEncoder, cli, encoder_for
from streampack.streaming.first_look import first_look
from tests.harness.hf_tokenizers import CHATML, byte_level

Part = tuple[str, bool]
"""A text, and whether it is trained."""


@pytest.fixture(scope="module")
def tok() -> Any:
    return byte_level(template=CHATML)


@pytest.fixture(scope="module")
def folder(tok: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("tokenizer")
    tok.save_pretrained(made)
    return str(made)


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# The oracle: texts written by hand, tokenized as a whole, and masked by where in the text each token begins.


def turn(role: str, text: str, *, trained: bool = False) -> list[Part]:
    """A turn of the template CHATML; an answer is what follows its head."""
    return [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>\n", trained)]


def chat(*turns: list[Part]) -> list[Part]:
    return [("<s>", False), *(part for each in turns for part in each)]


def user(text: str) -> list[Part]:
    return turn("user", text)


def answer(text: str, *, trained: bool = True) -> list[Part]:
    return turn("assistant", text, trained=trained)


def masked(tok: Any, parts: list[Part]) -> tuple[list[int], list[int]]:
    text = "".join(part for part, _ in parts)
    made = tok(text, add_special_tokens=False, return_offsets_mapping=True)
    flags = [flag for part, flag in parts for _ in part]
    ids = made["input_ids"]
    return ids, [
        token if flags[start] else IGNORE_INDEX
        for token, (start, _) in zip(ids, made["offset_mapping"], strict=True)
    ]


def wholes(sample: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of a sample, of a group those of each answer with its prompt."""
    if not isinstance(sample, Group):
        return [(sample.tokens.tolist(), sample.labels.tolist())]
    found = []
    for leaf in sample.leaves:
        spans = [slice(*sample.bounds[segment]) for segment in sample.paths()[leaf]]
        found.append(tuple(
            [int(each) for span in spans for each in array[span]] for array in (sample.tokens, sample.labels)
        ))  # fmt: skip
    return found


TOOLS = [{"name": "f", "parameters": {"x": "int"}}]
SYSTEM_TOOLS = turn("system", json.dumps(TOOLS))
CALL = '<|call|>{"name": "f", "arguments": {"x": 1}}'
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
PLAIN = chat(user("Hi"), answer("Hello"))
CALLED = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three"},
]  # fmt: skip
SHARE_CALLED = [
    {"from": "human", "value": "Go"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Three"},
]  # fmt: skip
WITH_TOOLS = chat(SYSTEM_TOOLS, user("Go"), answer(CALL), turn("tool", "3"), answer("Three"))
ALPACA = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
HISTORY = {"system": "Be brief.", "history": [["Hi", "Hello"], ["Who?", "A bot"]]}
PAIR = [chat(user("Q"), answer("A")), chat(user("Q"), answer("B"))]

# name -> (row, what is said of it, what it becomes: parts, of a pair those of each answer; arguments of the door).
PUBLISHED: dict[str, tuple[dict[str, Any], str, Any, dict[str, Any]]] = {
    "1 Alpaca": (ALPACA, "Alpaca's: instruction, output, input", chat(user("Add.\n2 and 3"), answer("5")), {}),
    "1 Alpaca, empty input": (
        ALPACA | {"input": ""}, "Alpaca's: instruction, output", chat(user("Add."), answer("5")), {}),
    "2 Alpaca, history": (
        ALPACA | HISTORY, "Alpaca's: instruction, output, input, history, system",
        chat(turn("system", "Be brief."), user("Hi"), answer("Hello", trained=False), user("Who?"),
             answer("A bot", trained=False), user("Add.\n2 and 3"), answer("5")), {}),
    "2 Alpaca, history asked for": (
        ALPACA | HISTORY | {"system": None}, "Alpaca's: instruction, output, input, history",
        chat(user("Hi"), answer("Hello"), user("Who?"), answer("A bot"), user("Add.\n2 and 3"), answer("5")),
        {"answers": "all"}),
    "3 ShareGPT": (
        {"conversations": SHARE, "system": "Be kind."}, "ShareGPT's conversations: conversations, system",
        chat(turn("system", "Be kind."), user("Hi"), answer("Hello")), {}),
    "3 ShareGPT, OpenAI's keys": (
        {"conversations": HI}, "ShareGPT's conversations: conversations", PLAIN, {}),
    "4 ShareGPT, tools": (
        {"conversations": SHARE_CALLED, "tools": json.dumps(TOOLS)}, "ShareGPT's conversations: conversations, tools",
        WITH_TOOLS, {}),
    "5 OpenAI": (
        {"messages": [*HI, {"role": "user", "content": "Ok"}, {"role": "assistant", "content": "Bye", "weight": 0}]},
        "OpenAI's messages: messages", chat(user("Hi"), answer("Hello"), user("Ok"), answer("Bye", trained=False)), {}),
    "6 OpenAI, tools": ({"messages": CALLED, "tools": TOOLS}, "OpenAI's messages: messages, tools", WITH_TOOLS, {}),
    "7 parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                      {"role": "assistant", "content": [{"type": "text", "value": "Hello"}], "loss_weight": 1.0},
                      {"role": "user", "content": "Ok"}, {"role": "assistant", "content": "Bye", "loss_weight": 0.0}]},
        "OpenAI's messages: messages", chat(user("Hi"), answer("Hello"), user("Ok"), answer("Bye", trained=False)), {}),
    "8 pair, ShareGPT": (
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"},
         "rejected": {"from": "gpt", "value": "B"}},
        "preference pairs: chosen, rejected, conversations", PAIR, {}),
    "9 pair, strings": (
        {"prompt": "Q", "chosen": " A", "rejected": " B"}, "preference pairs: chosen, rejected, prompt",
        [[("Q", False), (f" {letter}</s>", True)] for letter in "AB"], {}),
    "10 pair, messages": (
        {name: [{"role": "user", "content": "Q"}, {"role": "assistant", "content": text}]
         for name, text in (("chosen", "A"), ("rejected", "B"))}, "preference pairs: chosen, rejected", PAIR, {}),
    "10 pair, named messages": (
        {f"{name}_messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": text}]
         for name, text in (("chosen", "A"), ("rejected", "B"))},
        "preference pairs: chosen_messages, rejected_messages", PAIR, {}),
    "10 pair, prompt apart": (
        {"system": "S", "prompt": [{"role": "user", "content": "Q"}],
         **{name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "A"), ("rejected", "B"))}},
        "preference pairs: chosen, rejected, prompt, system",
        [chat(turn("system", "S"), user("Q"), answer(letter)) for letter in "AB"], {}),
    "11 KTO": ({"messages": HI, "label": False}, "column 'label' holds False: the row's answer is judged", None, {}),
    "12 images": (
        {"messages": [{"role": "user", "content": "<image>What?"}, HI[1]], "images": ["demo/1.jpg"]},
        "VisionEncoder takes images", None, {}),
    "12 videos": ({"messages": HI, "videos": ["a.mp4"]}, "column 'videos' would be ignored", None, {}),
    "13 completion": (
        {"prompt": "Q:", "completion": " A"}, "prompts with completions: prompt, completion",
        [("Q:", False), (" A</s>", True)], {}),
    "13 completion, messages": (
        {"prompt": HI[:1], "completion": HI[1:]}, "prompts with completions: prompt, completion", PLAIN, {}),
    "14 tokens": (
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]},
        "token ids: input_ids, labels, attention_mask", ([5, 6, 7], [-100, 6, 7]), {}),
    "15 text": (
        {"text": "one two", "id": "7", "dump": "d", "url": "u", "score": 0.5, "token_count": 2}, "text: text",
        [("one two</s>", True)], {}),
    "16 question, as turns": (
        {"question": "Hi", "answer": "Hello"}, "Alpaca's: question, answer", PLAIN,
        {"columns": "question=instruction,answer=output"}),
    "16 question, as text": (
        {"question": "Hi", "answer": " Hello"}, "prompts with completions: question, answer",
        [("Hi", False), (" Hello</s>", True)], {"columns": {"question": "prompt", "answer": "completion"}}),
    "roles of their own": (
        {"dialog": [{"role": "visitor", "content": "Hi"}, {"role": "bot", "content": "Hello"}]},
        "OpenAI's messages: dialog", PLAIN,
        {"columns": {"dialog": "messages"}, "roles": {"visitor": "user", "bot": "assistant"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_is_read_as_it_is_meant(
    name: str, tok: Any, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` names the shape and shows the first sample; the masks are those that were written by hand."""
    row, said, parts, how = PUBLISHED[name]
    path = write(tmp_path / "rows.jsonl", [row] * 3)
    words = [
        "inspect",
        str(path),
        "--tokenizer",
        folder,
        "--max-seq-len",
        "256",
        "--packs",
        "1",
        "--json",
        "-",
    ]
    for option, value in how.items():
        text = value if isinstance(value, str) else ",".join(f"{ours}={mine}" for ours, mine in value.items())
        words += [f"--{option}", text]
    status = cli.main(words)
    captured = capsys.readouterr()
    if parts is None:
        assert status == 1
        assert said in captured.err
        return
    assert status == 0, captured.err
    first, *shown = json.loads(captured.out)["first"]
    assert first == f"rows are {said}"
    expected = [parts] if isinstance(parts, tuple) else [masked(tok, each) for each in _lists(parts)]
    before = copy.deepcopy(row)
    assert wholes(encoder_for(str(path), tok, **how)(row)) == expected
    assert row == before, "the row is not changed"
    if not isinstance(parts, tuple):
        trained = ["".join(text for text, flag in each if flag).split("\n")[0] for each in _lists(parts)]
        assert "rows.jsonl:1" in shown[0]
        assert all(f"⟦{text}" in "\n".join(shown) for text in trained)


def _lists(parts: Any) -> list[list[Part]]:
    return parts if isinstance(parts[0], list) else [parts]


# One thing off. The second of three rows is the wrong one.

M, S, A = {"messages": HI}, {"conversations": SHARE}, ALPACA
C, P = {"prompt": "Q", "completion": " A"}, {"prompt": "Q", "chosen": " A", "rejected": " B"}
T = {"input_ids": [5, 6], "labels": [-100, 6]}
Q, R = HI


def said(**change: Any) -> dict[str, Any]:
    """OpenAI's messages with another answer; a key that becomes None is removed if its name is given as `drop`."""
    return {"messages": [Q, R | change]}


def gpt(**change: Any) -> dict[str, Any]:
    return {"conversations": [SHARE[0], SHARE[1] | change]}


def without(row: dict[str, Any], key: str, **change: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key} | change


CALLS = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG: dict[str, tuple[Any, Any, str]] = {
    "role misspelt": (M, said(role="asistant"), r"is from 'asistant'.*roles: \{asistant: assistant\}"),
    "role in capitals": (M, said(role="Assistant"), r"roles: \{Assistant: assistant\}"),
    "role unknown": (M, said(role="bot"), "is from 'bot'; the known ones are human, gpt, system"),
    "role null": (M, said(role=None), "message 1 has no role"),
    "role a number": (M, said(role=1), "message 1 has no role"),
    "from misspelt": (S, gpt(**{"from": "gtp"}), "is from 'gtp'.*Map it"),
    "from unknown": (S, gpt(**{"from": "bing"}), "is from 'bing'.*Map it"),
    "value misspelt": (S, {"conversations": [SHARE[0], {"from": "gpt", "vaule": "Hello"}]}, "no content"),
    "content null": (M, said(content=None), r"message 1 \(assistant\) has no content \(null\).*mend the row"),
    "content null, calls empty": (M, said(content=None, tool_calls=[]), "no content.*mend the row"),
    "content misspelt": (M, {"messages": [Q, {"role": "assistant", "contents": "Hello"}]}, "no content"),
    "content a number": (M, said(content=5), "content of type int; it must be text"),
    "content empty": (M, said(content=""), "is an answer without text; mend the row"),
    "content an image": (M, said(content=[{"type": "image_url"}]), "only text can be packed"),
    "call without name": (M, said(content=None, tool_calls=[{"function": {}}]), "names no function; it must be"),
    "call no JSON": (
        M, said(tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]), "arguments holds text that is no JSON"),
    "function_call no JSON": (
        S, {"conversations": [SHARE[0], {"from": "function_call", "value": "f(1)"}, *SHARE]},
        "function_call.* holds text that is no JSON"),
    "tools no JSON": (M, M | {"tools": "[{"}, "column 'tools' holds text that is no JSON"),
    "weight of another type": (M, said(weight="no"), "weight='no'; it must be 0"),
    "weight a fraction": (M, said(weight=0.5), "weight=0.5; it must be 0"),
    "weights contradict": (M, said(weight=1, train=False), "contradict one another; keep one"),
    "weight of the user": (M, {"messages": [Q | {"train": True}, R]}, "only answers are trained; give it"),
    "mask of its own": (M, said(mask=1), r"has a key 'mask', which is not read; say.*weight"),
    "messages empty": (M, {"messages": []}, "'messages' is empty; mend the row, or leave it out"),
    "messages null": (M, {"messages": None}, "'messages' is empty; mend the row, or leave it out"),
    "messages no JSON": (M, {"messages": "Hi there"}, "holds text that is no JSON"),
    "messages a dict": (M, {"messages": Q}, "holds a dict; it must be a list of messages"),
    "messages of texts": (M, {"messages": ["Hi", "Hello"]}, "message 0 is a str; it must be a dict"),
    "an answer first": (M, {"messages": [R, Q, R]}, "begins with an answer.*begin with a message of the user"),
    "two systems": (
        M, {"messages": [{"role": "system", "content": "S"}, *HI], "system": "T"}, "two system prompts; remove one"),
    "system a list": (M, M | {"system": ["S"]}, "column 'system' holds a list.*it must be text"),
    "row not trained": (M, M | {"train": False}, "says that the row is not trained.*leave such rows out"),
    "judged": (M, M | {"label": False}, "judged, as for KTO.*leave the bad ones out"),
    "images": (M, M | {"images": ["a.png"]}, "column 'images' would be ignored.*VisionEncoder"),
    "column renamed": (M, {"message": HI}, r"if 'message' is the messages, say columns: \{message: messages\}"),
    "two readings": (M, M | {"text": "Hi Hello"}, r"may be OpenAI's messages.*or text.*say ignore: \[text\]"),
    "both conversations": (M, M | S, r"may be OpenAI's.*or ShareGPT's.*say ignore"),
    "output misspelt": (A, without(A, "output", ouput="5"), r"say columns: \{ouput: output\}"),
    "instruction misspelt": (A, without(A, "instruction", instuction="Add."), r"say columns: \{instuction: instruc"),
    "input misspelt": (A, without(A, "input", inputs="2 and 3"), r"column 'inputs' is not read.*\{inputs: input\}"),
    "history misspelt": (A, A | {"histroy": [["Hi", "Hello"]]}, r"column 'histroy' is not read.*ignore: \[histroy\]"),
    "output null": (A, A | {"output": None}, "'output' is empty; mend the row"),
    "output empty": (A, A | {"output": ""}, "'output' is empty; mend the row"),
    "output a number": (A, A | {"output": 5}, "column 'output' holds a int, 5; it must be text"),
    "output a list": (A, A | {"output": ["5"]}, "column 'output' holds a list.*it must be text"),
    "input a number": (A, A | {"input": 7}, "column 'input' holds a int, 7; it must be text"),
    "instruction null": (A, A | {"instruction": None}, "'instruction' is empty; mend the row"),
    "history of one": (A, A | {"history": [["Hi"]]}, "'history', entry 0 is a list.*a prompt and its answer"),
    "history of texts": (A, A | {"history": ["Hi", "Hello"]}, "'history', entry 0 is a str"),
    "history with null": (A, A | {"history": [["Hi", None]]}, "'history', entry 0 is a list"),
    "another shape": (A, S, "is ShareGPT's conversations.*files of their own, or leave them out"),
    "space before the answer": (C, {"prompt": "Q ", "completion": "the end"}, "a token crosses.*move white space"),
    "completion null": (C, C | {"completion": None}, "'completion' is empty; mend the row"),
    "completion a number": (C, C | {"completion": 5}, "column 'completion' holds a int; give text"),
    "completions": (C, {"prompt": "Q", "completions": [" A", " B"]}, "is prompts with several answers"),
    "chosen misspelt": (P, without(P, "chosen", choosen=" A"), r"say columns: \{choosen: chosen\}"),
    "chosen a number": (P, P | {"chosen": 1}, "column 'chosen' holds a int; give text, or messages"),
    "chosen empty": (P, P | {"chosen": []}, "'chosen' is empty; mend the row"),
    "labels of text": (T, T | {"labels": ["a", "b"]}, "'labels'"),
    "labels too few": (T, T | {"labels": [6]}, "'input_ids' has 2 entries and 'labels' has 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_thing_off_is_refused_with_file_line_and_way_out(name: str, tok: Any, tmp_path: Path) -> None:
    """And nothing of the row is trained where such rows are left out."""
    good, wrong, fragment = WRONG[name]
    path = write(tmp_path / "rows.jsonl", [good, wrong, good])
    with pytest.raises(ValueError, match=rf"(?s)rows\.jsonl:2.*{fragment}"):
        list(IterablePackedDataset(str(path), encoder=encoder_for(str(path), tok), max_seq_len=256))
    encoder = encoder_for(str(path), tok, strict=False)
    left = IterablePackedDataset(str(path), encoder=encoder, max_seq_len=256, skip_bad=True)
    [pack] = left
    alone = write(tmp_path / "good.jsonl", [good, good])
    [same] = IterablePackedDataset(str(alone), encoder=encoder_for(str(alone), tok), max_seq_len=256)
    assert (pack["tokens"].tolist(), pack["labels"].tolist()) == (
        same["tokens"].tolist(),
        same["labels"].tolist(),
    )


@pytest.mark.parametrize("wrong", ["judged", "images", "role misspelt", "tools no JSON", "another shape"])
def test_rows_that_make_no_sample_are_known_before_training(
    tok: Any, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, fragment = WRONG[wrong]
    path = write(tmp_path / "rows.jsonl", [*[good] * 900, bad, good])
    with pytest.raises(ValueError, match=rf"(?s)rows\.jsonl:901.*{fragment}"):
        encoder_for(str(path), tok)
    write(path, [*[good] * 1000, bad, good])
    monkeypatch.setattr(JSONLSource, "locate", None)  # it reads a file up to the row
    assert encoder_for(str(path), tok), "further rows are errors when they are read"


@pytest.mark.parametrize("content", [b"[1, 2]\n", b"\x00\xff\x80", b'{"messages": [\n'])
def test_a_file_without_a_row_says_what_its_first_record_is(tok: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: (it is a JSON array|.* line of JSON)"):
            encoder_for(str(tmp_path / "rows.jsonl"), tok, strict=strict)


@pytest.mark.parametrize(
    ("rows", "how", "fragment"),
    [
        ([{"question": "Hi", "answer": "Hello"}], {}, "turns of a chat, columns: .*or texts to be joined, columns: "),
        ([A], {"columns": {"ouput": "output"}}, "maps 'ouput', which none of the first rows has"),
        ([A], {"columns": "output=answer"}, "maps 'output' to 'answer'; ours are attention_mask, chosen"),
        ([A], {"columns": {"a": "output", "b": "output"}}, "maps two columns to one"),
        ([A | {"answer": "6"}], {"columns": {"answer": "output"}}, "both 'answer', which columns= maps.*remove one"),
        ([M], {"roles": {"bot": "asistant"}}, "roles maps 'bot' to 'asistant'; ours are system"),
        ([{"x": 1}], {}, r"columns are 'x', which is no known shape.*columns: \{YOURS: OURS\}"),
    ],
)  # fmt: skip
def test_a_door_that_is_told_wrong_refuses(
    tok: Any, rows: list[Any], how: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ValueError, match=fragment):
        encoder_for(rows, tok, **how)([*rows, A][0])


def test_a_column_is_mapped_where_a_row_has_it(tok: Any) -> None:
    rows = [A, without(A, "output", answer="5"), A | {"output": None, "answer": "5"}]
    encoder = encoder_for(rows, tok, columns={"answer": "output"})
    expected = [masked(tok, chat(user("Add.\n2 and 3"), answer("5")))]
    assert [wholes(encoder(row)) for row in rows] == [expected] * 3


def test_what_is_ambiguous_is_read_when_one_reading_is_left_out(tok: Any) -> None:
    row = M | {"text": "Hi Hello"}
    assert wholes(encoder_for([row], tok, ignore="text")(row)) == [masked(tok, PLAIN)]
    assert wholes(encoder_for([row], tok, ignore=["messages"])(row)) == [
        masked(tok, [("Hi Hello</s>", True)])
    ]


def test_rows_of_a_second_shape_are_counted_before_training(
    tok: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "rows.jsonl", [*[A] * 30, S, *[A] * 30, {"x": 1}, S])
    with pytest.raises(
        ValueError, match=r"60 of the first 63 rows are Alpaca's.*rows.jsonl:31 is ShareGPT's"
    ):
        encoder_for(str(path), tok)
    assert isinstance(made := encoder_for(str(path), tok, strict=False), ShapeEncoder)
    assert made.shape.key == "alpaca"
    assert "rows.jsonl:62" in caplog.text, "the row of no shape, too"


def test_the_first_sample_is_short_and_moves_no_cursor(tok: Any, tmp_path: Path) -> None:
    """The first rows may be bad ones; the middle of long texts is cut, and escape codes of the data are not printed."""
    long = {"instruction": "one " * 500 + "\x1b[2J", "output": "two"}
    path = write(tmp_path / "rows.jsonl", [A | {"output": None}, long])
    encoder = encoder_for(str(path), tok, strict=False)
    packs = IterablePackedDataset(str(path), encoder=encoder, max_seq_len=4096, skip_bad=True)
    first, place, *lines = first_look(packs.lane_config)
    assert first == "rows are Alpaca's: instruction, output"
    assert "rows.jsonl:2" in place
    text = "\n".join(lines)
    assert text.endswith("⟦two<|im_end|>\n    ⟧")
    assert " [...] " in text
    assert len(text) < 400
    assert "\x1b" not in text
