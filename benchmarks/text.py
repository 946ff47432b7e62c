"""Speed from JSON lines of text to batches, beside the tokenizer alone and a plain DataLoader that tokenizes.

Run ``python -m benchmarks.text``; README.md in this folder explains the table.
"""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks import report
from benchmarks.paper.data import stdlib_pairs
from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, TextEncoder

MAX_SEQ_LEN = 4096
PACKS = 8  # in a batch
DOCUMENTS = 64  # in a batch of the plain DataLoader: as many tokens
LANES = 8
PROCESSES = 2  # workers, and processes of the tokenizer alone
VOCABULARY = 32_000
MODES: dict[str, dict[str, Any]] = {
    "exact_fit": {"overlong": "split"},
    "split_across_pack": {"split_across_pack": True},
}
HEADER = (
    "tokenizer | mode | tokenizer alone, Mtok/s | DataLoader, Mtok/s | "
    "batches, Mtok/s | of tokenizer | spread | of DataLoader | spread | CPU of DataLoader | "
    "CPU of batches"
)


class FastTokenizer:
    """A byte-level BPE of Hugging Face's `tokenizers`, trained here, with torchtune's interface."""

    def __init__(self, texts: Iterable[str], *, vocab_size: int) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<bos>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.tokenizer.train_from_iterator(texts, trainer)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [1] * add_bos + ids + [2] * add_eos


def texts() -> list[str]:
    """Return the standard library's sources and docstrings in a seeded order; lengths are as skewed as on the web."""
    from streampack_recipes.stdlib_corpus import docstring_pairs, source_files

    found = [source["text"] for source in source_files()]
    found += ["\n".join(pair.values()) for pair in docstring_pairs()]
    random.Random(0).shuffle(found)
    return [text for text in found if text]


class Corpus(NamedTuple):
    """A file of JSON lines, and the same texts in memory."""

    path: Path
    texts: list[str]


def write(folder: Path, some: Sequence[str], *, size: int) -> Corpus:
    """Write about ``size`` bytes of ``{"text": ...}`` rows, repeating the texts."""
    path, kept, written = folder / "text.jsonl", [], 0
    texts = cycle(some)
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            kept.append(next(texts))
            written += file.write(json.dumps({"text": kept[-1]}, ensure_ascii=False) + "\n")
    return Corpus(path, kept)


def in_processes(work: Callable[[int], object]) -> None:
    """Run ``work(0)`` to ``work(PROCESSES - 1)`` in parallel, each in a process of its own, and wait for them."""
    processes = [mp.get_context("fork").Process(target=work, args=(number,)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process of the benchmark failed; its error is printed above")


def encode_share(tokenizer: Any, corpus: Corpus, number: int) -> None:
    """Run the tokenizer alone on a process's share of the texts in memory; drop the tokens."""
    for text in islice(corpus.texts, number, None, PROCESSES):
        tokenizer.encode(text)


class Lines(IterableDataset[list[int]]):
    """A dataset as written without a library: each worker parses and tokenizes every n-th line."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path = path
        self.tokenizer = tokenizer

    def __iter__(self) -> Iterator[list[int]]:
        worker = get_worker_info()
        assert worker is not None
        with self.path.open("rb") as lines:
            for line in islice(lines, worker.id, None, worker.num_workers):
                yield self.tokenizer.encode(json.loads(line)["text"])


def plain(tokenizer: Any, corpus: Corpus) -> int:
    """Iterate over a plain DataLoader, whose batches are lists of lists; return the tokens."""
    loader = DataLoader(
        Lines(corpus.path, tokenizer), batch_size=DOCUMENTS, num_workers=PROCESSES, collate_fn=list
    )
    return sum(len(document) for batch in loader for document in batch)


def packed(tokenizer: Any, corpus: Corpus, mode: str) -> int:
    """Iterate over a `PackedDataLoader`, whose batches are tensors; return the tokens."""
    data = IterablePackedDataset(
        JSONLSource(corpus.path),
        encoder=TextEncoder(tokenizer),
        max_seq_len=MAX_SEQ_LEN,
        num_lanes=LANES,
        **MODES[mode],
    )
    loader = PackedDataLoader(data, batch_size=PACKS, num_workers=PROCESSES)
    return sum(batch.num_tokens for batch in loader)


def measure_round(tokenizer: Any, corpus: Corpus) -> tuple[int, dict[str, report.Cost]]:
    """Make each run once; return the corpus's tokens and the cost of each run."""
    costs = {}
    costs["alone"], _ = report.timed(lambda: in_processes(partial(encode_share, tokenizer, corpus)))
    costs["plain"], tokens = report.timed(partial(plain, tokenizer, corpus))
    for mode in MODES:
        costs[mode], ours = report.timed(partial(packed, tokenizer, corpus, mode))
        if ours != tokens:
            raise AssertionError(f"{mode} packed {ours} tokens of {tokens}")
    return tokens, costs


def rows(tokenizers: dict[str, Any], corpus: Corpus, *, repeats: int) -> Iterator[list[str]]:
    """Yield a row of the table for every tokenizer and mode."""
    begin = report.progress(len(tokenizers) * repeats)
    for name, tokenizer in tokenizers.items():
        rounds = []
        for number in range(repeats):
            begin(f"{name}, round {number + 1}")
            rounds.append(measure_round(tokenizer, corpus))
        for mode in MODES:
            runs = ("alone", "plain", mode)
            seconds = {run: [costs[run].seconds for _, costs in rounds] for run in runs}
            cpu = {run: [costs[run].cpu for _, costs in rounds] for run in runs}
            tokens = rounds[0][0]
            yield [
                name,
                mode,
                *(f"{tokens / statistics.median(seconds[run]) / 1e6:.2f}" for run in runs),
                *report.median_and_range(report.quotients(seconds["alone"], seconds[mode])),
                *report.median_and_range(report.quotients(seconds["plain"], seconds[mode])),
                *(f"{statistics.median(report.quotients(cpu[run], cpu['alone'])):.2f}" for run in runs[1:]),
            ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    options = report.parser(__doc__, smoke="0.3 MB, once, one tokenizer").parse_args(arguments)
    size, repeats = (300_000, 1) if options.smoke else (40_000_000, 5)
    logging.getLogger("torchao").setLevel(logging.ERROR)  # says at import that it has no C++ extensions
    # One thread in each process, as in a worker; with more, `tokenizers` would also warn of the fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    some, vocabulary = (texts()[:200], 1000) if options.smoke else (texts(), VOCABULARY)
    tokenizers: dict[str, Any] = {"BPE, `tokenizers`": FastTokenizer(some, vocab_size=vocabulary)}
    if not options.smoke:
        _, tokenizers["BPE, SentencePiece"] = stdlib_pairs()  # the quickstart's, in torchtune's class
    with tempfile.TemporaryDirectory() as folder:
        corpus = write(Path(folder), some, size=size)
        report.publish(
            options,
            "text",
            "JSON lines of text to batches",
            f"{corpus.path.stat().st_size / 1e6:,.0f} MB in {len(corpus.texts):,} rows, in the page cache; "
            f"{PROCESSES} processes; packs of {MAX_SEQ_LEN:,}; medians of {repeats} rounds, each of "
            "which makes all runs of a tokenizer. Explained in ../README.md.",
            report.table(HEADER, rows(tokenizers, corpus, repeats=repeats)),
            packages=["numpy", "tokenizers", "sentencepiece"],
        )


if __name__ == "__main__":
    main()
