"""`score`: log-likelihoods of many sequences, computed in packs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from streampack.attention import Inputs, prepare_model_for_packing
from streampack.attention.calls import inputs_of
from streampack.attention.torchtune import TorchtuneInputs
from streampack.attention.transformers import TransformersInputs
from streampack.distributed.rank_sync import RankSync, shared_sync
from streampack.scoring.forward import ForwardPass, Values
from streampack.scoring.pack import lay_out, null_batch, plan_requests
from streampack.scoring.requests import OVERLONG, Request, fit, read_request
from streampack.streaming.consumers import model_parallel_warning
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
    if inputs is None:
        found = inputs_of(model)
        prepared = isinstance(found, TorchtuneInputs | TransformersInputs)
        inputs = found if prepared else prepare_model_for_packing(model)  # type: ignore[assignment]
    assert inputs is not None
    inputs.require_length(max_seq_len)
    share = share_prefix and inputs.why_not_shared(max_seq_len) is None
    scorer = _Scorer(
        ForwardPass(model, inputs),
        max_seq_len=max_seq_len,
        overlong=overlong,
        share=share,
        look_ahead=look_ahead,
    )
    if not shared_work:
        return _scores(
            scorer.alone(iter(samples)), per_token=per_token, total=_count(samples), shown=progress
        )
    sync = shared_sync(timeout=timedelta(seconds=timeout))
    values, shown = scorer.on_ranks(iter(samples), sync), progress and sync.rank == 0
    return _scores(values, per_token=per_token, total=_count(samples), shown=shown)


def _scores(values: Iterator[Values], *, per_token: bool, total: int | None, shown: bool) -> Iterator[Score]:
    with progress_bar(total, shown=shown) as advance:
        for logps, greedy in values:
            yield Score(
                float(logps.sum()), logps.size, bool(greedy.all()), token_logps=logps if per_token else None
            )
            advance(1)


class _Plan:
    """The packs of a window of samples, and where their answers belong.

    Args:
        window: for each sample the requests that answer it.
        max_seq_len: of a pack.
        share: whether several requests may continue one prefix.
    """

    def __init__(self, window: Sequence[Sequence[Request]], *, max_seq_len: int, share: bool) -> None:
        self.samples = window
        self.owners = [number for number, requests in enumerate(window) for _ in requests]
        self.requests = [request for requests in window for request in requests]
        self.packs = plan_requests(self.requests, max_seq_len=max_seq_len, share=share)

    def answers(self, forward: ForwardPass) -> Iterator[Values]:
        """Yield the values of each sample, as soon as those of all before it are known."""
        found: list[Values | None] = [None] * len(self.requests)
        missing = [len(requests) for requests in self.samples]
        sample = request = 0  # the next ones to yield
        for pack in [None, *self.packs]:
            if pack is not None:
                laid = lay_out(pack, self.requests)
                for asked, values in zip(laid.asked, forward(laid), strict=True):
                    found[asked.number] = values
                    missing[self.owners[asked.number]] -= 1
            while sample < len(missing) and not missing[sample]:
                end = request + len(self.samples[sample])
                yield _joined([values for values in found[request:end] if values is not None])
                found[request:end] = [None] * (end - request)
                sample, request = sample + 1, end


class _Scorer:
    """Reads samples in windows and scores them.

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
            yield from self._plan(window).answers(self.forward)

    def on_ranks(self, samples: Iterator[Any], sync: RankSync) -> Iterator[Values]:
        """Collective: yield the values of each sample; in each round, each rank scores a window."""
        # The ranks of a sharded model make each forward pass together.
        sharded = any(isinstance(each, DTensor) for each in self.forward.model.parameters())
        plan = self._plan([])

        def read() -> tuple[int, int, int]:
            nonlocal plan
            windows = [self._read(samples) for _ in range(sync.world_size)]
            plan = self._plan(windows[sync.rank])
            return sum(map(len, windows)), _digest(windows), len(plan.packs)

        def answer() -> list[Values]:
            values = list(plan.answers(self.forward))
            for _ in range(most - len(plan.packs) if sharded else 0):
                self.forward.take_part(null_batch())
            return values

        while True:
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

    def _plan(self, window: Sequence[Sequence[Request]]) -> _Plan:
        return _Plan(window, max_seq_len=self.max_seq_len, share=self.share)

    def _read(self, samples: Iterator[Any]) -> list[list[Request]]:
        """Read the next samples, each as the requests that answer it."""
        window = []
        for given in islice(samples, self.look_ahead):
            try:
                request = read_request(given, vocab_size=self.forward.vocab_size)
                window.append(fit(request, self.max_seq_len, overlong=self.overlong))
            except ValueError as error:
                raise ValueError(f"sample {self.read}: {error}") from None
            self.read += 1
        return window


def _joined(parts: Sequence[Values]) -> Values:
    """Return the values of a sample from those of its requests; none if nothing of it is scored."""
    if len(parts) == 1:
        return parts[0]
    logps = [part.logps for part in parts]
    greedy = [part.greedy for part in parts]
    return Values(np.concatenate([np.empty(0), *logps]), np.concatenate([np.empty(0, np.bool_), *greedy]))


def _digest(windows: Iterable[Sequence[Sequence[Request]]]) -> int:
    """Return a number that other samples are unlikely to have."""
    crc = 0
    for window in windows:
        for requests in window:
            crc = zlib.crc32(b"sample", crc)
            for request in requests:
                for array in (request.tokens, request.predictors, request.targets):
                    crc = zlib.crc32(array.astype(np.int64).tobytes(), crc)
    return crc


def _count(samples: Any) -> int | None:
    return len(samples) if isinstance(samples, Sized) else None


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
