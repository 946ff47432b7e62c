"""Packs of a config or of a past step, printed as text."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

from streampack.inspection.decoded import LEGEND, decoded_pack
from streampack.inspection.run_data import training_data
from streampack.inspection.terminal import require_rich
from streampack.training.config import read_config
from streampack.training.past_steps import packs_of_step
from streampack.training.run_folder import checkpoints_folder


def print_packs(config: Any, *, step: int | None, packs: int | None) -> None:
    """Print the first packs of a config, 2 by default, or at most so many of a step of its run."""
    require_rich()
    from rich.console import Console
    from rich.text import Text

    cfg = read_config(config)
    dataset = training_data(cfg)
    if step is None:
        found = list(islice(dataset.stream(), packs or 2))
    else:
        found = packs_of_step(dataset, checkpoints_folder(cfg), step)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for number, pack in enumerate(found[:packs], start=1):
        of = "" if step is None else f" of {len(found)} in step {step}"
        console.print(Text(f"\npack {number}{of}: {len(pack.seq_lens)} sequences", style="bold cyan"))
        for line in decoded_pack(pack, dataset.lane_config):
            console.print(line)
    console.print(Text(f"\n{LEGEND}", style="dim"))
