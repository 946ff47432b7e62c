"""`score`: log-likelihoods of many sequences, computed in packs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from streampack.attention import Inputs
from streampack.attention.prepare import prepared_inputs
from streampack.distributed.rank_sync import RankSync, shared_sync
from streampack.distributed.ranks import model_parallel_warning
from streampack.packing.planner import plan_packs
from streampack.scoring.forward import ForwardPass, Pending, Values
from streampack.scoring.prefixes import Tree, lay_out, share_prefixes
from streampack.scoring.requests import OVERLONG, Request, fit, read_request
from streampack.types import IntArray
from streampack.validation import require, require_positive

LOOK_AHEAD = 2048
"""Requests that are read before they are packed: a few hundred packs of short questions."""


@dataclass(slots=True)
class Score:
    """The log-likelihood of one sequence, or of a continuation after its context.

    Attributes:
        logp: sum of the log-probabilities of the scored tokens, in nats; 0 if there are none.
        num_tokens: how many tokens were scored.
        greedy: whether each of them is the model's most likely one.
        token_logps: of each scored token, ``[num_tokens]`` float64, in nats; None unless they were asked for.
    """

    logp: float
    num_tokens: int
    greedy: bool
    token_logps: npt.NDArray[np.float64] | None = None


class Scores(Iterator[Score]):
    """An iterator over scores, as `score` returns it.

    Attributes:
        summary: one line to print: the attention backend, dtype and device, and why better backends were refused.
    """

    def __init__(self, values: Iterator[Score], summary: str) -> None:
        self._values, self.summary = values, summary

    def __next__(self) -> Score:
        return next(self._values)


def score(
    model: nn.Module,
    samples: Iterable[Any],
    *,
    max_seq_len: int,
    inputs: Inputs | None = None,
    overlong: str = "error",
    share_prefix: bool = True,
    per_token: bool = False,
    look_ahead: int = LOOK_AHEAD,
    across_ranks: bool = True,
    timeout: float = 1800,
    progress: bool = True,
) -> Scores:
    """Return an iterator over the log-likelihood of each sample, in the order of ``samples``, computed in packs.

    >>> from torchtune.models.llama3 import llama3
    >>> model = llama3(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=64)
    >>> question = [3, 1, 4, 1, 5]
    >>> answers = score(model, [(question, [9, 2]), (question, [6])], max_seq_len=64, progress=False)
    >>> [answer.num_tokens for answer in answers]
    [2, 1]

    Each number is that of a forward pass of the sample alone. Samples that begin alike, such as the answers to one
    question, or questions after the same examples, share those tokens, which are computed once. The output layer
    computes only the tokens that are asked for.

    With ``torch.distributed``, the ranks share the work, and each yields the scores of all samples; all of them must
    get the same samples. A model that is sharded (FSDP2) works, too.

    Args:
        model: a torchtune or Hugging Face model, on its device. It is prepared for packing if it was not yet.
        samples: pairs ``(context, continuation)`` of token ids, to score the continuation; mappings with these two
            keys; or samples, as a `Sample` or a mapping with ``tokens`` and ``labels`` or ``input_ids``, to score each
            token with a label but the first. Any iterable, read as the scores are.
        max_seq_len: of a pack, in tokens. More is faster, as far as memory allows, and shares more.
        inputs: of the model, what `prepare_model_for_packing` returned, to choose the attention.
        overlong: for samples of more than ``max_seq_len`` tokens before the last one: ``"error"``; ``"truncate"``
            drops tokens at the beginning, and does not score what was to be scored there; ``"windows"`` scores
            all tokens, each with the context that is in its window of ``max_seq_len`` tokens.
        share_prefix: whether tokens with which samples begin alike are computed once. Models in which they cannot be
            shared compute them for each.
        per_token: whether to keep the log-probability of each token.
        look_ahead: how many samples are read before they are packed. More find more prefixes to share.
        across_ranks: False: each rank has samples of its own, and scores them alone.
        timeout: seconds that a rank waits for the slowest one.
        progress: whether to show a bar, if tqdm is installed.

    Raises:
        ValueError: at the call for arguments that do not fit, or a model that cannot be packed; while it is read for a
            sample that is none, has ids outside the vocabulary or is too long, naming its number; all samples before
            the window of ``look_ahead`` in which it is have then been scored. With several ranks: for a model whose
            ranks must compute the same packs, and for ranks with different samples.
    """
    require_positive(max_seq_len, "max_seq_len")
    require_positive(look_ahead, "look_ahead")
    require(overlong, "overlong", OVERLONG)
    shared_work = across_ranks and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if shared_work and model_parallel_warning(model):
        raise ValueError(
            "the model is split among ranks that must compute the same packs (tensor, pipeline or context "
            "parallelism), and across_ranks=True gives each rank others; set across_ranks=False, and give the ranks of "
            "a group the same samples"
        )
    inputs = inputs or prepared_inputs(model)
    inputs.require_length(max_seq_len)
    forward = ForwardPass(model, inputs)
    windows = _windows(
        samples,
        look_ahead=look_ahead,
        vocab_size=forward.vocab_size,
        max_seq_len=max_seq_len,
        overlong=overlong,
    )
    branch = share_prefix and inputs.why_not_shared(max_seq_len) is None
    plan = partial(_plan, max_seq_len=max_seq_len, branch=branch)
    if shared_work:
        sync = shared_sync(timeout=timedelta(seconds=timeout))
        values, progress = _on_ranks(windows, plan, forward, sync), progress and sync.rank == 0
    else:
        values = (each for window in windows for each in _answers(window, plan(window), forward))
    total = len(samples) if isinstance(samples, Sized) else None
    return Scores(_scores(values, per_token=per_token, total=total, shown=progress), inputs.summary)


def _scores(values: Iterator[Values], *, per_token: bool, total: int | None, shown: bool) -> Iterator[Score]:
    with progress_bar(total, shown=shown) as advance:
        for logps, greedy in values:
            token_logps = logps if per_token else None
            yield Score(float(logps.sum()), logps.size, bool(greedy.all()), token_logps=token_logps)
            advance(1)


Window = list[list[Request]]  # of samples: for each the requests that answer it
Plan = list[list[Tree]]  # of packs


def _windows(
    samples: Iterable[Any], *, look_ahead: int, vocab_size: int | None, max_seq_len: int, overlong: str
) -> Iterator[Window]:
    """Yield windows of ``look_ahead`` samples."""
    numbered = enumerate(samples)
    while True:
        window: Window = []
        for number, given in islice(numbered, look_ahead):
            try:
                request = read_request(given, vocab_size=vocab_size)
                window.append(fit(request, max_seq_len, overlong=overlong))
            except ValueError as error:
                raise ValueError(f"sample {number}: {error}") from None
        if not window:
            return
        yield window


def _plan(window: Window, *, max_seq_len: int, branch: bool) -> Plan:
    trees = share_prefixes(_flat(window), limit=max_seq_len, branch=branch)
    plan = plan_packs([tree.size for tree in trees], max_seq_len, strategy="exact_fit")
    return [[trees[span.index] for span in pack] for pack in plan]


def _answers(window: Window, plan: Plan, forward: ForwardPass) -> Iterator[Values]:
    """Yield the values of each sample, as soon as those of all before it are known."""
    packs, known = _computed(plan, _flat(window), forward), dict[int, Values]()
    numbers = count()
    for sample in window:
        found = [Values(np.empty(0), np.empty(0, np.bool_))]
        for number in islice(numbers, len(sample)):
            while number not in known:
                known |= next(packs)
            found.append(known.pop(number))
        yield Values(*map(np.concatenate, zip(*found, strict=True)))


def _computed(plan: Plan, requests: Sequence[Request], forward: ForwardPass) -> Iterator[dict[int, Values]]:
    """Yield the values of each pack's requests; the host lays out the next pack while the device computes one."""
    started: tuple[dict[int, IntArray], Pending] | None = None
    for pack in (*plan, None):
        before, started = started, None
        if pack is not None:
            batch, places = lay_out(pack, requests)
            targets = np.concatenate([requests[number].targets for number in places])
            started = places, forward(batch, np.concatenate([*places.values()]), targets)
        if before is not None:
            places, pending = before
            bounds = np.cumsum([each.size for each in places.values()])[:-1]
            parts = (np.split(each, bounds) for each in pending.values())
            yield dict(zip(places, map(Values, *parts), strict=True))


def _on_ranks(
    windows: Iterator[Window], plan: Callable[[Window], Plan], forward: ForwardPass, sync: RankSync
) -> Iterator[Values]:
    """Collective: yield the values of each sample; of each round of windows, each rank scores its own."""
    # The ranks of a sharded model make each forward pass together.
    sharded = any(isinstance(each, DTensor) for each in forward.model.parameters())
    window: Window = []
    packs: Plan = []
    done = 0

    def read() -> tuple[int, int, int]:
        nonlocal window, packs
        of_round = [*islice(windows, sync.world_size)]
        window = of_round[sync.rank] if sync.rank < len(of_round) else []
        packs = plan(window)
        return sum(map(len, of_round)), _digest(of_round), len(packs)

    def answer() -> list[Values]:
        values = list(_answers(window, packs, forward))
        for _ in range(most - len(packs) if sharded else 0):
            forward.take_part()
        return values

    while True:
        # Before any of them computes, so that an error of one does not leave the others in a collective of FSDP.
        counts, digests, passes = zip(*sync.gather_results(read, doing="reading samples"), strict=True)
        if len({*digests}) > 1:
            raise ValueError(
                f"the ranks have different samples, among numbers {done} to {done + counts[sync.rank]}; give all "
                "ranks the same ones, or set across_ranks=False"
            )
        if not counts[0]:
            return
        done, most = done + counts[0], max(passes)
        for values in sync.gather_results(answer, doing="scoring"):
            yield from values


def _flat(window: Window) -> list[Request]:
    return [request for requests in window for request in requests]


def _digest(windows: Iterable[Window]) -> int:
    """Return a number that other samples are unlikely to have."""
    requests = [request for window in windows for request in _flat(window)]
    parts = [part for each in requests for part in (each.tokens, each.predictors, each.targets)]
    sizes = np.array([part.size for part in parts], np.int64)
    return zlib.crc32(np.concatenate([sizes, *parts], dtype=np.int64, casting="unsafe").tobytes())


@contextmanager
def progress_bar(
    total: int | None, *, shown: bool, unit: str = "sample"
) -> Iterator[Callable[[int], object]]:
    """Show a bar, if tqdm is installed, and yield what counts more units."""
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda _: None
        return
    with tqdm(total=total, unit=unit, desc="score", mininterval=1.0) as bar:
        yield bar.update
