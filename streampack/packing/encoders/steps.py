"""Work that asks for the tokens of texts in steps, so that the texts of many rows are tokenized in one call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Text(NamedTuple):
    """A text to tokenize, without special tokens or with those that are asked for."""

    text: str
    add_bos: bool | None = False  # None: as the tokenizer begins a text by itself
    add_eos: bool = False
    starts: bool = False  # whether it matters where in the text each token begins


class Tokens(NamedTuple):
    """The token ids of a text, and where in it each begins, if that was asked and is known."""

    ids: list[int]
    starts: Sequence[int] | None = None


Steps = Generator[Sequence[Text], Sequence[Tokens], T]
"""Work that yields texts, receives their tokens, and returns a result."""


def run_together(
    works: Sequence[Steps[T]], tokenize: Callable[[Sequence[Text]], Sequence[Tokens | Exception]]
) -> list[T | Exception]:
    """Run works side by side and return their results; one that fails, or has a text that fails, has the exception.

    In each step the texts of all works are tokenized in one call.
    """
    results: dict[int, T | Exception] = {}
    answers: dict[int, Sequence[Tokens] | None] = dict.fromkeys(range(len(works)))
    while answers:
        asked: dict[int, Sequence[Text]] = {}
        for number, given in answers.items():
            work = works[number]
            try:
                asked[number] = next(work) if given is None else work.send(given)
            except StopIteration as end:
                results[number] = end.value
            except Exception as error:
                results[number] = error
        made, answers = iter(tokenize([text for texts in asked.values() for text in texts])), {}
        for number, texts in asked.items():
            given = list[Tokens]()
            for tokens in [next(made) for _ in texts]:
                if isinstance(tokens, Exception):
                    results.setdefault(number, tokens)
                else:
                    given.append(tokens)
            if number not in results:
                answers[number] = given
    return [results[number] for number in range(len(works))]


def run(work: Steps[T], tokenize: Callable[[Sequence[Text]], Sequence[Tokens | Exception]]) -> T:
    """Run one work and return its result, or raise its exception."""
    [made] = run_together([work], tokenize)
    if isinstance(made, Exception):
        raise made
    return made


def attempt(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """Return what a function returns, or the exception that it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error
