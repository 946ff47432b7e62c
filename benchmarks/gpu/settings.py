"""The parts of a run, their settings, and the rows of their tables. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.gpu.journal import settings_key

TESTS = "tests"  # the part that runs the tests marked gpu


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all rows of a part share. A row measured with other settings does not count.

    >>> Settings(lengths="flan", max_seq_len=4096).key() == Settings(lengths="orca", max_seq_len=4096).key()
    False
    """

    lengths: str  # a name of benchmarks.lengths; longer samples are cut off at max_seq_len
    max_seq_len: int
    model: str = "1b"  # a name of benchmarks.gpu.model
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

    def key(self) -> str:
        """Return a short hash of all settings."""
        return settings_key(self)


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

# In the order in which they run: first those that the ratios need.
GPU_ROWS = ("padding", "varlen", "ceiling", "stock", "flex", "flattened", "grouped", "flash")
# flex attention cannot train on a CPU.
CPU_ROWS = ("padding", "varlen", "ceiling", "stock", "dense", "flattened", "grouped")

GPU_PARTS: Mapping[str, Settings | None] = {
    TESTS: None,
    **{
        f"{lengths}-{max_seq_len}": Settings(lengths=lengths, max_seq_len=max_seq_len)
        for max_seq_len in (4096, 16_384)
        for lengths in ("flan", "orca", "stack")
    },
}
# Takes seconds: a check that it runs.
CPU_PARTS: Mapping[str, Settings | None] = {
    TESTS: None,
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
    ),
}


def parts_of(device: str) -> Mapping[str, Settings | None]:
    """Return the parts that are run on a device, in order."""
    return CPU_PARTS if device == "cpu" else GPU_PARTS


def rows_of(device: str) -> tuple[str, ...]:
    """Return the rows of each part, in the order in which they run."""
    return CPU_ROWS if device == "cpu" else GPU_ROWS
