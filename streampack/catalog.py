"""The project's recipes, configs and examples by name, and the error message for an unknown name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from streampack.validation import did_you_mean

RECIPES: dict[str, tuple[str, ...]] = {
    "full_finetune": ("quickstart",),
    "lora_finetune": ("lora_quickstart", "llama3_2/1B_lora_streamed"),
    "dpo": ("dpo_quickstart", "llama3_2/1B_lora_dpo"),
    "pretrain": ("pretrain_quickstart", "llama3_2/1B_pretrain_bucket"),
}
"""Every recipe, and the configs made for it. The table is written by hand, because finding them would mean importing
recipes; `tests/test_cli.py` compares it with the folders."""

EXAMPLES = ("chat_sft", "vision_sft", "hf_trainer", "trl_sft", "torchtitan_packs", "context_parallel")
"""Scripts to copy: ``python -m streampack_examples.chat_sft`` runs one as it is."""

NOT_LISTED = "neither a name that `streampack ls` lists"
"""The beginning of a rule for `unknown`, which goes on with "nor ..."."""


class UsageError(ValueError):
    """Raised for a command line that cannot be carried out; the message says what can."""


def our_files() -> dict[str, Path]:
    """Return the file of every recipe, config and example of ours, by name."""
    recipes, configs = folder_of("streampack_recipes"), folder_of("streampack_configs")
    files = {name: recipes / f"{name}.py" for name in RECIPES}
    files |= {name: configs / f"{name}.yaml" for names in RECIPES.values() for name in names}
    examples = folder_of("streampack_examples")
    return files | {name: examples / f"{name}.py" for name in EXAMPLES}


def config_file(config: str) -> Path:
    """Return the YAML file of a config that is given by its name or path."""
    path = our_files().get(config, Path(config))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        names = [name for configs in RECIPES.values() for name in configs]
        raise UsageError(unknown("config", config, names, rule=f"{NOT_LISTED} nor a YAML file"))
    return path


def folder_of(package: str) -> Path:
    """Return the folder that a package of ours is installed in."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"package {package} is not installed; install streampack again, with pip")
    return Path(spec.submodule_search_locations[0])


def unknown(kind: str, value: str, known: Iterable[str], *, rule: str) -> str:
    """Return the error message for an unknown name: the rule, and the known name closest to it.

    >>> unknown("config", "quikstart", ["quickstart"], rule="`streampack ls` lists them")
    "unknown config 'quikstart': `streampack ls` lists them; did you mean 'quickstart'?"
    """
    return f"unknown {kind} {value!r}: {rule}{did_you_mean(value, (name for name in known if name != value))}"
