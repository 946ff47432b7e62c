"""What a recipe can be told, as typed fields; a misspelt key is an error and not a silent default."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from streampack.attention import ATTENTIONS
from streampack.components import COMPONENT, resolve
from streampack.methods import METHODS
from streampack.plan import require, require_positive
from streampack.training.loss import LOSS_NORMS

Node = dict[str, Any]

OF_ONE_RECIPE = {
    "save_adapter_weights_only": "lora_finetune",
    "document_masking": "pretrain",
    "z_loss": "pretrain",
}
"""Keys that only one recipe heeds; the others refuse them rather than ignore them."""


@dataclass(kw_only=True)
class RunConfig:
    """One run, as its YAML says it. Nodes with a ``_component_`` stay plain dicts until the recipe builds them."""

    output_dir: str  # checkpoints, weights and logs
    tokenizer: Node
    model: Node
    checkpointer: Node  # torchtune's: where the weights come from, and the format in which they are saved
    optimizer: Node
    data: Node  # source, encoder, the arguments of IterablePackedDataset; or a method, see MethodLoader
    metric_logger: Node
    seed: int = 0
    device: str = "auto"
    dtype: str = "bf16"
    validation: Node | None = None  # share of the rows or source, max_packs, every
    lr_scheduler: Node | None = None
    epochs: int | None = None  # None with max_steps: read on as long as it takes
    max_steps: int | None = None
    batch_size: int = 1  # packs in a forward pass of one rank, at most
    packs_per_step: int | None = (
        None  # packs in an optimizer step, over all ranks; default: a batch of each rank
    )
    num_workers: int = 0  # processes that read, encode and pack, for each rank
    loss_norm: str = "token"  # or "sample": every sample counts the same, however long it is
    clip_grad_norm: float | None = None
    attention: str = "auto"  # or "dense", "flex", "varlen", "flash": see prepare_model_for_packing
    verify_isolation: bool = True  # before the first step: does any sample of a pack see another?
    activation_checkpointing: bool = False
    compile: bool = False
    custom_sharded_layers: list[str] = field(
        default_factory=list
    )  # sharded by themselves, besides the layers
    fsdp_reshard_after_forward: bool = (
        True  # False keeps layers whole until the backward pass: memory for speed
    )
    collective_timeout: float = 600  # seconds that ranks wait for the slowest one
    checkpoint_every: int | None = None  # steps; None: only the final weights
    keep_checkpoints: int = 2
    async_checkpoint: bool = False  # write while training goes on, from a copy in memory
    save_adapter_weights_only: bool = False  # LoRA: leave the merged weights out
    document_masking: bool = (
        True  # pretraining: False lets a token see all before it in its pack, whosever they are
    )
    z_loss: float = 0.0  # pretraining: weight of the squared log-normalizer in the loss; PaLM's was 1e-4
    resume: bool = False  # go on from the newest checkpoint in output_dir, if there is one
    log_every: int = 1  # steps
    profiler: Node | None = None

    def __post_init__(self) -> None:
        for name in (
            "batch_size", "packs_per_step", "epochs", "max_steps", "checkpoint_every", "keep_checkpoints", "log_every"
        ):  # fmt: skip
            if getattr(self, name) is not None:
                require_positive(getattr(self, name), name)
        if self.epochs is None and self.max_steps is None:
            raise ValueError("neither epochs nor max_steps is set; say when the run ends")
        require(self.loss_norm, "loss_norm", LOSS_NORMS)
        require(self.attention, "attention", ATTENTIONS)
        if self.data.get("method") is not None:
            require(self.data["method"], "data.method", METHODS)
        if self.samples_in_row > 1 and not self.document_masking:
            raise ValueError(
                "document_masking=False makes one sequence of the samples that minibatch_packing lays in a row, longer "
                "than data.max_seq_len; choose another data.method"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} is no weight; give 0, or a small number such as 1e-4")
        if not self.collective_timeout > 0:
            raise ValueError(
                f"collective_timeout={self.collective_timeout} is no time to wait; give seconds, at least as many as "
                "the slowest rank may need for a step and a checkpoint"
            )

    @property
    def samples_in_row(self) -> int:
        """How many samples of ``data.max_seq_len`` a row of a batch may hold."""
        return self.batch_size if self.data.get("method") == "minibatch_packing" else 1


def read_config(config: Any, *, recipe: str | None = None) -> RunConfig:
    """A `RunConfig` from what `parse` gives, or from a plain mapping.

    Raises:
        ValueError: for an unknown or a missing key, one that ``recipe`` does not heed, or a value out of range.
    """
    values = to_plain(config)
    problems = _keys(values)
    for key, theirs in OF_ONE_RECIPE.items():
        if key in values and recipe not in (None, theirs):
            problems.append(f"{key} does nothing in the {recipe} recipe; remove it, or run {theirs}")
    if problems:
        raise ValueError("; ".join(problems))
    return RunConfig(**values)


def validate(config: Any) -> list[str]:
    """What is wrong with a config, without building anything: keys, values, and every component's arguments."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = to_plain(config)
    except OmegaConfBaseException as error:
        return [str(error).splitlines()[0]]
    problems = []
    if "data" in values:  # one of ours; for torchtune's own, only the components can be checked
        problems = _keys(values)
        if not problems:
            try:
                RunConfig(**values)
            except ValueError as error:
                problems.append(str(error))
    return problems + [problem for key, node in values.items() for problem in _components(node, key)]


def to_plain(config: Any) -> dict[str, Any]:
    """OmegaConf's containers, interpolations resolved, as plain dicts and lists."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    if not isinstance(plain, dict):
        raise ValueError(f"a config is a mapping of keys to values, this is a {type(plain).__name__}")
    return {str(key): value for key, value in plain.items()}


def _keys(values: Mapping[str, Any]) -> list[str]:
    known = {f.name for f in fields(RunConfig)}
    required = {f.name for f in fields(RunConfig) if f.default is MISSING and f.default_factory is MISSING}
    problems = [f"unknown key {key!r}: {hint_for(key, known)}" for key in values if key not in known]
    problems += [f"missing key {key!r}" for key in sorted(required - set(values))]
    return problems


def hint_for(key: str, known: Collection[str]) -> str:
    """What to write in the place of a key that is not ``known``."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(sorted(known))}"


def _components(node: Any, where: str) -> list[str]:
    if isinstance(node, list):
        return [p for i, item in enumerate(node) for p in _components(item, f"{where}[{i}]")]
    if not isinstance(node, dict):
        return []
    problems = []
    if COMPONENT in node:
        try:
            component = resolve(node[COMPONENT])
            # Partly: the recipe gives tokenizers, optimizers and the like.
            inspect.signature(component).bind_partial(**{k: v for k, v in node.items() if k != COMPONENT})
        except (ValueError, ImportError) as error:
            problems.append(f"{where}: {error}")
        except TypeError as error:
            problems.append(f"{where}: {node[COMPONENT]}: {error}")
    return problems + [p for key, value in node.items() for p in _components(value, f"{where}.{key}")]
