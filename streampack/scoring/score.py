"""`score`: log-likelihoods of many sequences, computed in packs."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, islice, pairwise
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
from streampack.scoring.forward import ForwardPass, Values
from streampack.scoring.prefixes import Tree, lay_out, share_prefixes
from streampack.scoring.requests import OVERLONG, Request, fit, read_request
from streampack.validation import require, require_positive

LOOK_AHEAD = 2048
"""Requests that are read before they are packed: a few hundred packs of short questions."""


@dataclass(slots=True)
class Score:
    """The log-likelihood of one sequence, or of a continuation behind its context.

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
) -> Iterator[Score]:
    """Yield the log-likelihood of each sample, in the order of ``samples``, computed in packs.

    >>> from torchtune.models.llama3 import llama3
    >>> model = llama3(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=64)
    >>> question = [3, 1, 4, 1, 5]
    >>> answers = score(model, [(question, [9, 2]), (question, [6])], max_seq_len=64, progress=False)
    >>> [answer.num_tokens for answer in answers]
    [2, 1]

    Each number is that of a forward pass of the sample alone. Samples that begin alike, such as the answers to one
    question, or questions behind the same examples, share those tokens, which are computed once. The output layer
    computes only the tokens that are asked for.

    With ``torch.distributed``, the ranks share the work, and each yields the scores of all samples; all of them must
    be given the same samples. A model that is sharded (FSDP2) works, too.

    Args:
        model: a torchtune or Hugging Face model, on its device. It is prepared for packing if it was not yet.
        samples: pairs ``(context, continuation)`` of token ids, of which the continuation is scored; mappings with
            these two keys; or samples, as a `Sample` or a mapping with ``tokens`` and ``labels`` or ``input_ids``, of
            which each token with a label is scored but the first. Any iterable, read as the scores are.
        max_seq_len: of a pack, in tokens. More is faster, as far as memory allows, and shares more.
        inputs: of the model, what `prepare_model_for_packing` returned, to choose the attention.
        overlong: for samples of more than ``max_seq_len`` tokens before the last one: ``"error"``; ``"truncate"``
            leaves out tokens at the beginning, and does not score what was to be scored there; ``"windows"`` scores
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
            the window of ``look_ahead`` in which it is have then been scored. With several ranks: for a model of which
            some ranks must compute the same packs, and for ranks with different samples.
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
    share = share_prefix and inputs.why_not_shared(max_seq_len) is None
    scorer = _Scorer(
        ForwardPass(model, inputs),
        max_seq_len=max_seq_len,
        overlong=overlong,
        share=share,
        look_ahead=look_ahead,
    )
    total, rank = len(samples) if isinstance(samples, Sized) else None, 0
    if shared_work:
        sync = shared_sync(timeout=timedelta(seconds=timeout))
        values, rank = scorer.on_ranks(iter(samples), sync), sync.rank
    else:
        values = scorer.alone(iter(samples))
    return _scores(values, per_token=per_token, total=total, shown=progress and rank == 0)


def _scores(values: Iterator[Values], *, per_token: bool, total: int | None, shown: bool) -> Iterator[Score]:
    with progress_bar(total, shown=shown) as advance:
        for logps, greedy in values:
            token_logps = logps if per_token else None
            yield Score(float(logps.sum()), logps.size, bool(greedy.all()), token_logps=token_logps)
            advance(1)


Window = list[list[Request]]  # of samples: for each the requests that answer it


class _Scorer:
    """Reads samples in windows, plans their packs, and scores them.

    Args:
        forward: makes the forward passes.
        max_seq_len: of a pack.
        overlong: see `fit`.
        share: whether several requests may continue one prefix.
        look_ahead: samples of a window.
    """

    def __init__(
        self, forward: ForwardPass, *, max_seq_len: int, overlong: str, share: bool, look_ahead: int
    ) -> None:
        self.forward, self.max_seq_len, self.overlong, self.share = forward, max_seq_len, overlong, share
        self.look_ahead = look_ahead
        self.read = 0  # samples so far

    def alone(self, samples: Iterator[Any]) -> Iterator[Values]:
        """Yield the values of each sample."""
        while window := self._read(samples):
            yield from self._answers(window, self._plan(window))

    def on_ranks(self, samples: Iterator[Any], sync: RankSync) -> Iterator[Values]:
        """Collective: yield the values of each sample; of each round of windows, each rank scores its own."""
        # The ranks of a sharded model make each forward pass together.
        sharded = any(isinstance(each, DTensor) for each in self.forward.model.parameters())
        window: Window = []
        plan: list[list[Tree]] = []

        def read() -> tuple[int, int, int]:
            nonlocal window, plan
            windows = [self._read(samples) for _ in range(sync.world_size)]
            window = windows[sync.rank]
            plan = self._plan(window)
            return sum(map(len, windows)), _digest(windows), len(plan)

        def answer() -> list[Values]:
            values = list(self._answers(window, plan))
            for _ in range(most - len(plan) if sharded else 0):
                self.forward.take_part()
            return values

        while True:
            # Before any of them computes, so that an error of one does not leave the others in a collective of FSDP.
            counts, digests, packs = zip(*sync.gather_results(read, doing="reading samples"), strict=True)
            if len({*digests}) > 1:
                raise ValueError(
                    f"the ranks were given different samples, among numbers {self.read - counts[sync.rank]} to "
                    f"{self.read}; give all ranks the same ones, or set across_ranks=False"
                )
            if not counts[0]:
                return
            most = max(packs)
            for values in sync.gather_results(answer, doing="scoring"):
                yield from values

    def _read(self, samples: Iterator[Any]) -> Window:
        window = []
        for given in islice(samples, self.look_ahead):
            try:
                request = read_request(given, vocab_size=self.forward.vocab_size)
                window.append(fit(request, self.max_seq_len, overlong=self.overlong))
            except ValueError as error:
                raise ValueError(f"sample {self.read}: {error}") from None
            self.read += 1
        return window

    def _plan(self, window: Window) -> list[list[Tree]]:
        trees = share_prefixes(_flat(window), limit=self.max_seq_len, branch=self.share)
        plan = plan_packs([tree.size for tree in trees], self.max_seq_len, strategy="exact_fit")
        return [[trees[span.index] for span in pack] for pack in plan]

    def _answers(self, window: Window, plan: list[list[Tree]]) -> Iterator[Values]:
        """Yield the values of each sample, as soon as those of all before it are known."""
        requests, known = _flat(window), dict[int, Values]()
        ends = accumulate(map(len, window), initial=0)
        waiting = deque(range(*bounds) for bounds in pairwise(ends))  # the requests of each sample
        for pack in [[], *plan]:  # before any pack, there may be samples without requests
            if pack:
                known |= self._compute(pack, requests)
            while waiting and all(number in known for number in waiting[0]):
                parts = [known.pop(number) for number in waiting.popleft()]
                logps, greedy = ([part[i] for part in parts] for i in range(2))
                yield Values(
                    np.concatenate([np.empty(0), *logps]), np.concatenate([np.empty(0, np.bool_), *greedy])
                )

    def _compute(self, pack: list[Tree], requests: Sequence[Request]) -> dict[int, Values]:
        """Return the values of each request of a pack."""
        batch, places = lay_out(pack, requests)
        targets = np.concatenate([requests[number].targets for number in places])
        found = self.forward(batch, np.concatenate([*places.values()]), targets)
        bounds = np.cumsum([each.size for each in places.values()])[:-1]
        return dict(zip(places, map(Values, *(np.split(each, bounds) for each in found)), strict=True))


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
