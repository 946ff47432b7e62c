"""A first run: train a small llama from scratch on the standard library's docstrings, streamed and packed.

    python -m streampack_recipes.quickstart [KEY=VALUE ...] [--traceback]

Runs the ``full_finetune`` recipe on ``configs/quickstart.yaml``, each time in a new folder under its ``output_dir``.
At the end, it prints how many tokens padded mini-batches of the same samples would have had.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from streampack_recipes import stdlib_corpus

NEXT = """
What to try next:
  see the run                open {report} in a browser
  pack as torchtune does     python -m streampack_recipes.quickstart data.strategy=next_fit, and compare the padding
  never cut a long sample    python -m streampack_recipes.quickstart data.overlong=split
  your own data              streampack cp quickstart my.yaml, edit it, and
                             tune run streampack_recipes/full_finetune --config my.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Train. ``argv``: overrides of the config, and ``--traceback`` to see where an error was raised."""
    # On a busy machine, threads that spin while they wait make a step of two threads several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    stdlib_corpus.prepare()

    import streampack_configs
    from omegaconf import OmegaConf
    from streampack_recipes.full_finetune import train

    from streampack.training.entry import shown_errors, with_overrides

    overrides = [word for word in argv if word != "--traceback"]
    with shown_errors(tracebacks="--traceback" in argv):
        written = OmegaConf.load(Path(streampack_configs.__path__[0]) / "quickstart.yaml")
        config = with_overrides(written, overrides)
        if not any(word.startswith("output_dir=") for word in overrides):
            base = Path(config.output_dir)
            numbers = [int(path.name[4:]) for path in base.glob("run-*") if path.name[4:].isdecimal()]
            config.output_dir = str(base / f"run-{max(numbers, default=0) + 1:03d}")
        print(packed_and_padded(config, steps=train(config)["step"]))
    print(NEXT.format(report=Path(config.output_dir, "report.html")))
    return 0


def packed_and_padded(config: Any, *, steps: int) -> str:
    """Count the tokens of a run's packs, and of padded mini-batches of the same samples; draw the first packs.

    Reads the packs that the run trained once more, without a model. A mini-batch is padded to its longest sample, and
    its samples are drawn at random, as a shuffling DataLoader does.
    """
    import torch

    from streampack.inspection.packs import LEGEND, draw_packs, view
    from streampack.instantiate import build
    from streampack.packing.batch import unstack_packs
    from streampack.training.checks import read_config
    from streampack.training.data import build_datasets, build_loader
    from streampack.training.world import World

    cfg = read_config(config)
    train = build_datasets(cfg, tokenizer=build(cfg.tokenizer), vocab_size=None, world=World()).train
    loader = build_loader(cfg, train, device=torch.device("cpu"))
    batches = list(islice(loader, steps * loader.batches_per_step))
    packs = [pack for batch in batches for pack in unstack_packs(batch)]
    lengths = [each.stop - each.start for pack in packs for each in pack.fragments]
    random.Random(0).shuffle(lengths)
    packed = sum(batch.tokens.numel() for batch in batches)
    like_packed = max(1, round(len(lengths) * cfg.batch_size / max(1, len(packs))))
    small, large = (padded_tokens(lengths, batch_size=size) for size in (cfg.batch_size, like_packed))
    views = [view(pack, train.lane_config) for pack in packs[:4]]
    return (
        f"\nTokens through the model for the {len(lengths):,} samples trained, {sum(lengths):,} of them real:\n"
        f"  packed                              {packed:>12,}\n"
        f"  padded, mini-batches of {cfg.batch_size:<3}         {small:>12,}   {small / packed:.1f} times as many\n"
        f"  padded, mini-batches of {like_packed:<3}         {large:>12,}   {large / packed:.1f} times as many; "
        f"{cfg.batch_size} packs hold {like_packed} samples\n"
        f"\nThe first packs, one a line; {LEGEND}:\n{draw_packs(views, width=96, colour=sys.stdout.isatty())}"
    )


def padded_tokens(lengths: Sequence[int], *, batch_size: int) -> int:
    """Return the tokens of mini-batches of consecutive samples, each padded to its longest.

    >>> padded_tokens([5, 2, 3, 1], batch_size=2)
    16
    """
    groups = (lengths[first : first + batch_size] for first in range(0, len(lengths), batch_size))
    return sum(max(group) * len(group) for group in groups)


def corpus_file(name: str) -> str:
    """Return the path of a file that `stdlib_corpus.prepare` makes, for configs; make it first if need be."""
    return str(stdlib_corpus.prepare().folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
