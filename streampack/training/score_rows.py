"""Score the rows of a config's source, and write the results beside them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchtune import training

from streampack.attention.prepare import Inputs, prepare_model_for_packing
from streampack.fingerprint import digest, plain
from streampack.instantiate import build
from streampack.packing.encoders import TokensEncoder
from streampack.packing.groups import Group
from streampack.packing.settings import Packing
from streampack.scoring.forward import ForwardPass
from streampack.scoring.journal import open_journal, require_suffix
from streampack.scoring.requests import OVERLONG, fit, read_request
from streampack.scoring.score import Score, score
from streampack.sources.bad_records import quarantine_for
from streampack.sources.corpus_identity import fingerprint_of
from streampack.sources.reading import BadRecord, Reading
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.run_identity import encoder_identity
from streampack.tokenize.tokenize import from_config
from streampack.training.config import RunConfig, read_config, to_plain
from streampack.training.devices import pick_device
from streampack.training.isolation import verify_isolation
from streampack.training.model import build_model, has_adapters, seed_step
from streampack.training.world import World, join_world
from streampack.types import Row, Sample
from streampack.validation import require, require_positive

FLUSH_EVERY = 1.0
"""Seconds of work that a kill may undo."""


@dataclass
class Totals:
    """What was scored, in all jobs that wrote to a file."""

    rows: int = 0
    tokens: int = 0
    logp: float = 0.0
    seconds: float = field(default_factory=time.perf_counter)

    def add(self, result: Mapping[str, Any], prefix: str) -> None:
        """Count a line of the result."""
        self.rows += 1
        tokens = result[f"{prefix}num_tokens"]
        if isinstance(tokens, list):
            self.tokens += sum(tokens)
            self.logp += sum(result[f"{prefix}logps"])
        else:  # a column `logps` is the row's own
            self.tokens += tokens
            self.logp += result[f"{prefix}logp"]

    def text(self, out: Path, kept: int) -> str:
        """Return the last line that the command prints."""
        if not self.tokens:
            return (
                f"{out}: {self.rows:,} rows, and nothing of them was scored: no label is trained; look at the labels, "
                "and at the roles of messages (only the assistant's are)"
            )
        per_token = self.logp / self.tokens
        perplexity = math.exp(min(-per_token, 700.0)) if not math.isnan(per_token) else math.nan
        again = f", {kept:,} of them by an earlier job" if kept else ""
        return (
            f"{out}: {self.rows:,} rows{again}; {self.tokens:,} scored tokens, {per_token:.4f} nats a token "
            f"(perplexity {perplexity:.4g}); {time.perf_counter() - self.seconds:.1f} s"
        )


class _Waiting(NamedTuple):
    """A row whose scores are not known yet."""

    columns: Mapping[str, Any]
    answers: int  # scores that belong to it
    is_group: bool = False
    error: str | None = None  # why it has none


def score_rows(
    config: Any,
    *,
    out: Path,
    model: str | None = None,
    overlong: str = "error",
    per_token: bool = False,
    with_rows: bool = True,
    prefix: str = "",
) -> str:
    """Write the log-likelihood of the trained tokens of each row of ``data.source``, in the order of the source.

    Every rank that torchrun started calls this; rank 0 writes. An unfinished job of the same settings is continued.

    Args:
        config: of a run, OmegaConf's or a plain mapping. With a ``model``, only ``tokenizer`` and ``data`` are needed.
        out: the file, JSON lines or Parquet. While it is written, the rows are in a folder beside it.
        model: a folder (or a name on the Hub) of a Hugging Face model, instead of the config's.
        overlong: see `streampack.score`.
        per_token: whether to write the log-probability of each scored token.
        with_rows: whether to write the columns of the rows, too.
        prefix: of the names of the columns that are added.

    Returns:
        A line about what was scored; an empty text on other ranks than 0.

    Raises:
        ValueError: for a config, a row or a file that does not fit. The rows before it are kept for the next call.
    """
    require(overlong, "overlong", OVERLONG)
    require_suffix(out)
    values = to_plain(config)
    run = None if model is not None else read_config(values)
    device = pick_device(str(values.get("device", "auto")))
    timeout = float(values.get("collective_timeout", RunConfig.collective_timeout))
    with join_world(device, timeout=timeout) as world, ExitStack() as held:
        with world.main_first():
            rows = _Rows(values, overlong=overlong, with_rows=with_rows, prefix=prefix)
        # First, because a model may take minutes to load.
        journal = None
        with world.raise_on_all():
            if world.is_main:
                settings = _settings(values, rows, model=model, overlong=overlong, per_token=per_token)
                journal = held.enter_context(open_journal(out, settings=settings))
        rows.done = world.broadcast(journal.kept if journal else 0)
        scored, inputs = _load(run, values, model=model, device=device, world=world)
        rows.vocab_size = ForwardPass(scored, inputs).vocab_size
        totals = Totals()
        for result in journal.rows() if journal else ():
            totals.add(result, prefix)
        results = score(
            scored,
            rows,
            max_seq_len=rows.max_seq_len,
            inputs=inputs,
            overlong=overlong,
            per_token=per_token,
            timeout=timeout,
        )
        written = time.perf_counter()
        for result in rows.results(results):
            if journal is None:
                continue
            journal.write(result)
            totals.add(result, prefix)
            if time.perf_counter() - written > FLUSH_EVERY:
                journal.flush()
                written = time.perf_counter()
        if journal is None:
            return ""
        kept = journal.kept
        journal.finish()
        return totals.text(out, kept)


class _Rows:
    """The rows of a config's source, as samples to score, and as lines of the result.

    Args:
        values: the config.
        overlong: see `streampack.score`.
        with_rows: whether lines have the columns of the rows.
        prefix: of the names of the other columns.
    """

    def __init__(self, values: Mapping[str, Any], *, overlong: str, with_rows: bool, prefix: str) -> None:
        parts = from_config(values)
        self.source, self.skips = parts["source"], quarantine_for(parts["skip_bad"]) is not None
        self.encode = TokensEncoder() if parts["encoder"] is None else parts["encoder"]
        if self.source.names:
            raise ValueError(
                "data.source is a mixture, whose rows have no order of their own; score each of its sources by itself"
            )
        self.max_seq_len = require_positive(values["data"].get("max_seq_len"), "data.max_seq_len")
        self.overlong, self.with_rows, self.prefix = overlong, with_rows, prefix
        self.vocab_size: int | None = None  # of the model
        self.done = 0  # rows that an earlier job has written
        self._waiting: deque[_Waiting] = deque()

    def __iter__(self) -> Iterator[Sample]:
        """Yield what is to be scored; `results` must be called with the scores."""
        lane = LaneConfig(
            self.source, self.encode, Packing(1, split_across_pack=True), vocab_size=self.vocab_size
        )
        reader = self.source.read(Reading())
        for number in count():
            try:
                row = next(reader, None)
            except BadRecord as error:
                if not self.skips:
                    raise error.unskipped() from error.__cause__
                reader.skip()
                if number >= self.done:
                    self._waiting.append(_Waiting({}, 0, error=str(error)))
                continue
            if row is None:
                return
            if number >= self.done:
                yield from self._answers(row, lane)
            reader.charge([])

    def _answers(self, row: Row, lane: LaneConfig) -> list[Sample]:
        """Return what is to be scored of a row, which waits for the scores."""
        columns = dict(row.data) if self.with_rows else {}
        try:
            sample = lane.sample(row)
            assert isinstance(sample, Sample), "without a quarantine, errors are raised"
            answers = sample.answers() if isinstance(sample, Group) else [sample]
            for answer in answers:
                try:
                    fit(read_request(answer), self.max_seq_len, overlong=self.overlong)
                except ValueError as error:
                    raise ValueError(f"{self.source.locate(row.row_id)}: {error}") from None
        except Exception as error:
            if not self.skips:
                raise
            self._waiting.append(_Waiting(columns, 0, error=f"{type(error).__name__}: {error}"))
            return []
        self._waiting.append(_Waiting(columns, len(answers), is_group=isinstance(sample, Group)))
        return answers

    def results(self, scores: Iterator[Score]) -> Iterator[dict[str, Any]]:
        """Yield the line of each row, from the scores of all samples."""
        known: deque[Score] = deque()
        ended = False
        while not ended:
            try:
                known.append(next(scores))
            except StopIteration:
                ended = True
            while self._waiting and self._waiting[0].answers <= len(known):
                row = self._waiting.popleft()
                yield self._line(row, [known.popleft() for _ in range(row.answers)])
        assert not known, "each score belongs to a row"
        assert not self._waiting, "each row has its scores"

    def _line(self, row: _Waiting, scores: list[Score]) -> dict[str, Any]:
        """Return the columns of a row and its scores."""
        if row.error is not None:
            values: dict[str, Any] = {"logp": 0.0, "num_tokens": 0, "error": row.error}
        elif row.is_group:
            values = {
                "logps": [each.logp for each in scores],
                "num_tokens": [each.num_tokens for each in scores],
                "greedy": [each.greedy for each in scores],
            }
            if scores and scores[0].token_logps is not None:
                values["token_logps"] = [each.token_logps for each in scores]
        else:
            [one] = scores
            values = {"logp": one.logp, "num_tokens": one.num_tokens, "greedy": one.greedy}
            if one.token_logps is not None:
                values["token_logps"] = one.token_logps
        named = {f"{self.prefix}{name}": value for name, value in values.items()}
        if both := sorted(named.keys() & row.columns.keys()):
            raise ValueError(
                f"the rows have a column {both[0]!r}, which would be overwritten; add --prefix TEXT for the names of "
                "the new ones, or --without-rows"
            )
        return {**row.columns, **named}


def _settings(
    values: Mapping[str, Any], rows: _Rows, *, model: str | None, overlong: str, per_token: bool
) -> dict[str, str]:
    """Return all that decides the lines of a result, by name."""
    weights = [values.get("model"), values.get("checkpointer"), values.get("dtype")]
    return {
        "data.source": fingerprint_of(rows.source),
        "data.encoder": digest(encoder_identity(rows.encode, rows.source)),
        "model": model or digest(plain(weights)),
        "overlong": overlong if overlong == "error" else f"{overlong} to {rows.max_seq_len} tokens",
        "per_token": str(per_token),
        "with_rows": str(rows.with_rows),
        "prefix": rows.prefix,
    }


def _load(
    run: RunConfig | None, values: Mapping[str, Any], *, model: str | None, device: torch.device, world: World
) -> tuple[nn.Module, Inputs]:
    """Return the model to score with, on its device, and its inputs."""
    attention = str(values.get("attention", "auto"))
    if run is None:
        from transformers import AutoModelForCausalLM

        assert model is not None
        dtype = training.get_dtype(values["dtype"], device=device) if "dtype" in values else "auto"
        with world.main_first():
            try:
                loaded: nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            except (ValueError, OSError) as error:
                raise ValueError(f"model={model!r} cannot be loaded: {error}") from error
        loaded.to(device).eval()
        return loaded, prepare_model_for_packing(loaded, attention=attention)
    run.compile = run.activation_checkpointing = (
        False  # packs differ in length, and there is no backward pass
    )
    seed_step(run.seed, 0)
    with world.main_first():
        weights = build(run.checkpointer).load_checkpoint()[training.MODEL_KEY]
    built = build_model(run, weights=weights, device=device, world=world, adapters_only=has_adapters(run))
    inputs = prepare_model_for_packing(built, attention=run.attention)
    if run.verify_isolation:
        size = run.data["max_seq_len"]
        shared = inputs.why_not_shared(size) is None
        verify_isolation(built, inputs, max_seq_len=size, world=world, groups=shared)
    return built, inputs
