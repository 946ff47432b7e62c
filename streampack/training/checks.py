"""Read a config and check it without opening a file: all that is wrong with it, in one list."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from streampack.instantiate import COMPONENT, component_problems
from streampack.training.conditions import LINEAR_LOSS, problems_of
from streampack.training.config import REQUIRED, RunConfig
from streampack.training.multi_dataset import with_dataset

FP8 = "is not in these recipes; set dtype=bf16"
NOT_USED = {
    "context_parallel_dim": "is not in these recipes; streampack_examples.context_parallel shows it",
    "data_parallel_shard_dim": "follows from the ranks; set data_parallel_replicate_dim and tensor_parallel_dim",
    "max_seq_len": "is that of the tokenizer; set tokenizer.max_seq_len",
    "log_level": "is not used; Python's logging decides",
    "memory_efficient_fsdp_wrap": "is not used; name large modules in custom_sharded_layers",
    "enable_fp8_training": FP8, "fp8_recipe_name": FP8,
    "expert_parallel_dim": "is not in these recipes; shard by data_parallel_replicate_dim and tensor_parallel_dim",
    "save_last_epoch_only": "is always so; save_every_n_steps keeps more",
    "activation_offloading_use_streams": "is not used; enable_activation_offloading takes torchtune's default",
    "train_from_scratch": "is not used; streampack.training.weights.random_weights makes a checkpoint to begin from",
}  # fmt: skip
"""Keys that users of torchtune may expect, and what to do about each."""
OPTIONS = ("options", "storage_options")  # arguments of storages, which may hold secrets
OF_OTHERS = dict.fromkeys(
    ("teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio"), "knowledge_distillation_distributed"
) | dict.fromkeys(("ppo_epochs", "policy_model", "reward_and_value_model"), "ppo_full_finetune_single_device")
"""Keys of torchtune's recipes that we have no counterpart of."""


def read_config(config: Any, *, built: Collection[str] | None = None) -> RunConfig:
    """Check a config, OmegaConf's or a plain mapping, and return it as a `RunConfig`. Nothing is built.

    Args:
        config: the config.
        built: keys that the caller uses and whose components it builds; the others may be missing, or need libraries
            that are not installed. None: all.

    Raises:
        ValueError: with a line for each key that is unknown, or has a value that cannot be.
    """
    cfg, problems = checked(config, built=built)
    if cfg is None or problems:
        raise ValueError("\n".join(problems))
    return cfg


def checked(config: Any, *, built: Collection[str] | None = None) -> tuple[RunConfig | None, list[str]]:
    """Return a config as `read_config` does, and what is wrong with it; None where its keys cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[str] = []
    try:
        merged = _merged(config, built, problems)
        plain: dict[str, Any] = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
        cfg = OmegaConf.to_object(OmegaConf.create(merged))
    except OmegaConfBaseException as error:  # because of a key that was removed, if one was
        return None, problems or [_named(error)]
    except ValueError as error:  # of `_merged` or `Validation`
        return None, [*problems, str(error)]
    assert isinstance(cfg, RunConfig)
    for key in plain:
        # Recipes need no more than the name of this loss.
        linear = key == "loss" and isinstance(plain[key], dict) and plain[key].get(COMPONENT) == LINEAR_LOSS
        if (built is None or key in built) and not linear:
            problems += component_problems(plain[key], key)
    problems += problems_of(cfg, built)
    return cfg, list(dict.fromkeys(problems))


def _merged(config: Any, built: Collection[str] | None, problems: list[str]) -> Any:
    """Return a config merged into `RunConfig`; remove what does not fit, and add it to ``problems``."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given, refused = OmegaConf.create(config).copy(), set[str]()
    if not isinstance(given, DictConfig):
        raise ValueError(f"a config is a mapping of keys to values, this is a {type(config).__name__}")
    if other := next((key for key in OF_OTHERS if key in given), None):
        recipe = OF_OTHERS[other]
        raise ValueError(
            f"{other} is of torchtune's recipe {recipe}, for which there is none here; run torchtune's"
        )
    if "datasets" in given or "dataloader" in given:
        given = OmegaConf.create(with_dataset(to_plain(given)))
    for name in REQUIRED:
        if OmegaConf.is_missing(given, name):  # its value is OmegaConf's word for it, ???
            del given[name]
    while True:
        try:
            merged: Any = OmegaConf.merge(OmegaConf.structured(RunConfig), given)
            break
        except OmegaConfBaseException as error:  # it raises at the first
            key = error.full_key or ""
            above, _, last = key.rpartition(".")
            node = OmegaConf.select(given, above) if above else given
            reason = NOT_USED.get(key)
            if reason is None or not _asks_for_nothing(key, node[key]):
                problems.append(_slip(given, key) or _named(error) if reason is None else f"{key} {reason}")
            if not last or node is None or last not in node:
                raise
            refused.add(key)
            del node[last]
    missing = (OmegaConf.missing_keys(merged) | {name for name in REQUIRED if not merged[name]}) - refused
    if missing := missing if built is None else missing & {*built}:
        problems.append(
            f"missing: {', '.join(sorted(missing))}; the keys without a default must be in a config"
        )
    return merged


def _slip(given: Any, key: str) -> str | None:
    """Return a message for a key that belongs into a node of the config, and for text in place of a node; else None."""
    if (known := RunConfig.__dataclass_fields__.get(key)) is not None:
        text = str(known.type).startswith("Node") and isinstance(given[key], str)
        return (
            f"{key}={given[key]!r} is text; write it as a component: {{{COMPONENT}: {given[key]}}}"
            if text
            else None
        )
    for name, node in given.items_ex(resolve=False):
        if isinstance(node, Mapping) and key in node:
            return f"{key} is no key by itself; set {name}.{key}"
    return None


def _asks_for_nothing(key: str, value: Any) -> bool:
    """Return whether torchtune, too, does nothing with this value of a key that is not used here."""
    return value is None or value is False or (key.endswith("_dim") and value in (1, -1))


def _named(error: Any) -> str:
    """Return the first line of an error of OmegaConf's, after its key."""
    return f"{f'{error.full_key}: ' if error.full_key else ''}{str(error).splitlines()[0]}"


def to_plain(config: Any) -> dict[str, Any]:
    """Return a config as plain dicts and lists, with its interpolations resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    if not isinstance(plain, dict):
        raise ValueError(f"a config is a mapping of keys to values, this is a {type(plain).__name__}")
    return {str(key): value for key, value in plain.items()}


def shown(config: Any) -> Any:
    """Return a config, OmegaConf's, for pages and loggers: without what may be secret.

    Values of the environment stay references. The ``options`` of a storage are hidden, and so are the
    ``storage_options`` that other libraries' components take, such as `datasets.load_dataset`.

    >>> config = {"data": {"storage": {"options": {"key": "abc"}}, "paths": "${oc.env:HOME}/a"}, "output_dir": "out"}
    >>> to_plain(shown(config))["data"]
    {'storage': {'options': {'key': '(not shown)'}}, 'paths': '${oc.env:HOME}/a'}
    >>> to_plain(shown({"data": {"storage_options": {"key": "abc"}}, "output_dir": "out"}))["data"]
    {'storage_options': {'key': '(not shown)'}}
    """
    from omegaconf import OmegaConf

    config = OmegaConf.create(config)
    found = OmegaConf.create(without_secrets(OmegaConf.to_container(config, resolve=False)))
    found.output_dir = config.output_dir  # where loggers write
    return found


def without_secrets(node: Any, *, hide: bool = False) -> Any:
    """Return plain values with those of `OPTIONS` replaced, and of the environment escaped for OmegaConf."""
    if isinstance(node, Mapping):
        return {key: without_secrets(value, hide=hide or key in OPTIONS) for key, value in node.items()}
    if isinstance(node, list):
        return [without_secrets(value, hide=hide) for value in node]
    if isinstance(node, str) and "${" in node and ":" in node:  # of a resolver, such as oc.env
        node = re.sub(r"\\*\$\{", r"\\${", node)
    return "(not shown)" if hide else node
