"""Local files in place of those that torchtune's stock configs name: tokenizers and rows."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

FIRST_SPECIAL = 512
"""Where the special tokens begin, after 256 bytes and the words of the rows."""

# Tokenizers of bytes and words, and one of 500 pieces.


def set_tokenizer(node: Any, where: Path) -> None:
    """Let the node of a tokenizer name files in the folder ``where``, which are written once."""
    if not where.exists():
        where.mkdir(parents=True)
        _write_tokenizers(where)
    if "merges_file" in node:
        node.path, node.merges_file = str(where / "vocab.json"), str(where / "merges.txt")
    elif "merges_path" in node:
        node.vocab_path, node.merges_path = str(where / "vocab.json"), str(where / "merges.txt")
    else:
        kind = "bytes.tiktoken" if "llama3" in node._component_ else "pieces.model"
        node.path = str(where / kind)


def _common_words() -> list[bytes]:
    """The words of Alpaca's prompt, and of our rows."""
    from torchtune.data import AlpacaToMessages

    text = " ".join([AlpacaToMessages().template["prompt_input"], " ".join(WORDS)])
    return [word.encode() for word in dict.fromkeys(re.findall(r" ?\w+", f" {text}"))]


def _write_tokenizers(where: Path) -> None:
    import sentencepiece

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }  # GPT-2's
    merged = [word[:size] for word in _common_words() for size in range(2, len(word) + 1)]
    merged = sorted(dict.fromkeys(merged), key=len)[: FIRST_SPECIAL - 256]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    (where / "bytes.tiktoken").write_text("".join(lines))
    texts = ["".join(letters[byte] for byte in token) for token in tokens]
    (where / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(texts)}))
    merges = "".join(f"{text[:-1]} {text[-1]}\n" for text in texts[256:])
    (where / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    sentences = (text for row in alpaca_rows(200) for text in row.values())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_prefix=str(where / "pieces"), vocab_size=500, byte_fallback=True,
        model_type="bpe", hard_vocab_limit=False, minloglevel=2, pad_id=3,
    )  # fmt: skip


# Rows with the columns of the data sets on the hub.

WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "house", "tree"]


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first + i * i) % len(WORDS)] for i in range(count))


def alpaca_rows(count: int) -> list[dict[str, str]]:
    return [
        {
            "instruction": f"Say {words(i, 2 + i % 3)}", "input": words(i, i * 7 % 4),
            "output": words(i + 1, 1 + i * 5 % 9),
        }
        for i in range(count)
    ]  # fmt: skip


def pair_rows(count: int) -> list[dict[str, str]]:
    return [
        {
            "question": words(i, 3 + i % 9),
            "response_j": words(i, 1 + i % 7),
            "response_k": words(i + 5, 1 + i % 4),
        }
        for i in range(count)
    ]


def write_rows(path: Path, kind: str, count: int) -> Path:
    """Write rows of ``"alpaca"`` or of ``"pairs"``."""
    rows = (pair_rows if kind == "pairs" else alpaca_rows)(count)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def set_data(node: Any, folder: Path) -> None:
    """Let the node of a dataset read a file in ``folder``, which is written once."""
    kind = {"stack_exchange_paired_dataset": "pairs", "the_cauldron_dataset": "images"}.get(
        str(node.get("_component_", "the_cauldron_dataset")).rpartition(".")[2], "alpaca"
    )
    path = folder / f"{kind}.{'parquet' if kind == 'images' else 'json'}"
    if not path.exists():
        if kind == "images":
            _write_images(path)
        else:
            write_rows(path, kind, 600 if kind == "pairs" else 240)
    node.source, node.data_files = path.suffix[1:], str(path)
    node.split = "train"


def _write_images(path: Path) -> None:
    import datasets
    from PIL import Image

    features = datasets.Features({
        "images": datasets.Sequence(datasets.Image()),
        "texts": [{"user": datasets.Value("string"), "assistant": datasets.Value("string")}],
    })  # fmt: skip
    images = [[Image.new("RGB", (20 + 9 * (i % 5), 30), (i, 255 - i, 90))] for i in range(40)]
    texts = [[{"user": words(i, 3), "assistant": words(i, 1 + i % 5)}] for i in range(40)]
    rows = datasets.Dataset.from_dict({"images": images, "texts": texts}, features=features)
    rows.to_parquet(str(path))
