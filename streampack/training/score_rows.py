"""Score the rows of a config's source, and write them as JSON lines: the command ``streampack score``."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import nn

from streampack.attention.prepare import Inputs, prepare_model_for_packing
from streampack.instantiate import build
from streampack.lanes.lane_config import LaneConfig
from streampack.packing.encoders import TokensEncoder
from streampack.packing.groups import Group
from streampack.packing.pretrained import load_pretrained
from streampack.packing.settings import Packing
from streampack.scoring.forward import ForwardPass
from streampack.scoring.requests import OVERLONG, fit, read_request
from streampack.scoring.score import Score, progress_bar, score
from streampack.sources.bad_records import quarantine_for
from streampack.sources.reading import BadRecord, Reading
from streampack.storage.folders import settle
from streampack.tokenize.tokenize import from_config
from streampack.training.checks import read_config, to_plain
from streampack.training.config import RunConfig
from streampack.training.world import World, join_world, pick_device, pick_dtype
from streampack.types import Row, Sample
from streampack.validation import require, require_positive

ROWS_AT_ONCE = 4096
"""Rows that are scored and written together: the most that a killed job repeats."""


def score_rows(
    config: Any,
    *,
    out: Path,
    model: str | None = None,
    overlong: str = "error",
    per_token: bool = False,
    with_rows: bool = True,
) -> str:
    """Write the log-likelihood of the trained tokens of each row of ``data.source``, in the order of the source.

    Every rank that torchrun started calls this; rank 0 writes ``out``, which appears when it is complete, and returns a
    line about it. A stopped job continues after the last row that it wrote. With a ``model`` of Hugging Face, the
    config needs only ``tokenizer`` and ``data``. For ``overlong`` see `streampack.score`.
    """
    require(overlong, "overlong", OVERLONG)
    if out.suffix != ".jsonl":
        raise ValueError(f"{out} ends in {out.suffix!r}; name a file that ends in .jsonl")
    began, values = time.perf_counter(), to_plain(config)
    run = None if model is not None else read_config(values)
    device = pick_device(str(values.get("device", "auto")))
    timeout = float(values.get("collective_timeout", RunConfig.collective_timeout))
    with join_world(device, timeout=timeout) as world, ExitStack() as held:
        with world.main_first():
            rows = _Rows(values, overlong=overlong, with_rows=with_rows)
        file, kept, unfinished = None, 0, out.with_name(f"{out.name}.unfinished")
        with world.raise_on_all():  # first, because a model may take minutes to load
            if world.is_main:
                if out.exists():
                    raise ValueError(f"{out} exists; name another file, or remove it")
                file = held.enter_context(unfinished.open("a+b"))
                kept = _whole_lines(file)
        kept = world.broadcast(kept)
        scored, inputs = _load(run, values, model=model, device=device, world=world)
        if world.is_main:
            print(inputs.summary, file=sys.stderr, flush=True)  # noqa: T201
        rows.vocab_size = ForwardPass(scored, inputs).vocab_size
        advance = held.enter_context(progress_bar(None, shown=world.is_main, unit="row"))
        reader = rows.read(skip=kept)
        while True:
            with world.raise_on_all():
                some = list(islice(reader, ROWS_AT_ONCE))
            if not some:
                break
            answers = [answer for row in some for answer in row.answers]
            scores = score(
                scored, answers, max_seq_len=rows.max_seq_len, inputs=inputs, overlong=overlong,
                per_token=per_token, look_ahead=max(1, -(-len(answers) // world.size)), timeout=timeout,
                progress=False,
            )  # fmt: skip
            found = [row.line(list(islice(scores, len(row.answers)))) for row in some]
            assert next(scores, None) is None, "each score belongs to a row"
            if file is not None:
                file.write(b"".join(_json(line) for line in found))
                file.flush()
            advance(len(some))
        if file is None:
            return ""
        settle(file, unfinished, out)
        return f"{_totals(out, kept)}; {time.perf_counter() - began:.1f} s"


HF_DTYPES = {
    "auto": "auto", "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
"""The config's ``dtype`` of a model of Hugging Face; by default that of its file."""


class _Row(NamedTuple):
    """A row, and what is scored of it."""

    columns: Mapping[str, Any]
    answers: list[Sample]
    is_group: bool = False
    error: str | None = None  # why nothing is

    def line(self, scores: list[Score]) -> dict[str, Any]:
        """Return the row's columns and its scores."""
        per_token = bool(scores) and scores[0].token_logps is not None
        names = ["logp", "num_tokens", "greedy", *["token_logps"] * per_token]
        each: dict[str, list[Any]] = {name: [getattr(one, name) for one in scores] for name in names}
        if self.error is not None:
            found: dict[str, Any] = {"logp": 0.0, "num_tokens": 0, "error": self.error}
        elif self.is_group:
            found = {"logps": each.pop("logp"), **each}
        else:
            found = {name: value for name, [value] in each.items()}
        if both := sorted(found.keys() & self.columns.keys()):
            raise ValueError(
                f"the rows have a column {both[0]!r}, which would be overwritten; rename it, or add --without-rows"
            )
        return {**self.columns, **found}


class _Rows:
    """The rows of a config's source."""

    def __init__(self, values: Mapping[str, Any], *, overlong: str, with_rows: bool) -> None:
        parts = from_config(values)
        self.source, self.skips = parts["source"], quarantine_for(parts["skip_bad"]) is not None
        self.encode = TokensEncoder() if parts["encoder"] is None else parts["encoder"]
        if self.source.names:
            raise ValueError(
                "data.source is a mixture, whose rows have no order of their own; score each of its sources by itself"
            )
        self.max_seq_len = require_positive(values["data"].get("max_seq_len"), "data.max_seq_len")
        self.overlong, self.with_rows = overlong, with_rows
        self.vocab_size: int | None = None  # of the model

    def read(self, *, skip: int) -> Iterator[_Row]:
        """Yield the rows after the first ``skip`` ones."""
        packing = Packing(1, split_across_pack=True)
        lane = LaneConfig(self.source, self.encode, packing, vocab_size=self.vocab_size)
        reader = self.source.read(Reading())
        for number in count():
            try:
                row = next(reader, None)
            except BadRecord as error:
                if not self.skips:
                    raise error.unskipped() from error.__cause__
                if number >= skip:
                    yield _Row({}, [], error=str(error))
                continue
            if row is None:
                return
            if number >= skip:
                yield self._encoded(row, lane)

    def _encoded(self, row: Row, lane: LaneConfig) -> _Row:
        columns = dict(row.data) if self.with_rows else {}
        try:
            sample = lane.sample(row)
            answers = sample.answers() if isinstance(sample, Group) else [sample]
            for answer in answers:
                try:
                    fit(read_request(answer), self.max_seq_len, overlong=self.overlong)
                except ValueError as error:
                    raise ValueError(f"{self.source.locate(row.row_id)}: {error}") from None
        except Exception as error:
            if not self.skips:
                raise
            return _Row(columns, [], error=f"{type(error).__name__}: {error}")
        return _Row(columns, answers, is_group=isinstance(sample, Group))


def _whole_lines(file: BinaryIO) -> int:
    """Count the lines of a file, and cut off the beginning of one that a killed job left."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{file.name} is written by another process; wait until it ends, or write to another file"
        ) from None
    file.seek(0)
    whole = [len(line) for line in file if line.endswith(b"\n")]
    os.truncate(file.fileno(), sum(whole))
    return len(whole)


def _json(line: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(line, default=_plain, ensure_ascii=False).encode() + b"\n"
    except TypeError as error:
        raise ValueError(
            f"{error}: the result keeps the row's columns, and JSON cannot hold this one; add --without-rows"
        ) from None


def _plain(value: Any) -> Any:
    """Convert what JSON has no form for: arrays, numpy's numbers, and mappings that are no dicts."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def _totals(out: Path, kept: int) -> str:
    """Return what all jobs that wrote a file have scored."""
    rows = tokens = 0
    logp = 0.0
    with out.open("rb") as file:
        for rows, line in enumerate(map(json.loads, file), 1):  # noqa: B007
            is_group = isinstance(line["num_tokens"], list)  # else a column `logps` is the row's own
            tokens += int(np.sum(line["num_tokens"]))
            logp += float(np.sum(line["logps" if is_group else "logp"]))
    if not tokens:
        return (
            f"{out}: {rows:,} rows, and nothing of them was scored: no label is trained; look at the labels, and at "
            "the roles of messages (only the assistant's are)"
        )
    perplexity = math.nan if math.isnan(logp) else math.exp(min(-logp / tokens, 700.0))
    again = f", {kept:,} of them by an earlier job" if kept else ""
    return (
        f"{out}: {rows:,} rows{again}; {tokens:,} scored tokens, {logp / tokens:.4f} nats a token "
        f"(perplexity {perplexity:.4g})"
    )


def _load(
    run: RunConfig | None, values: Mapping[str, Any], *, model: str | None, device: torch.device, world: World
) -> tuple[nn.Module, Inputs]:
    """Return the model to score with, on its device, and its inputs."""
    if run is None:
        from transformers import AutoModelForCausalLM

        assert model is not None
        require(dtype := str(values.get("dtype", "auto")), "dtype", HF_DTYPES)
        with world.main_first():
            loaded: nn.Module = load_pretrained(
                AutoModelForCausalLM, model, what="model", file="config.json",
                settings={"dtype": HF_DTYPES[dtype]},
            )  # fmt: skip
        loaded.to(device).eval()
        return loaded, prepare_model_for_packing(loaded, attention=str(values.get("attention", "auto")))
    from torchtune import training

    from streampack.training.model import build_model, seed_step
    from streampack.training.validate import require_isolation

    # Packs differ in length, and there is no backward pass.
    run.compile = run.enable_activation_checkpointing = False
    run.ac_mode = None
    run.fsdp_cpu_offload &= world.data_size > 1  # a model that is not sharded stays on its device
    run.dtype = pick_dtype(device) if run.dtype == "auto" else run.dtype
    seed_step(run.seed or 0, 0)
    with world.main_first():
        weights = build(run.checkpointer).load_checkpoint()[training.MODEL_KEY]
    built = build_model(run, weights=weights, device=device, world=world)
    inputs = prepare_model_for_packing(built, attention=run.attention)
    if run.verify_isolation:
        size = (run.data or {})["max_seq_len"]
        shared = inputs.why_not_shared(size) is None
        with world.raise_on_all():
            require_isolation(built, inputs, max_seq_len=size, groups=shared)
    return built, inputs
