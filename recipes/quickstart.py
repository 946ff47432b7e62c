"""A first run: train a small llama from scratch on the standard library's docstrings, streamed and packed.

    python -m streampack_recipes.quickstart [KEY=VALUE ...]

Runs the ``full_finetune`` recipe on ``configs/quickstart.yaml``, each time in a new folder under its
``output_dir``. A run that was interrupted goes on from its last checkpoint when this is started again.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from streampack_recipes import stdlib_corpus

NEXT = """
What to try next:
  pack as torchtune does     make quickstart ARGS="data.strategy=next_fit", and compare the padding
  never cut a long sample    make quickstart ARGS="data.overlong=split"
  your own data              streampack cp quickstart my.yaml, edit it, and
                             tune run streampack_recipes/full_finetune --config my.yaml
"""


def main(argv: list[str]) -> int:
    """Train; ``argv`` are overrides of the config, and ``--traceback`` to see where an error was raised."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # says at import that it has no C++ extensions
    # On a busy machine, threads that spin while they wait make a step of two threads several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from streampack.training.errors import shown_errors

    words = [word for word in argv if word != "--traceback"]
    with shown_errors(tracebacks=len(words) < len(argv)):
        _train(words)
    print(NEXT)
    return 0


def _train(overrides: list[str]) -> None:
    stdlib_corpus.prepare()

    import streampack_configs
    from omegaconf import OmegaConf
    from streampack_recipes.full_finetune import train

    from streampack.training.overrides import with_overrides
    from streampack.training.run_folder import Interrupted

    written = OmegaConf.load(Path(streampack_configs.__path__[0]) / "quickstart.yaml")
    config = with_overrides(written, overrides)
    chosen = any(word.startswith("output_dir=") for word in overrides)
    if not chosen:
        config.output_dir, config.resume = _run_folder(Path(config.output_dir))
    try:
        train(config)
    except Interrupted as error:
        if chosen or error.step is None:
            raise
        message = f"interrupted; the same command goes on from step {error.step}"
        raise Interrupted(f"{config.output_dir}: {message}", step=error.step) from None


def _run_folder(base: Path) -> tuple[str, bool]:
    """The newest run if it was interrupted, otherwise a new one."""
    runs = sorted(base.glob("run-*"))
    if runs and (runs[-1] / "checkpoints").is_dir() and not (runs[-1] / "finished.json").is_file():
        print(f"going on with {runs[-1]}, which was interrupted")
        return str(runs[-1]), True
    return str(base / f"run-{len(runs) + 1:03d}"), False


def corpus_file(name: str) -> str:
    """The path of one of the files that `stdlib_corpus.prepare` makes, made first if need be; for configs to name."""
    return str(stdlib_corpus.prepare().folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
