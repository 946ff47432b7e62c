"""Mutants of scoring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch.distributed as dist

from streampack.scoring.forward import ForwardPass
from tests.mutants.registry import replaces


@replaces("streampack:score")
def greedy_if_likelier_than_all_others(good, *args, per_token=False, **settings):
    """A continuation counts as greedy if each token is likelier than all others together, not than each of them."""
    return (
        replace(
            each,
            greedy=bool((each.token_logps > math.log(0.5)).all()),
            token_logps=each.token_logps if per_token else None,
        )
        for each in good(*args, per_token=True, **settings)
    )


@replaces("streampack:score")
def windows_of_the_last_rank_first(good, *args, look_ahead=2048, across_ranks=True, **settings):
    """Ranks that share the work yield the windows of samples of a round from the last rank's on."""
    found = good(*args, look_ahead=look_ahead, across_ranks=across_ranks, **settings)
    ranks = dist.get_world_size() if across_ranks and dist.is_initialized() else 1

    def turned() -> Iterator[Any]:
        while of_round := list(islice(found, ranks * look_ahead)):
            windows = [of_round[i : i + look_ahead] for i in range(0, len(of_round), look_ahead)]
            yield from chain(*reversed(windows))

    return found if ranks == 1 else turned()


@replaces(ForwardPass, "__call__")
def one_pack_at_a_time(good, self, *asked):
    """The host waits for a pack before it lays out the next one, and a GPU idles. No number changes."""
    found = good(self, *asked)
    found.values()
    return found


@replaces("streampack:score")
def too_long_samples_cut_in_silence(good, *args, overlong="error", **settings):
    """``overlong="error"`` truncates, and the score of a long sample is that of its end."""
    return good(*args, overlong="truncate" if overlong == "error" else overlong, **settings)


@replaces("streampack.training.score_rows:score_rows")
def a_torn_line_counted_as_a_row(good, *args, out, **settings):
    """``streampack score`` goes on one row too late: behind a line that a killed job has not written to its end."""
    for path in out.parent.glob(f"{out.name}?*"):
        if lines := [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]:
            path.write_bytes(b"".join([*lines, lines[-1]]))
    return good(*args, out=out, **settings)
