"""Build objects from the ``_component_`` nodes of a YAML config, nested ones included.

torchtune's ``config.instantiate`` builds one node and passes nested ones on as plain dicts.

A config is data: it can name the components listed in `COMPONENTS` and nothing else. Only the user can add to them,
outside of the config: by ``--trust NAME``, which sets the environment variable `TRUST`.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streampack.validation import did_you_mean, raised_here, wrong_arguments

COMPONENT = "_component_"
TRUST = "STREAMPACK_TRUST"
"""Environment variable: packages or modules whose public classes and functions a config may name, separated by commas.
An environment variable, because processes that a launcher starts inherit it."""

COMPONENTS = {
    r"bitsandbytes\.optim": r"[A-Z]\w+",
    r"streampack": r"\w+(Source|Encoder|Tokenizer|Messages)|Mix|Holdout|Storage|PackedDataset|packed_dataset",
    r"streampack\.losses": r"PreferenceLoss",
    r"streampack\.training\.weights": r"random_weights",
    r"streampack_recipes\.quickstart": r"corpus_file",
    r"torch\.nn": r"CrossEntropyLoss",
    r"torch\.optim": r"[A-Z]\w+",
    r"torch\.optim\.lr_scheduler": r"[A-Z]\w+",
    r"torchao\.optim": r"Adam\w+",
    r"torchtune\.data": r"\w+(ToMessages|Template)|padded_collate\w*",
    r"streampack\.training\.multi_dataset": r"transformed_dataset",
    r"torchtune\.datasets": r"\w+(_d|D)ataset",
    r"torchtune\.datasets\.multimodal": r"\w+_(dataset|transform)",
    r"torchtune\.models\.\w+": r"\w+",
    r"torchtune\.modules\.loss": r"\w+Loss",
    r"torchtune\.modules\.transforms\.tokenizers": r"\w+BaseTokenizer",
    r"torchtune\.rlhf\.loss": r"(DPO|RSO)Loss",
    r"torchtune\.training": r"FullModel\w+Checkpointer|get_cosine_schedule_with_warmup|setup_torch_profiler",
    r"torchtune\.training\.checkpointing": r"FullModel\w+Checkpointer",
    r"torchtune\.training\.quantization": r"Int\w+Quantizer",
    r"torchtune\.training\.lr_schedulers": r"get_cosine_schedule_with_warmup",
    r"torchtune\.training\.metric_logging": r"\w+Logger",
    r"transformers": r"get_(\w+_)?schedule(_\w+)?|Adafactor",
}
"""Patterns of modules, and of the names in them that a config may use."""

UNSAFE_BUILDERS = ("pandas", "iceberg")  # of `datasets`: the first reads pickles, the second imports by name


def build(node: Any, *args: Any, inject: Mapping[str, Any] | None = None) -> Any:
    """Build the object of a node, nested nodes first; ``args`` go to the outermost component.

    Values without a ``_component_`` are returned as they are, with the nodes inside them built. ``inject`` has
    arguments by name (``tokenizer``, ``optimizer``) for components that take them and lack them in the config.

    >>> build({"_component_": "streampack.TokensEncoder", "labels": None}).labels is None
    True

    Raises:
        ValueError: for a path that a config may not name, one that leads nowhere, or arguments that do not fit.
    """
    if isinstance(node, Mapping):
        component = resolve(node[COMPONENT]) if COMPONENT in node else None
        refuse_code(node)
        inner = {key: build(value, inject=inject) for key, value in node.items() if key != COMPONENT}
        if component is None:
            return inner
        asked = list(inspect.signature(component).parameters)[len(args) :]
        arguments = {name: value for name, value in (inject or {}).items() if name in asked} | inner
        for problem in wrong_arguments(component, arguments):
            raise ValueError(f"{node[COMPONENT]}: {problem}")
        try:
            inspect.signature(component).bind(*args, **arguments)
        except TypeError as error:
            raise ValueError(f"{node[COMPONENT]}: {error}; the config has {sorted(arguments)}") from None
        try:
            return component(*args, **arguments)
        except (TypeError, ValueError, OSError) as error:
            if raised_here(error):
                raise
            raise ValueError(f"{node[COMPONENT]}: {error}") from error
    if isinstance(node, list | tuple):
        return [build(value, inject=inject) for value in node]
    return node


@contextmanager
def errors_of(
    key: str, way_out: str = "", *, of_files: str = "", kind: type[Exception] = Exception
) -> Iterator[None]:
    """Raise the errors of components in one line that begins with their key and ends with what to do.

    ``of_files`` is the way out where a file is missing or cannot be read; default: ``way_out``. Errors that are not of
    the ``kind`` stay as they are.
    """
    try:
        yield
    except kind as error:  # of a component, or of a library below it
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        if isinstance(error, KeyError) and " " not in what:
            what = f"there is no {what}"
        elif not isinstance(error, ValueError):
            what = f"{type(error).__name__}: {what}"
        if isinstance(error.__cause__ or error, OSError):
            way_out = of_files or way_out
        raise ValueError(f"{key}: {what}{way_out and '; '}{way_out}") from error


def component_problems(node: Any, where: str) -> Iterator[str]:
    """Yield a message for each component in the node of a key that does not exist, or does not take its arguments.

    Calls nothing. Missing arguments are no problem: recipes add tokenizers, optimizers, ...
    """
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from component_problems(item, f"{where}.{number}")
    if not isinstance(node, Mapping):
        return
    arguments = {key: value for key, value in node.items() if key != COMPONENT}
    try:
        refuse_code(arguments)
        if COMPONENT in node:
            for problem in wrong_arguments(resolve(node[COMPONENT]), arguments):
                yield f"{where}: {node[COMPONENT]}: {problem}"
    except (ValueError, ImportError) as error:
        yield f"{where}: {error}"
    for key, value in arguments.items():
        yield from component_problems(value, f"{where}.{key}")


def resolve(path: str) -> Any:
    """Return the class or function that a dotted path of a config names.

    Raises:
        ValueError: if a config may not name it, or it does not exist.
        ImportError: if a library that it needs is not installed.
    """
    module, _, name = str(path).rpartition(".")
    if not isinstance(path, str) or not all(
        part.isidentifier() and not part.startswith("_") for part in (*module.split("."), name)
    ):
        raise ValueError(
            f"_component_ {path!r} is no public dotted name; write one such as torch.optim.AdamW or my_package.Rows"
        )
    package = module.split(".")[0]
    if trusted := any(f"{path}.".startswith(f"{name}.") for name in trusted_by_user()):
        _find_in_working_directory(package)
    elif not any(re.fullmatch(m, module) and re.fullmatch(n, name) for m, n in COMPONENTS.items()):
        raise ValueError(
            f"_component_ {path!r} is not among the components that a config may name; check the spelling, or if you "
            f"trust {module}, run with --trust {module}"
        )
    found = None
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if not f"{module}.".startswith(f"{missing}.") or (missing == package and not trusted):
            raise ImportError(f"_component_ {path!r} needs {missing}, which is not installed") from error
    if not callable(found):
        there = vars(sys.modules[module]) if found is None and module in sys.modules else ()
        hint = did_you_mean(name, there) or "; check the spelling"
        raise ValueError(f"_component_ {path!r} leads to nothing that can be called{hint}")
    # A module also holds what it imported: my_rows.system may be os.system.
    home = str(getattr(getattr(found, "func", found), "__module__", "")).split(".")[0]
    # torchtune's module of quantizers holds torchao's.
    if home != package and (module, home) != ("torchtune.training.quantization", "torchao"):
        raise ValueError(
            f"_component_ {path!r} is not among the components that a config may name: "
            f"it comes from {home or 'elsewhere'}"
        )
    return found


def refuse_code(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that would make a library run code that they name."""
    for key, value in arguments.items():
        if key == "trust_remote_code" and value:
            raise ValueError(
                "trust_remote_code in a config would run code of the repository's authors; load it in a module of "
                "your own, and name that by --trust"
            )
        if key == "prompt_template" and isinstance(value, str):
            resolve(value)  # torchtune calls whatever it names
        if key in ("source", "dataset") and value in UNSAFE_BUILDERS:
            raise ValueError(
                f"{key}: the builder {value!r} of datasets can run code that its files name; "
                "convert them to parquet, arrow, csv or json"
            )


def trusted_by_user() -> list[str]:
    """Return the packages and modules that the environment variable `TRUST` adds to `COMPONENTS`."""
    return [name for name in re.split(r"[,\s]+", os.environ.get(TRUST, "")) if name]


def trust(names: Iterable[str]) -> None:
    """Add packages or modules to what configs may name, for this process and those that it starts."""
    names = [name for given in names for name in given.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"--trust {name}: this is no name of a package or module, such as my_package.rows"
            )
    os.environ[TRUST] = ",".join(dict.fromkeys([*trusted_by_user(), *names]))


def _find_in_working_directory(package: str) -> None:
    """Put the working directory last on `sys.path` if a package is found nowhere else."""
    here = str(Path.cwd())
    if here not in sys.path and package not in sys.modules and find_spec(package) is None:
        sys.path.append(here)
        invalidate_caches()
