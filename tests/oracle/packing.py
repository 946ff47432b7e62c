"""References that are slow and obviously right: plain lists, no state, nothing taken from the package.

A strategy is written here as the paper-and-pencil rule: "look at the first ``buffer_size`` unpacked lengths, in
arrival order, and choose". Nothing is pulled, nothing waits, nothing can be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, groupby

IGNORE = -100

Span = tuple[int, int, int]  # (sample, start, stop)
Choose = Callable[[list[int], int], list[int]]


def next_fit(view: list[int], room: int) -> list[int]:
    """The longest prefix that fits."""
    return [i for i in range(len(view)) if sum(view[: i + 1]) <= room]


def first_fit(view: list[int], room: int) -> list[int]:
    """One after the other, whatever fits into what is left."""
    taken: list[int] = []
    for i, length in enumerate(view):
        if sum(view[j] for j in taken) + length <= room:
            taken.append(i)
    return taken


def best_fit(view: list[int], room: int) -> list[int]:
    """Again and again the longest that fits, the earliest of equals."""
    taken: list[int] = []
    while True:
        left = room - sum(view[i] for i in taken)
        fitting = [i for i in range(len(view)) if i not in taken and view[i] <= left]
        if not fitting:
            return sorted(taken)
        taken.append(max(fitting, key=lambda i: (view[i], -i)))


def exact_fit(view: list[int], room: int) -> list[int]:
    """Of all subsets with the fullest sum, the one whose latest member came earliest, then the next latest, ..."""
    subsets = [s for n in range(len(view) + 1) for s in combinations(range(len(view)), n)]
    sums = [sum(view[i] for i in subset) for subset in subsets]
    fullest = max(total for total in sums if total <= room)
    candidates = [subset for subset, total in zip(subsets, sums, strict=True) if total == fullest]
    return list(min(candidates, key=lambda subset: subset[::-1]))


CHOOSE: dict[str, Choose] = {
    "next_fit": next_fit,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "exact_fit": exact_fit,
}
WAYS = (*CHOOSE, "wrap")
"""The ways to fill packs, one word each; ``wrap``: samples continue in the next pack."""


def settings_of(way: str) -> dict[str, object]:
    """Return the settings that a word stands for."""
    return {"split_across_pack": True} if way == "wrap" else {"strategy": way}


def pack(lengths: Sequence[int], limit: int, *, strategy: str, buffer_size: int) -> list[list[int]]:
    """Packs of indices into ``lengths``, none of which is over ``limit``."""
    if strategy == "wrap":
        raise ValueError("wrap cuts; see the function of that name")
    rest = list(range(len(lengths)))
    packs = []
    while rest:
        members = [rest.pop(0)]  # the oldest always goes
        while rest and (room := limit - sum(lengths[i] for i in members)):
            view = rest[:buffer_size]
            chosen = [view[i] for i in CHOOSE[strategy]([lengths[i] for i in view], room)]
            members += chosen
            rest = [i for i in rest if i not in chosen]
            if len(chosen) < len(view):
                break  # something that was looked at stays, so the pack is closed
        packs.append(members)
    return packs


def wrap(lengths: Sequence[int], limit: int) -> list[list[Span]]:
    """All tokens in one line, cut every ``limit``."""
    line = [(i, at) for i, length in enumerate(lengths) for at in range(length)]
    packs = []
    for begin in range(0, len(line), limit):
        spans = []
        for i, members in groupby(line[begin : begin + limit], key=lambda token: token[0]):
            places = [at for _, at in members]
            spans.append((i, places[0], places[-1] + 1))
        packs.append(spans)
    return packs


def pieces(lengths: Iterable[int], limit: int, *, overlong: str, wraps: bool = False) -> list[Span]:
    """What the overlong policy makes of samples, before planning."""
    made: list[Span] = []
    for i, length in enumerate(lengths):
        if length <= limit or (wraps and overlong == "split"):
            made.append((i, 0, length))
        elif overlong == "split":
            made += [(i, at, min(at + limit, length)) for at in range(0, length, limit)]
        elif overlong == "truncate":
            made.append((i, 0, limit))
        elif overlong == "truncate_left":
            made.append((i, length - limit, length))
        else:
            assert overlong == "drop"
    return made


def plan(
    lengths: Sequence[int],
    limit: int,
    *,
    strategy: str,
    buffer_size: int,
    overlong: str = "split",
) -> list[list[Span]]:
    """Packs of ``(sample, start, stop)``: the overlong policy and the strategy together."""
    parts = pieces(lengths, limit, overlong=overlong, wraps=strategy == "wrap")
    sizes = [stop - start for _, start, stop in parts]
    if strategy == "wrap":
        packs = wrap(sizes, limit)
    else:
        packs = [
            [(i, 0, sizes[i]) for i in members]
            for members in pack(sizes, limit, strategy=strategy, buffer_size=buffer_size)
        ]
    return [[(parts[i][0], parts[i][1] + a, parts[i][1] + b) for i, a, b in spans] for spans in packs]


def assemble(
    sequences: Sequence[tuple[list[int], list[int]]], limit: int, padding_idx: int
) -> tuple[list[int], list[int], list[int]]:
    """``(tokens, labels, input_pos)`` of ``(tokens, labels)`` sequences laid end to end, token by token."""
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for ids, targets in sequences:
        for at, (token, label) in enumerate(zip(ids, targets, strict=True)):
            tokens.append(token)
            labels.append(label if at else IGNORE)
            positions.append(at)
    padding = limit - len(tokens)
    return (
        tokens + [padding_idx] * padding,
        labels + [IGNORE] * padding,
        positions + list(range(padding)),
    )


def ledger(
    lengths: Sequence[int],
    limit: int,
    packs: Sequence[Sequence[Span]],
    *,
    overlong: str,
    wraps: bool = False,
) -> dict[str, int]:
    """Where the tokens of ``lengths`` are after ``packs``. ``lengths`` are those of all rows read so far."""
    kept = pieces(lengths, limit, overlong=overlong, wraps=wraps)
    kept_of = [sum(stop - start for i, start, stop in kept if i == sample) for sample in range(len(lengths))]
    packed = sum(stop - start for spans in packs for _, start, stop in spans)
    return {
        "samples": len(lengths),
        "tokens_in": sum(lengths),
        "packs": len(packs),
        "capacity": len(packs) * limit,
        "packed": packed,
        "overlong": sum(n for n, k in zip(lengths, kept_of, strict=True) if k == 0),
        "truncated": sum(n - k for n, k in zip(lengths, kept_of, strict=True) if 0 < k < n),
        "buffered": sum(kept_of) - packed,
    }


def greedy_count(lengths: Iterable[int], limit: int) -> int:
    """How many packs torchtune's ``PackedDataset`` makes without splitting."""
    packs, used = 0, limit
    for length in lengths:
        if used + length > limit:
            packs, used = packs + 1, 0
        used += length
    return packs


def lower_bound(lengths: Iterable[int], limit: int) -> int:
    """The fewest packs any packer could need."""
    return -(-sum(lengths) // limit)


def block_causal_mask(seq_lens: Iterable[int]) -> list[list[bool]]:
    """Who sees whom: ``mask[query][key]``. Give the padding's length too if the row is padded."""
    document = [number for number, length in enumerate(seq_lens) for _ in range(length)]
    return [
        [document[k] == document[q] and k <= q for k in range(len(document))] for q in range(len(document))
    ]
