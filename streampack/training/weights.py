"""Files of weights: random ones from which a run begins, and those that a run or a checkpoint has: whole, and adapters.

LoRA is by Hu et al., 2021, https://arxiv.org/abs/2106.09685. The layers of LoRA, QLoRA and DoRA are torchtune's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torchtune import training
from torchtune.modules import peft

from streampack.instantiate import build
from streampack.training.checkpoint import load_weights, read_run, step_of
from streampack.training.checks import read_config
from streampack.training.config import RunConfig
from streampack.training.model import build_model, full_weights, seed_step
from streampack.training.run_folder import weights_folders
from streampack.training.world import World

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model"
)  # fmt: skip
"""Files of a tokenizer, in a folder that may hold weights too."""
# Layers that can have adapters, and the weights of an adapter: torchtune's name -> Hugging Face's and PEFT's name.
TARGETS = {
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "output_proj": "self_attn.o_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj",
    "output": "lm_head",
}  # fmt: skip
PARTS = {
    "lora_a.weight": "lora_A.weight", "lora_b.weight": "lora_B.weight", "magnitude": "lora_magnitude_vector",
}  # fmt: skip
# Rotary embeddings that rotate pairs of numbers which lie side by side, and those whose pairs are half a head apart, as
# in Hugging Face's format.
NEIGHBOURS, HALVES = ("RotaryPositionalEmbeddings", "Llama3ScaledRoPE"), ("Qwen2RotaryPositionalEmbeddings",)

log = logging.getLogger(__name__)


def random_weights(model: nn.Module, *, folder: str, beside: Sequence[str] = ()) -> str:
    """Write a model's initial weights to a folder and return it: the ``checkpoint_dir`` of a run from scratch.

    torchtune's checkpointers read files only. In a config::

        checkpointer:
          _component_: torchtune.training.FullModelTorchTuneCheckpointer
          checkpoint_dir:
            _component_: streampack.training.weights.random_weights
            model: ${model}
            folder: ${output_dir}
          checkpoint_files: [model.bin]
          model_type: LLAMA3
          output_dir: ${output_dir}

    The recipe's ``seed`` decides the weights. The folder is named by a digest of them, and gets that name when it is
    complete. So equal weights are written once, even by several processes.

    Args:
        model: the model, in a config the node of the model to train.
        folder: where to write the weights; made if it does not exist. All machines of a run must see it.
        beside: files to copy to the same folder, such as a tokenizer. torchtune copies them to the trained weights.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".random-", dir=base))
    try:
        torch.save(model.state_dict(), part / "model.bin")
        with (part / "model.bin").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        for path in beside:
            shutil.copy(path, part)
        made = base / f"random-{digest[:12]}"
        try:
            part.rename(made)
        except OSError:  # another process or an earlier run has written the folder
            if not made.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(made)


def export(checkpoint: Path, *, config: Any, out: Path) -> dict[str, Path]:
    """Write the weights of a running checkpoint as a recipe writes its final ones; return the folders.

    The run may continue meanwhile: nothing in its folder is changed. The model is built on the CPU.
    """
    step_of(checkpoint)
    cfg = read_config(config)
    if out.resolve() in (
        Path(folder).resolve() for folder in (cfg.output_dir, cfg.checkpointer["output_dir"])
    ):
        raise ValueError(f"{out} is where the run itself writes its weights; choose another folder")
    cfg.output_dir = cfg.checkpointer["output_dir"] = str(out)
    if held := weights_folders(cfg):
        raise ValueError(f"{' and '.join(held)} holds weights; choose another folder, or remove them")
    run = read_run(checkpoint)
    cfg.seed, cfg.dtype = run["seed"], run["dtype"]
    seed_step(cfg.seed, 0)  # as a recipe does, for a base of random weights
    device = torch.device("cpu")
    checkpointer = build(cfg.checkpointer)
    base = checkpointer.load_checkpoint()[training.MODEL_KEY]
    model = build_model(cfg, weights=base, device=device, world=World())
    load_weights(checkpoint, model)
    weights = full_weights(model, device=device, world=World())
    return write_weights(weights, model=model, checkpointer=checkpointer, config=cfg)


def write_weights(
    weights: dict[str, torch.Tensor], *, model: nn.Module, checkpointer: Any, config: RunConfig
) -> dict[str, Path]:
    """Write a model's weights in its own format, and return the folders by what they hold; ``weights`` are consumed.

    Adapters are written to a folder of their own, and merged into the base.
    """
    saved = {}
    if _adapted(model):
        rank, alpha = _rank_and_alpha(model)
        adapters = peft.get_adapter_state_dict(weights)
        weights = peft.get_merged_lora_ckpt(weights, rank=rank, alpha=alpha)
        saved["adapters"] = _save_adapters(checkpointer, adapters, model=model, output_dir=config.output_dir)
    if not config.save_adapter_weights_only:
        saved["weights"] = _save_weights(checkpointer, weights, config)
    return saved


def _save_weights(checkpointer: Any, weights: dict[str, torch.Tensor], config: RunConfig) -> Path:
    """Write a model's final weights, and the files needed to load them, to ``epoch_0`` in its ``output_dir``.

    If the base was in Hugging Face's format, ``from_pretrained`` can load the result. The tokenizer's files are copied
    if they are not beside the base. An adapter's files are removed: transformers would apply it to the merged weights.
    """
    folder = Path(config.checkpointer["output_dir"]) / "epoch_0"
    checkpointer.save_checkpoint({training.MODEL_KEY: weights}, epoch=0)
    for stray in folder.glob("adapter_*"):
        stray.unlink()
    base = Path(checkpointer._checkpoint_dir).resolve()
    for file in _tokenizer_files(config.tokenizer):
        if not file.resolve().is_relative_to(base):
            shutil.copy2(file, folder / file.name)
    return folder


def _tokenizer_files(node: Mapping[str, Any]) -> Iterator[Path]:
    for path in (Path(value) for value in node.values() if isinstance(value, str)):
        if path.is_dir():
            for pattern in TOKENIZER_FILES:
                yield from (file for file in path.glob(pattern) if file.is_file())
        elif path.is_file():
            yield path


def _save_adapters(
    checkpointer: Any, weights: Mapping[str, torch.Tensor], *, model: nn.Module, output_dir: str
) -> Path:
    """Write adapters to a folder of their own: ``adapter_model.pt`` for torchtune, and two files for PEFT.

    PEFT's files are written only if the base is in Hugging Face's format and PEFT knows its layers.
    """
    folder = Path(output_dir) / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(weights), folder / "adapter_model.pt")
    if not isinstance(checkpointer, training.FullModelHFCheckpointer):
        return folder
    try:
        converted = peft_weights(weights, model)
    except ValueError as error:
        log.warning("%s has no files for PEFT: %s", folder, error)
        return folder
    rank, alpha = _rank_and_alpha(model)
    layers = _adapted(model)
    adapted = {name.rpartition(".")[2] for name in layers}
    config = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [theirs.rpartition(".")[2] for name, theirs in TARGETS.items() if name in adapted],
        "peft_type": "LORA",
        "use_dora": isinstance(next(iter(layers.values())), peft.DoRALinear),
        "base_model_name_or_path": checkpointer.repo_id or str(checkpointer._checkpoint_dir.resolve()),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    save_file(converted, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers of a model that have adapters, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, peft.LoRALinear | peft.DoRALinear)
    }


def _rank_and_alpha(model: nn.Module) -> tuple[int, float]:
    """Return the rank and alpha of a model's adapters; torchtune's builders make all of them alike."""
    first = next(iter(_adapted(model).values()))
    rank: int = first.lora_a.out_features
    return rank, first.scaling * rank if isinstance(first, peft.DoRALinear) else first.alpha


def peft_weights(weights: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Convert the adapters of a model from torchtune's names to PEFT's names and order of rows.

    torchtune's own ``tune_to_peft_adapter_weights`` is right for LoRA in llama and gemma only: it permutes the queries
    and keys of Qwen2, which have Hugging Face's order already, and does not permute DoRA's magnitudes.
    """
    heads: Any = next(module for module in model.modules() if hasattr(module, "pos_embeddings"))
    rotary = type(heads.pos_embeddings).__name__
    if rotary not in (*NEIGHBOURS, *HALVES):
        raise ValueError(
            f"torchtune's layers with {rotary} are not Hugging Face's, Phi's for one; use the merged weights, or "
            "adapter_model.pt in torchtune"
        )
    converted = {}
    for name, value in weights.items():
        part = next(part for part in PARTS if name.endswith(f".{part}"))
        layer, _, target = name.removesuffix(f".{part}").rpartition(".")
        if rotary in NEIGHBOURS and target in ("q_proj", "k_proj") and part != "lora_a.weight":
            value = (
                value.reshape(-1, heads.head_dim // 2, 2, *value.shape[1:])
                .transpose(1, 2)
                .reshape(value.shape)
            )
        within = f"model.{layer.rpartition('.')[0]}." if layer else ""  # layers.3.attn: model.layers.3.
        converted[f"base_model.model.{within}{TARGETS[target]}.{PARTS[part]}"] = value.contiguous()
    return converted
