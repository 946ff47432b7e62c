"""Which samples make the batches of one global step: lengths in, steps of packs out.

Ranks wait for the slowest, so the packs of a step should cost the same. As multipack does
(github.com/imoneoi/multipack_sampler), a step takes the next of the shuffled samples and gives each, the longest
first, to the pack that has cost the least so far: longest-processing-time scheduling. Multipack goes on so until
nothing fits; here the last 1.5 % of the room is filled by exact sums.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapreplace
from itertools import chain

from streampack.packing.planner import plan_packs
from streampack.packing.strategies import exact_fit
from streampack.validation import require, require_positive

Step = list[list[int]]  # [packs_per_step], each the numbers of its samples

OBJECTIVES = ("quadratic", "linear")

# Measured on 100,000 chat-like lengths (benchmarks/multipack.py), 8 packs of 32,768 tokens a step.
LAID = 0.985  # share of a step's room given out by cost; at 0.98 packs are 12 % less even, at 0.99 a step more is made
SURPLUS = 0.1  # samples read beyond what a step holds, as a share of its room; with 0.05 a step more is made
WINDOW = 128  # of these, the oldest are looked at for a sum; with 32 a step more is made


def plan_steps(
    lengths: Iterable[int],
    *,
    max_tokens: int,
    packs_per_step: int,
    objective: str = "quadratic",
    drop_last: bool = False,
    allow_empty: bool = False,
) -> list[Step]:
    """Every sample exactly once, in steps of ``packs_per_step`` packs of at most ``max_tokens`` each.

    Samples are taken in the order given, so shuffle before. ``"quadratic"`` makes the packs of a step cost the
    same in attention, that is the sum of squared lengths. ``"linear"`` only fills them, as full as can be: for
    models whose cost is in the tokens alone, and for packs of only a few samples, where both cannot be had.
    Within a step, packs stand from the costliest to the cheapest. The last step holds what is left, spread
    evenly; ``drop_last`` leaves those samples out. No pack is empty, unless ``allow_empty`` says that the
    caller has padding for it.

    >>> plan_steps([5, 4, 2, 3, 4, 6, 1], max_tokens=8, packs_per_step=2)
    [[[0, 3], [1, 4]], [[5], [2, 6]]]

    Raises:
        ValueError: for a length below 1 or above ``max_tokens``, or too few samples to fill a step.
    """
    require(objective, "objective", OBJECTIVES)
    require_positive(max_tokens, "max_tokens")
    require_positive(packs_per_step, "packs_per_step")
    whole = checked_lengths(lengths, max_tokens)
    steps: list[Step] = []
    rest: Iterable[int] = range(len(whole))
    if objective == "linear":
        packs = [[span.index for span in pack] for pack in plan_packs(whole, max_tokens)]
        full = len(packs) // packs_per_step * packs_per_step
        steps += (packs[i : i + packs_per_step] for i in range(0, full, packs_per_step))
        rest = chain.from_iterable(packs[full:])
    costs = [length * length for length in whole] if objective == "quadratic" else whole
    steps += _steps(rest, whole, costs, max_tokens, packs_per_step, drop_last=drop_last)
    if not steps:
        raise ValueError(
            f"{len(whole)} samples of {sum(whole)} tokens make no step of {packs_per_step} packs of {max_tokens}; "
            "lower packs_per_step or max_tokens, or leave drop_last out"
        )
    if not allow_empty:
        _leave_none_empty(steps)
    return steps


def share_of(packs_per_step: int | None, at_once: int) -> int:
    """``packs_per_step``, by default the packs that all ranks take at once; it must be a multiple of them."""
    if packs_per_step is None:
        return at_once
    if require_positive(packs_per_step, "packs_per_step") % at_once:
        raise ValueError(
            f"packs_per_step={packs_per_step} is no multiple of {at_once}, the packs that all ranks take at once; "
            "make it one, so that every rank gets as many"
        )
    return packs_per_step


def checked_lengths(lengths: Iterable[int], max_tokens: int) -> list[int]:
    """``lengths`` as plain integers, each from 1 to ``max_tokens``; raises for the first that is not."""
    try:  # a numpy integer would overflow in `exact_fit`'s shifts
        whole = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise ValueError(f"lengths must be whole numbers of tokens: {error}") from None
    for number, length in enumerate(whole):
        if length < 1:
            raise ValueError(f"sample {number} has {length} tokens; remove it")
        if length > max_tokens:
            raise ValueError(
                f"sample {number} has {length} tokens, max_tokens is {max_tokens}; "
                "truncate or remove it, or raise max_tokens"
            )
    return whole


def _steps(
    numbers: Iterable[int],
    lengths: Sequence[int],
    costs: Sequence[int],
    max_tokens: int,
    count: int,
    *,
    drop_last: bool,
) -> Iterator[Step]:
    upcoming = iter(numbers)
    room = count * max_tokens
    waiting: list[int] = []
    while True:
        held = sum(lengths[number] for number in waiting)
        while held < (1 + SURPLUS) * room and (number := next(upcoming, -1)) >= 0:
            waiting.append(number)
            held += lengths[number]
        last = held < room
        if not waiting or (last and drop_last):
            return
        step, waiting = _step(waiting, lengths, costs, max_tokens, count, last=last)
        yield step


def _step(
    waiting: list[int],
    lengths: Sequence[int],
    costs: Sequence[int],
    max_tokens: int,
    count: int,
    *,
    last: bool,
) -> tuple[Step, list[int]]:
    """One step of the waiting samples, and those that wait on. The last one is not filled, only spread."""
    packs: Step = [[] for _ in range(count)]
    rooms = [max_tokens] * count
    spent = [0] * count

    def put(number: int, pack: int) -> None:
        packs[pack].append(number)
        rooms[pack] -= lengths[number]
        spent[pack] += costs[number]

    cheapest = [(0, pack) for pack in range(count)]  # a heap
    to_lay = count * max_tokens * (1 if last else LAID)
    left = []
    longest_first = sorted(waiting, key=lengths.__getitem__, reverse=True)
    for place, number in enumerate(longest_first):
        if lengths[number] > to_lay and place >= count:  # the first ones always: an empty pack takes any
            left += longest_first[place:]
            break
        _, pack = cheapest[0]
        if lengths[number] > rooms[pack]:
            left.append(number)
            continue
        to_lay -= lengths[number]
        put(number, pack)
        heapreplace(cheapest, (spent[pack], pack))
    left.sort()  # the oldest first, which is whom `exact_fit` prefers: no sample waits long
    by_cost = sorted(range(count), key=spent.__getitem__)
    if not last:
        for pack in by_cost:
            window = [lengths[number] for number in left[:WINDOW]]
            for place in reversed(exact_fit(window, rooms[pack], lambda: False)):
                put(left.pop(place), pack)
        by_cost.sort(key=spent.__getitem__)
    return [packs[pack] for pack in reversed(by_cost)], left


def _leave_none_empty(steps: list[Step]) -> None:
    """A rank without a batch would wait for ever: an empty pack gets a sample of the pack that has most."""
    packs = list(chain.from_iterable(steps))
    for pack in packs:
        if not pack:
            donor = max(packs, key=len)
            if len(donor) < 2:
                samples = sum(map(len, packs))
                raise ValueError(
                    f"{samples} samples do not fill {len(packs)} packs, that is {len(steps)} steps of {len(steps[0])}: "
                    "some pack would be empty; lower packs_per_step, or set drop_last=True"
                )
            pack.append(donor.pop())
