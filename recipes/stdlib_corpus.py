"""Text that every machine has: the standard library of the Python that runs this file.

Its docstrings become question-answer pairs (about 6,700, half a million tokens, lengths as skewed as those of
instruction data) and preference pairs, its sources become documents for pretraining. Nothing is downloaded or imported:
the files are parsed with `ast`. `python -m streampack_recipes.stdlib_corpus` writes the files and prints their folder.
"""

import ast
import hashlib
import io
import json
import os
import random
import re
import sys
import sysconfig
import tokenize
import uuid
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VOCAB_SIZE = 2048  # a third of the quickstart model's parameters; 32,000 tokens would make it nine tenths

# Tests hold fixtures rather than prose, `encodings` and `pydoc_data` are generated tables, many distributions leave
# `idlelib` and `turtledemo` out.
SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "testmock", "tests", "turtledemo",
}  # fmt: skip
# Generated, or written by the machine's owner: they differ between machines.
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize.py", "usercustomize.py")


class Paths(NamedTuple):
    """The files that `prepare` writes, all in `folder`."""

    folder: Path
    pairs: Path  # JSONL, one {"input": ..., "output": ...} a line
    sources: Path  # JSONL, one {"path": ..., "text": ...} a line
    tokenizer: Path  # SentencePiece model, for torchtune.models.llama2.llama2_tokenizer
    preferences: Path  # JSONL, one {"prompt": ..., "chosen": ..., "rejected": ...} a line


def source_files() -> Iterator[dict[str, str]]:
    """Yield the sources of the standard library that are valid Python, in a fixed order.

    >>> next(source_files())["path"]
    '__future__.py'
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root):
        try:
            with tokenize.open(path) as file:  # reads a file's `coding:` line
                yield {"path": path.relative_to(root).as_posix(), "text": file.read()}
        except (SyntaxError, UnicodeDecodeError):
            continue


def docstring_pairs() -> Iterator[dict[str, str]]:
    """Yield a question-answer row for every documented module, class and function, in a fixed order.

    No question or answer comes twice, so a held-out split shares no row with the rest.

    >>> pair = next(pair for pair in docstring_pairs() if "bisect.insort_left" in pair["input"])
    >>> pair["input"]
    'What does `bisect.insort_left` do?'
    >>> pair["output"].splitlines()[0]
    'Insert item x in list a, and keep it sorted assuming a is sorted.'
    """
    seen: set[str] = set()
    for source in source_files():
        with warnings.catch_warnings():  # invalid escapes in old files are not ours to report
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(source["text"])
            except SyntaxError:
                continue
        module = source["path"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, answer in _docstrings(tree, module):
            question = f"What does `{name}` do?"
            if answer and question not in seen and answer not in seen:
                seen |= {question, answer}
                yield {"input": question, "output": answer}


def preference_pairs() -> Iterator[dict[str, str]]:
    r"""Yield a preference pair for every documented name: its docstring's first paragraph, and the same words mixed.

    >>> pair = next(pair for pair in preference_pairs() if "bisect.insort_left" in pair["prompt"])
    >>> pair["prompt"], pair["chosen"]
    ('What does `bisect.insort_left` do?\n', 'Insert item x in list a, and keep it sorted assuming a is sorted.')
    >>> sorted(pair["rejected"].split()) == sorted(pair["chosen"].split())
    True
    """
    for row in docstring_pairs():
        chosen = row["output"].partition("\n\n")[0]
        words = re.findall(r"\S+", chosen)
        random.Random(row["input"]).shuffle(words)
        mixed = iter(words)
        rejected = re.sub(r"\S+", lambda _, mixed=mixed: next(mixed), chosen)
        if rejected != chosen:
            yield {"prompt": f"{row['input']}\n", "chosen": chosen, "rejected": rejected}


def prepare(cache_dir: Path | None = None) -> Paths:
    """Write the files of `Paths` where they are missing, and return them.

    They go to `cache_dir`, by default $STREAMPACK_CACHE or ~/.cache/streampack, in a folder named after Python, its
    library and this file. Files appear complete or not at all, so several processes may prepare at once.

    The tokenizer loads in `torchtune.models.llama2.llama2_tokenizer`. It has 2,048 tokens: 0 is unknown, which no text
    becomes and torchtune pads with, 1 is bos, 2 is eos.
    """
    base = cache_dir or os.environ.get("STREAMPACK_CACHE") or Path.home() / ".cache" / "streampack"
    of = f"{sys.version} {sysconfig.get_path('stdlib')} {Path(__file__).read_text(encoding='utf-8')}"
    folder = Path(base) / f"stdlib-py{sys.version_info.major}.{sys.version_info.minor}-{_digest(of)}"
    names = ("pairs.jsonl", "sources.jsonl", "tokenizer.model", "preferences.jsonl")
    paths = Paths(folder, *(folder / name for name in names))
    folder.mkdir(parents=True, exist_ok=True)
    if not paths.pairs.exists():
        print("reading the standard library's docstrings, some seconds", file=sys.stderr)
        _write(paths.pairs, _lines(docstring_pairs()))
    if not paths.sources.exists():
        _write(paths.sources, _lines(source_files()))
    if not paths.tokenizer.exists():
        print(f"training a tokenizer of {VOCAB_SIZE:,} tokens on them, some seconds", file=sys.stderr)
        _write(paths.tokenizer, _train_tokenizer(text for row in docstring_pairs() for text in row.values()))
    if not paths.preferences.exists():
        _write(paths.preferences, _lines(preference_pairs()))
    return paths


def _walk(root: Path) -> Iterator[Path]:
    if not (root / "ast.py").exists():
        raise FileNotFoundError(
            f"no ast.py in {root}: this Python comes without the sources of its standard library; use one from "
            "python.org, your distribution, conda or uv"
        )
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES):
                yield Path(folder, name)


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, cleaned docstring) of `node` and of every definition in it, also under `if` or `try`."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield name, (ast.get_docstring(node) or "").strip()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # defines nothing, and is most of the tree
            continue
        defines = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _docstrings(child, f"{name}.{child.name}" if defines else name)


def _train_tokenizer(texts: Iterable[str]) -> bytes:
    """Train a BPE model with Llama 2's special ids. It decodes every text exactly, except U+2581, its mark of a space.

    It is trained on lines, so no token contains a newline and another character, as in Llama 2: torchtune's tokenizers
    split messages at newlines. Newlines and rare characters become byte tokens.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,  # a message may begin in the middle of a line
        allow_whitespace_only_pieces=True,  # indentation is one token
        split_digits=True,
        max_sentence_length=1 << 16,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _lines(rows: Iterable[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    print(prepare().folder)
