"""Rows of the table that `make gpu` writes, most valuable first. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

PROBE, TESTS = "probe", "tests"
"""Parts whose rows are backends, and files of tests; those of other parts are in `ROWS`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all rows of a part share."""

    lengths: str  # a name of benchmarks.lengths; longer samples are cut off at max_seq_len
    max_seq_len: int = 4096
    model: Literal["1b", "tiny"] = "1b"
    tokens_per_step: int = 16_384  # real ones, about: the mean over the steps
    # Places of one forward pass. 38 FLAN-like samples, padded, have up to 155,648, and the logits of one are 256 KB:
    # a batch with more places runs in several passes, as users do who would run out of memory.
    most_places: int = 131_072
    steps: int = 20  # timed
    warmup: int = 3
    dtype: Literal["bf16", "fp32"] = "bf16"
    compile: bool = True
    activation_checkpointing: bool = True
    seed: int = 0


class Row(NamedTuple):
    """One way to make batches and keep their samples apart."""

    label: str
    batches: Literal["padded", "grouped", "flattened", "stock", "packed", "wrapped"]
    attention: str | None = None  # a value of BACKENDS or "auto"; None: the model is causal over whole rows


BACKENDS = ("dense", "flex", "varlen", "FA2", "FA3", "FA4")
"""The backends, with ``"flash"`` by each version of flash-attn."""
ROWS = {
    "padding": Row("padding to the longest", "padded"),
    "varlen": Row("packed, varlen", "packed", "varlen"),
    "ceiling": Row("ceiling: no boundaries", "wrapped"),
    "stock": Row("torchtune's packs and mask", "stock"),
    "flattened": Row("mini-batch flattened", "flattened", "auto"),
    "grouped": Row("padding, grouped by length", "grouped"),
    **{name: Row(f"packed, {name}", "packed", name) for name in BACKENDS if name != "varlen"},
}
FIRST, CHOICES, OTHERS = (
    ("padding", "varlen", "ceiling"),
    ("FA2", "FA3", "FA4", "flex"),
    ("stock", "flattened", "grouped", "dense"),
)
PARTS = {lengths: Settings(lengths=lengths) for lengths in ("flan", "orca")}
# Takes seconds: a check that it runs. Flex attention cannot train on a CPU.
CPU_SIZES = {"max_seq_len": 256, "tokens_per_step": 1024, "most_places": 2048, "steps": 3, "warmup": 1}
CPU_PARTS = {"flan": Settings(lengths="flan", model="tiny", dtype="fp32", compile=False, **CPU_SIZES)}  # type: ignore[arg-type]


def plan_of(device: str, tests: list[str]) -> list[tuple[str, str]]:
    """Return the parts and rows to run on a device: correctness, isolation, speed, versions of flash-attn, the rest.

    ``tests`` are the files with tests marked gpu. All of them are skipped on a CPU, so one shows that they run.
    """
    if device == "cpu":
        rows = (*FIRST, "stock", "dense", "flattened", "grouped")
        return [(PROBE, ""), (TESTS, tests[0]), *(("flan", row) for row in rows)]
    isolation = [file for file in tests if file.endswith(("prepared_models.py", "equals_alone.py"))]
    return [
        (PROBE, ""),
        *((TESTS, file) for file in isolation[::-1]),
        *((part, row) for part in PARTS for row in FIRST),
        *(("flan", row) for row in (*CHOICES, *OTHERS)),
        *((TESTS, file) for file in tests if file not in isolation),
    ]
