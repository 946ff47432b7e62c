"""Packs of a config or of a past step, printed as text."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

from streampack.inspection.packs import view
from streampack.inspection.run_data import training_data
from streampack.training.config import read_config
from streampack.training.past_steps import packs_of_step
from streampack.training.run_folder import checkpoints_folder


def print_packs(config: Any, *, step: int | None, packs: int | None) -> None:
    """Print the first packs of a config, 2 by default, or at most so many of a step of its run."""
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
        shown = view(pack, dataset.lane_config, whole=True)
        console.print(Text(f"\npack {number}{of}: {len(shown.sequences)} sequences", style="bold cyan"))
        for at, each in enumerate(shown.sequences, start=1):
            source = f"{each.source}, " if each.source else ""
            part = f", from token {each.of_sample[0]:,} on" if each.of_sample[0] else ""
            padding = f", {each.padding:,} of padding" if each.padding else ""
            about = f"{source}{each.place}{part}; {each.length:,} tokens, {each.trained:,} trained{padding}"
            console.print(Text(f"── sequence {at}: {about}", style="cyan"))
            console.print(
                Text.assemble(*((run.text or "", "bold" if run.trained else "dim") for run in each.runs))
            )
        if shown.padding:
            console.print(Text(f"── padding: {shown.padding:,} tokens", style="dim italic"))
    console.print(Text("\nbold is trained, dim is masked, <id> is a special token", style="dim"))
