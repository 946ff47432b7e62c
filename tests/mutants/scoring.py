"""Mutants of scoring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.mutants.registry import mutant, patch_function


@mutant
def greedy_if_likelier_than_all_others() -> None:
    """A continuation counts as greedy if each token is likelier than all others together, not than each of them."""
    from streampack import score

    def make(good: Any) -> Any:
        def scores(*args: Any, per_token: bool = False, **settings: Any) -> Any:
            return (
                replace(
                    each,
                    greedy=bool((each.token_logps > math.log(0.5)).all()),
                    token_logps=each.token_logps if per_token else None,
                )
                for each in good(*args, per_token=True, **settings)
            )

        return scores

    patch_function(score, make)


@mutant
def windows_of_the_last_rank_first() -> None:
    """Ranks that share the work yield the windows of samples of a round from the last rank's on."""
    from streampack import score

    def make(good: Any) -> Any:
        def scores(*args: Any, look_ahead: int = 2048, across_ranks: bool = True, **settings: Any) -> Any:
            found = good(*args, look_ahead=look_ahead, across_ranks=across_ranks, **settings)
            ranks = dist.get_world_size() if across_ranks and dist.is_initialized() else 1
            return found if ranks == 1 else turned(found, look_ahead, ranks)

        return scores

    def turned(found: Iterator[Any], look_ahead: int, ranks: int) -> Iterator[Any]:
        while of_round := list(islice(found, ranks * look_ahead)):
            windows = [of_round[i : i + look_ahead] for i in range(0, len(of_round), look_ahead)]
            yield from chain(*reversed(windows))

    patch_function(score, make)


@mutant
def too_long_samples_cut_in_silence() -> None:
    """``overlong="error"`` truncates, and the score of a long sample is that of its end."""
    from streampack import score

    def make(good: Any) -> Any:
        def scores(*args: Any, overlong: str = "error", **settings: Any) -> Any:
            return good(*args, overlong="truncate" if overlong == "error" else overlong, **settings)

        return scores

    patch_function(score, make)


@mutant
def a_torn_line_counted_as_a_row() -> None:
    """``streampack score`` goes on one row too late: behind a line that a killed job has not written to its end."""
    from streampack.training.score_rows import score_rows

    def make(good: Any) -> Any:
        def rows(*args: Any, out: Path, **settings: Any) -> Any:
            for path in out.parent.glob(f"{out.name}?*/rows*"):
                if lines := [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]:
                    path.write_bytes(b"".join([*lines, lines[-1]]))
            return good(*args, out=out, **settings)

        return rows

    patch_function(score_rows, make)


@mutant
def first_token_of_padded_prompts_masked() -> None:
    """``prefill`` masks the first token of each prompt that has padding, and positions count from the second."""
    from streampack import prefill

    def make(good: Any) -> Any:
        def filled(*args: Any, **settings: Any) -> Any:
            found = good(*args, **settings)
            mask = found["attention_mask"]
            padded = (mask == 0).any(1) & (mask.sum(1) > 1)
            mask[padded, mask[padded].argmax(1)] = 0
            return found

        return filled

    patch_function(prefill, make)
