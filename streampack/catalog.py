"""Recipes, configs and examples by name, and the words by which a command line names a config."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from streampack.instantiate import trust

RECIPES: dict[str, tuple[str, ...]] = {
    "full_finetune": ("quickstart", "pretrain_quickstart", "llama3_2/1B_pretrain_bucket"),
    "lora_finetune": ("lora_quickstart", "llama3_2/1B_lora_streamed"),
    "dpo": ("dpo_quickstart", "llama3_2/1B_lora_dpo"),
}
"""Every recipe, and our configs for it. The table is written by hand, because finding them would mean importing
recipes; `tests/test_cli.py` compares it with the folders."""
STOCK = {
    "ppo": None,
    "KD": None,
    "dpo": "dpo",
    "lora": "lora_finetune",
    "dora": "lora_finetune",
    "full": "full_finetune",
}
"""Our recipe for a config of torchtune's, by the first of these words in its name."""
EXAMPLES = (
    "chat_sft", "vision_sft", "hf_trainer", "trl_sft", "torchtitan_packs", "context_parallel", "prepacked_prefill",
)  # fmt: skip
"""Scripts to copy: ``python -m streampack_examples.chat_sft`` runs one as it is."""


class UsageError(ValueError):
    """Raised for a command line that cannot be carried out; the message says what can."""


def scripts(package: str = "streampack_recipes", names: Iterable[str] = RECIPES) -> dict[str, Path]:
    """Return the files of our recipes by name, or those of ``names`` in another package."""
    return {name: Path(str(files(package) / f"{name}.py")) for name in names}


def configs() -> dict[str, Path]:
    """Return the files of configs by name: of ours and, where torchtune is installed, of its own."""
    names = [name for listed in RECIPES.values() for name in listed]
    return stock_configs() | {name: Path(str(files("streampack_configs") / f"{name}.yaml")) for name in names}


@cache
def stock_configs() -> dict[str, Path]:
    """Return the files of torchtune's configs by name, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parents[1] / "recipes" / "configs"
    paths = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def recipe_for(config: str) -> str | None:
    """Return our recipe for a config's name; None for a path, and for a config that no recipe runs.

    >>> recipe_for("dpo_quickstart"), recipe_for("my.yaml")
    ('dpo', None)
    """
    if listed := [recipe for recipe, names in RECIPES.items() if config in names]:
        return listed[0]
    known = [recipe for word, recipe in STOCK.items() if word in config]
    return known[0] if known and config in stock_configs() else None


def file_of(kind: str, name: str, known: Mapping[str, Path]) -> Path:
    """Return the file of a name, or else the file at a path: torchtune looks in this order, too."""
    path = known.get(name, Path(name))
    if not path.is_file():
        close = " or ".join(map(repr, difflib.get_close_matches(name, known)))
        meant = f"; did you mean {close}?" if close else ""
        raise UsageError(f"unknown {kind} {name!r}: no name that `streampack ls` shows, and no file{meant}")
    return path


def ls(options: argparse.Namespace) -> None:
    """List recipes, configs and examples."""
    print(f"{'RECIPE':<20} CONFIG")
    for recipe, names in RECIPES.items():
        stock = [name for name in stock_configs() if recipe_for(name) == recipe]
        kinds = ", ".join(f"*{word}*" for word, runs in STOCK.items() if runs == recipe)
        listed = [f"{len(stock)} of torchtune's: {kinds}, such as {min(stock, key=len)}"] if stock else []
        for config in (*names, *listed):
            print(f"{recipe:<20} {config}")
    print("\nEXAMPLE", *EXAMPLES, sep="\n")


def cp(options: argparse.Namespace) -> None:
    """Copy a recipe, a config or an example, to make it yours.

    streampack cp quickstart my.yaml
    streampack cp llama3_2/1B_full my.yaml
    """
    known = configs() | scripts() | scripts("streampack_examples", EXAMPLES)
    source = file_of("recipe, config or example", options.name, known)
    destination: Path = options.destination
    if destination.is_dir():
        destination /= source.name
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if destination.exists() and not options.force:
        raise UsageError(f"{destination} exists; name another destination, or add --force to overwrite it")
    if not destination.parent.is_dir():
        raise UsageError(f"there is no folder {destination.parent}; make it, or name another")
    shutil.copyfile(source, destination)
    print(f"copied to {destination}")


def require_installed(library: str, extra: str) -> None:
    """Raise UsageError without a library, which an extra brings."""
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"this needs {library}, which is not installed: pip install 'streampack[{extra}]'")


def add_config_words(
    parser: argparse.ArgumentParser, *, overrides: str = "KEY=VALUE", required: bool = False
) -> None:
    """Add the arguments by which commands and recipes take a config."""
    word = parser.add_argument
    word("--config", required=required, help="a name that `streampack ls` shows, or a YAML file")
    text = "replaces a value of the config; ~KEY removes it"
    word("overrides", nargs="*", metavar=overrides, help=text)
    text = "a package or module, installed or in the working directory, that the config may name"
    word("--trust", metavar="NAME", type=_trusted, help=text)


def _trusted(name: str) -> None:
    try:
        trust([name])  # by a variable, which processes inherit
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
