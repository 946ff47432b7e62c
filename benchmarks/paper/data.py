"""Samples that a model can learn from: urns of known entropy, and the standard library's docstrings."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.lengths import DISTRIBUTIONS, LogNormal, draw
from benchmarks.paper.settings import Settings

Samples = list[dict[str, npt.NDArray[np.int64]]]

PADDING, START = 0, 1  # a sample begins with START; its words follow
WORDS = 64
MEMORY = 8.0  # weight of the language, in words; with 4, the tiny model learns all it can in 22 steps


class Corpus(NamedTuple):
    """Samples to train on and to validate with."""

    train: Samples
    validation: Samples
    vocab_size: int
    # Lower bound of any model's validation loss, in nats a token; None for text, where it is not known.
    floor: float | None


def corpus_of(settings: Settings) -> Corpus:
    """Make the samples of some settings, the same for every seed."""
    if settings.data == "docstrings":
        return docstrings(settings)
    like = DISTRIBUTIONS[settings.data]
    shape = LogNormal(like.median / settings.shorter, like.sigma, like.like)

    def drawn(count: int, seed: int) -> tuple[Samples, float]:
        lengths = draw(shape, count=count, seed=seed, longest=settings.max_seq_len)
        return urns(np.maximum(lengths, 2), seed=seed)  # a sample of START alone would train nothing

    train, _ = drawn(settings.samples, 0)
    validation, nats = drawn(settings.validation, 1)
    predicted = sum(len(sample["tokens"]) - 1 for sample in validation)
    return Corpus(train, validation, vocab_size=WORDS + 2, floor=nats / predicted)


def urns(lengths: npt.NDArray[np.int64], *, seed: int) -> tuple[Samples, float]:
    """Draw a sample for each length; return them and the nats that the best possible model needs for their words.

    A word is drawn by the language, which knows only the word before, or from the words of the sample so far:
    ``p(word) = (MEMORY * language[before, word] + times seen in this sample) / (MEMORY + words seen)``, a Pólya
    urn. The language is the same in all samples: to learn it takes steps. The words that a sample repeats are known
    only from that sample, and those of another mislead. So packing can do harm in two ways: by too few steps, and by
    samples that see one another.
    """
    rng = np.random.default_rng([seed, 2])
    chances = language()
    order = np.argsort(-lengths, kind="stable")
    ends = lengths[order]
    tokens = np.full((lengths.size, int(lengths.max())), START, np.int64)
    seen = np.zeros((lengths.size, WORDS))
    nats = 0.0
    for i in range(1, tokens.shape[1]):
        count = int(np.searchsorted(-ends, -i, "left"))  # the first samples have a token here
        odds = MEMORY * chances[tokens[:count, i - 1] - START] + seen[:count]
        sums = odds.cumsum(1)
        words = (rng.random(count)[:, None] * sums[:, -1:] >= sums).sum(1).clip(max=WORDS - 1)
        rows = np.arange(count)
        nats -= float(np.log(odds[rows, words] / sums[:, -1]).sum())
        seen[rows, words] += 1
        tokens[:count, i] = START + 1 + words
    made = {int(number): tokens[row, : ends[row]] for row, number in enumerate(order)}
    return [{"tokens": made[i], "labels": made[i]} for i in range(lengths.size)], nats


def language() -> npt.NDArray[np.float64]:
    """Return the probability of each word after START and after each word.  # [WORDS + 1, WORDS]"""
    return np.random.default_rng(99).dirichlet(np.full(WORDS, 0.1), size=WORDS + 1)


def stdlib_pairs() -> tuple[list[dict[str, str]], Any]:
    """Return the standard library's questions and answers, shuffled, and their tokenizer."""
    from streampack_recipes import stdlib_corpus
    from torchtune.models.llama2 import llama2_tokenizer

    paths = stdlib_corpus.prepare()
    rows = [json.loads(line) for line in paths.pairs.read_text("utf-8").split("\n")[:-1]]
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[number] for number in order], llama2_tokenizer(str(paths.tokenizer))


def docstrings(settings: Settings) -> Corpus:
    """Return questions and answers of the standard library; answers are trained, and long samples truncated."""
    pairs, tokenizer = stdlib_pairs()
    samples = []
    for pair in pairs[: settings.samples + settings.validation]:
        prompt = tokenizer.encode(pair["input"], add_bos=True, add_eos=False)
        answer = tokenizer.encode(pair["output"], add_bos=False, add_eos=True)
        tokens = np.array(prompt + answer)[: settings.max_seq_len]
        labels = tokens.copy()
        labels[: len(prompt)] = -100
        samples.append({"tokens": tokens, "labels": labels})
    return Corpus(samples[: settings.samples], samples[settings.samples :], tokenizer.vocab_size, floor=None)
