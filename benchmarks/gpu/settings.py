"""The parts of a run, their settings, and the rows of their tables. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

TESTS = "tests"  # the part that runs the tests marked gpu; it has no settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all rows of a part share."""

    lengths: str  # a name of benchmarks.lengths; longer samples are cut off at max_seq_len
    max_seq_len: int
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
    attention: str | None = None  # of prepare_model_for_packing; None: the model is causal over whole rows
    needs: tuple[str, ...] = ()  # any of these packages


# In the order of the table.
ROWS = {
    "padding": Row("padding to the longest", "padded"),
    "grouped": Row("padding, grouped by length", "grouped"),
    "flattened": Row("mini-batch flattened", "flattened", "auto"),
    "stock": Row("torchtune's packs and mask", "stock"),
    "dense": Row("packed, dense", "packed", "dense"),
    "flex": Row("packed, flex", "packed", "flex"),
    "varlen": Row("packed, varlen", "packed", "varlen"),
    "flash": Row("packed, flash", "packed", "flash", ("flash_attn", "flash_attn_interface")),
    "ceiling": Row("ceiling: no boundaries", "wrapped"),
}

GPU_PARTS = {
    f"{lengths}-{max_seq_len}": Settings(lengths=lengths, max_seq_len=max_seq_len)
    for max_seq_len in (4096, 16_384)
    for lengths in ("flan", "orca", "stack")
}
# Takes seconds: a check that it runs.
CPU_PARTS = {
    "flan-256": Settings(
        lengths="flan",
        max_seq_len=256,
        model="tiny",
        tokens_per_step=1024,
        most_places=2048,
        steps=3,
        warmup=1,
        dtype="fp32",
        compile=False,
    )
}


def parts_of(device: str) -> dict[str, Settings | None]:
    """Return the parts that are run on a device, in order."""
    return {TESTS: None, **(CPU_PARTS if device == "cpu" else GPU_PARTS)}


def rows_of(device: str) -> tuple[str, ...]:
    """Return the rows of each part in the order in which they run: first those that the ratios need."""
    attention = "dense" if device == "cpu" else "flex"  # which cannot train on a CPU
    rows = ("padding", "varlen", "ceiling", "stock", attention, "flattened", "grouped")
    return rows if device == "cpu" else (*rows, "flash")
