"""torchtune's stock training configs, made small: same families of models and tokenizers, local data."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.harness.stock_files import FIRST_SPECIAL, set_data, set_tokenizer
from tests.harness.torchvision_stub import import_vision_models

VOCAB = 768
MAX_SEQ_LEN = 256
"""Of a pack: two or three rows of Alpaca."""
SIZES = {
    "vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "embed_dim": 64, "intermediate_dim": 64, "head_dim": 16,
    "max_seq_len": 2048, "fusion_interval": 2, "encoder_max_seq_len": 4 * 5, "clip_embed_dim": 64,
    "clip_num_layers": 2, "clip_hidden_states": [0, 1], "num_layers_projection": 1, "decoder_embed_dim": 64,
}  # fmt: skip
# NF4 takes linear layers of a multiple of 64 x 256 weights, in CLIP also of 200 x 256.
QUANTIZED = {
    "embed_dim": 128, "intermediate_dim": 128, "head_dim": 32, "num_kv_heads": 4, "clip_embed_dim": 640,
    "clip_num_layers": 1, "clip_hidden_states": [0], "decoder_embed_dim": 128,
}  # fmt: skip
_for_quantized: ContextVar[bool] = ContextVar("for_quantized", default=False)
IMAGE_SIZE = 28
MOST_FILES = 3
"""Of the weights; torchtune collects garbage after each, which takes a while for the 191 of a 405B model."""


def configs_folder() -> Path:
    """The folder of torchtune's configs; torchtune itself is not imported."""
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1] / "recipes" / "configs"


def stock_names() -> list[str]:
    """Names, as in ``llama3_2/1B_full``, of the configs that train on samples."""
    folder = configs_folder()
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return sorted(
        name
        for name in names
        if re.search("full|lora|dora|dpo|qat", name.rpartition("/")[2]) and not re.search("ppo|_KD_", name)
    )


def read_stock(name: str) -> Any:
    return OmegaConf.load(configs_folder() / f"{name}.yaml")


def recipe_of(name: str) -> str:
    """The recipe of ours for a stock config."""
    base = name.rpartition("/")[2]
    if "dpo" in base:
        return "dpo"
    return "lora_finetune" if re.search("lora|dora", base) else "full_finetune"


@pytest.fixture(scope="module")
def shrunk() -> Iterator[None]:
    """Let torchtune's builders make tiny models, and its tokenizers number special tokens from `FIRST_SPECIAL` on."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield


def shrink(patch: pytest.MonkeyPatch) -> None:
    import_vision_models()
    patch.setenv(
        "TIKTOKEN_CACHE_DIR", ""
    )  # or it would go by a file's name, which another session may have used
    families = importlib.import_module("torchtune.models")
    for folder in Path(families.__path__[0]).iterdir():
        if folder.name in ("clip", "flux", "t5") or not (folder / "_model_builders.py").exists():
            continue
        module = importlib.import_module(f"torchtune.models.{folder.name}._model_builders")
        for name, value in vars(module).copy().items():
            if inspect.isfunction(value) and value.__module__.endswith("._component_builders"):
                patch.setattr(module, name, _tiny(value))
    for module_name, name, first in (
        ("llama3._tokenizer", "LLAMA3_SPECIAL_TOKENS", 128_000),
        ("phi3._tokenizer", "PHI3_SPECIAL_TOKENS", 32_000),
        ("phi4._tokenizer", "PHI4_SPECIAL_TOKENS", 100_256),
        ("qwen2._model_builders", "QWEN2_SPECIAL_TOKENS", 151_643),
        ("qwen2_5._model_builders", "QWEN2_5_SPECIAL_TOKENS", 151_643),
    ):
        module = importlib.import_module(f"torchtune.models.{module_name}")
        moved = {token: number - first + FIRST_SPECIAL for token, number in getattr(module, name).items()}
        patch.setattr(module, name, moved)


def _tiny(builder: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(builder).parameters

    @functools.wraps(builder)
    def build(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(builder).bind(*args, **kwargs).arguments
        given |= given.pop("quantization_kwargs", {})
        quantized = given.get("quantize_base", False) or _for_quantized.get()
        all_sizes = SIZES | QUANTIZED if quantized else SIZES
        if "num_kv_heads" in known:
            heads = max(1, 4 * given["num_kv_heads"] // given["num_heads"])
            all_sizes = {"num_kv_heads": heads} | all_sizes
        sizes = {key: value for key, value in all_sizes.items() if key in known}
        return builder(**given | sizes)

    return build


def shrunk_config(name: str, folder: Path, *, packed: bool = False, **changes: Any) -> Any:
    """Return a stock config with local files in place of those it names, on a CPU; two steps end the run.

    ``folder`` holds weights, tokenizers and data, written once for all configs; ``changes`` are dotted keys.
    """
    config = read_stock(name)
    out = folder / "runs" / f"{name.replace('/', '_')}{'_packed' * packed}"
    config.output_dir = str(out)
    config.device = "cpu"
    set_tokenizer(config.tokenizer, folder / "tokenizers")
    for node in config.get("datasets") or [config.get("dataset")]:
        set_data(node, folder)
    if "image_size" in config.model:
        config.model.image_size = config.tokenizer.image_size = IMAGE_SIZE
    if "quantizer" in config:
        config.quantizer.groupsize = 32
    for key in ("checkpointer", "ref_checkpointer"):
        if key in config:
            config[key].checkpoint_dir = str(_weights(config, config[key], folder))
    if packed:
        changes = {"dataset.packed": True, "tokenizer.max_seq_len": MAX_SEQ_LEN} | changes
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True, merge=False)
    return config


# Random weights in the format and the files that the checkpointer reads.


def _weights(config: Any, node: Any, folder: Path) -> Path:
    """Write the base's weights, once for all configs that name the same model and files; return their folder."""
    builder = re.sub(r"\.q?lora_", ".", config.model._component_)
    files = node.checkpoint_files
    if "max_filename" in files:
        files.max_filename = f"{MOST_FILES:05}"
        numbers = (f"{i + 1:05}" for i in range(MOST_FILES))
        files = [files.filename_format.format(number, files.max_filename) for number in numbers]
    else:
        files = node.checkpoint_files = files[:MOST_FILES]
    quantized = config.model.get("quantize_base", "qlora" in config.model._component_)
    kind = f"{builder.rpartition('.')[2]}_{node.model_type}{'_for_nf4' * quantized}"
    where = folder / "weights" / f"{kind}_{files[0].split('.')[0]}_{len(files)}"
    if where.exists():
        return where
    from torchtune.config import instantiate

    size = {"image_size": IMAGE_SIZE} if "image_size" in config.model else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        token = _for_quantized.set(quantized)
        model = instantiate(OmegaConf.create({"_component_": builder, **size}))
    _for_quantized.reset(token)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "tok_embeddings" in name:
                value *= 0.02  # or the loss would begin at a hundred
            elif name.endswith("scale.scale") and value.numel() == 1:
                value += 0.5  # a gate of images: closed, it would give what is behind it no gradient
    parts = _in_format(model, node)
    where.mkdir(parents=True)
    _write_parts(parts, files, where)
    return where


def _sizes(model: Any) -> dict[str, Any]:
    """The ``config.json`` of a model, as far as torchtune's checkpointer reads it."""
    attention = model.layers[0].attn
    return {
        "num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_kv_heads,
        "hidden_size": attention.num_heads * attention.head_dim, "head_dim": attention.head_dim, "vocab_size": VOCAB,
        "tie_word_embeddings": not hasattr(model, "output") or "output.weight" not in model.state_dict(),
    }  # fmt: skip


def _in_format(model: Any, node: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from torchtune.models import convert_weights
    from torchtune.models.gemma2._convert_weights import gemma2_tune_to_hf
    from torchtune.models.llama3_2_vision import _convert_weights as vision
    from torchtune.models.phi3._convert_weights import phi3_tune_to_hf
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

    kind, weights = node.model_type, model.state_dict()
    meta = "Meta" in node._component_
    if kind == "LLAMA3_VISION":
        text = _sizes(model.decoder) | {"cross_attention_layers": [1]}
        ratios = [[h, w] for h in range(1, 5) for w in range(1, 5) if h * w <= 4]
        images = {
            "hidden_size": model.encoder.clip.ln_pre.normalized_shape[0], "image_size": IMAGE_SIZE, "max_num_tiles": 4,
            "supported_aspect_ratios": ratios,
        }  # fmt: skip
        converted = vision.llama3_vision_tune_to_hf(
            weights, num_heads=text["num_attention_heads"], num_kv_heads=text["num_key_value_heads"],
            dim=text["hidden_size"], head_dim=text["head_dim"], vocab_size=VOCAB, cross_attention_layers=[1],
            encoder_dim=images["hidden_size"], tile_size=IMAGE_SIZE, num_tiles=4, supported_aspect_ratios=ratios,
        )  # fmt: skip
        return {"text_config": text, "vision_config": images}, converted
    sizes = _sizes(model)
    heads = {
        "num_heads": sizes["num_attention_heads"], "num_kv_heads": sizes["num_key_value_heads"],
        "dim": sizes["hidden_size"],
    }  # fmt: skip
    if meta:
        return {}, convert_weights.tune_to_meta(weights)
    if kind in ("PHI3_MINI", "PHI4"):
        converted = phi3_tune_to_hf(weights)
    elif kind == "QWEN2":
        converted = qwen2_tune_to_hf(weights, **heads, tie_word_embeddings=sizes["tie_word_embeddings"])
    elif kind == "GEMMA2":
        converted = gemma2_tune_to_hf(weights, **heads, head_dim=sizes["head_dim"])
    else:
        converted = convert_weights.tune_to_hf(weights, **heads, head_dim=sizes["head_dim"])
    return sizes, converted


def _write_parts(
    parts: tuple[dict[str, Any], dict[str, torch.Tensor]], files: list[str], where: Path
) -> None:
    from safetensors.torch import save_file

    sizes, weights = parts
    weights = {name: value.contiguous().to(torch.bfloat16) for name, value in weights.items()}
    each = math.ceil(len(weights) / len(files))
    names = list(weights)
    for i, file in enumerate(files):
        part = {name: weights[name].clone() for name in names[i * each : (i + 1) * each]}
        if file.endswith(".safetensors"):
            save_file(part, where / file, metadata={"format": "pt"})
        else:
            torch.save(part, where / file)
    if sizes:
        (where / "config.json").write_text(json.dumps(sizes))
