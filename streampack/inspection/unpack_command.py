"""The command ``streampack unpack``: packs of a config or of a past step, decoded."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from typing import Any

from streampack.catalog import UsageError

DESCRIPTION = """\
Show packs as text: the first ones of a config, or those of a step of its run.

  streampack unpack --config my.yaml --packs 3
  streampack unpack --config my.yaml --step 1200

The packs of a step are made again from the newest checkpoint before it, so the data must be those of the run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument("--step", type=int, metavar="N", help="a step of the run in the config's output_dir")
    parser.add_argument("--packs", type=int, metavar="N", help="show at most so many (2; of a step, all)")


def run(options: argparse.Namespace, config: Any) -> int:
    """Print the packs, and return the exit status."""
    if options.packs is not None and options.packs < 1:
        raise UsageError(f"--packs {options.packs} is below 1; give at least 1")
    from streampack.inspection.terminal import require_rich

    require_rich()
    _print(options, config)
    return 0


def _print(options: argparse.Namespace, config: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    from streampack.inspection.decoded import LEGEND, decoded_pack
    from streampack.inspection.run_data import training_data
    from streampack.training.config import read_config
    from streampack.training.past_steps import packs_of_step
    from streampack.training.run_folder import checkpoints_folder

    cfg = read_config(config)
    dataset = training_data(cfg)
    if options.step is None:
        packs = list(islice(dataset.stream(), options.packs or 2))
    else:
        packs = packs_of_step(dataset, checkpoints_folder(cfg), options.step)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for number, pack in enumerate(packs[: options.packs], start=1):
        of = "" if options.step is None else f" of {len(packs)} in step {options.step}"
        console.print(Text(f"\npack {number}{of}: {len(pack.seq_lens)} sequences", style="bold cyan"))
        for line in decoded_pack(pack, dataset.lane_config):
            console.print(line)
    console.print(Text(f"\n{LEGEND}", style="dim"))
