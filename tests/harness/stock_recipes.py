"""torchtune's own recipes with the configs that torchtune ships: shrunk, on local data, on the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.harness.processes import run_ranks

TEXT = {  # recipe: a config of it
    "full_finetune_single_device": "llama2/7B_full_low_memory",
    "full_finetune_distributed": "llama2/7B_full",
    "lora_finetune_single_device": "llama2/7B_lora_single_device",
    "lora_finetune_distributed": "llama2/7B_lora",
    "qat_distributed": "llama2/7B_qat_full",
    "qat_lora_finetune_distributed": "llama3_1/8B_qat_lora",
    "knowledge_distillation_single_device": "qwen2/1.5_to_0.5B_KD_lora_single_device",
    "knowledge_distillation_distributed": "qwen2/1.5_to_0.5B_KD_lora_distributed",
}
PAIRS = {
    "full_dpo_distributed": "llama3_1/8B_full_dpo",
    "lora_dpo_single_device": "llama2/7B_lora_dpo_single_device",
    "lora_dpo_distributed": "llama2/7B_lora_dpo",
}
MAX_SEQ_LEN = 64
MODEL = {
    "vocab_size": 320, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32,
    "max_seq_len": MAX_SEQ_LEN, "intermediate_dim": 64,
}  # fmt: skip
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def rows() -> Iterator[dict[str, str]]:
    """Yield 66 questions and answers of several lengths."""
    for a in range(11):
        for b in range(11 - a):
            steps = " ".join(NUMBERS[a : a + b + 1])
            yield {"question": f"{NUMBERS[a]} and {NUMBERS[b]}?", "answer": f"{NUMBERS[a + b]}: {steps}"}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def write_model(folder: Path) -> None:
    """Write a tokenizer, and weights of a model and of a teacher."""
    import sentencepiece
    from torchtune.models.llama2 import llama2

    tokenizer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for row in rows() for text in row.values()), model_writer=tokenizer,
        model_type="bpe", vocab_size=MODEL["vocab_size"], hard_vocab_limit=False, byte_fallback=True,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "init").mkdir()
    (folder / "tokenizer.model").write_bytes(tokenizer.getvalue())
    for seed, name in enumerate(("weights.pt", "teacher.pt")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            torch.save(llama2(**MODEL).state_dict(), folder / "init" / name)


def stock_config(recipe: str, folder: Path, out: str, **changes: Any) -> dict[str, Any]:
    """Return torchtune's config for a recipe with what `write_model` wrote, on the CPU, with keys changed."""
    import torchtune
    from omegaconf import OmegaConf

    file = Path(torchtune.__file__).parent.parent / f"recipes/configs/{(TEXT | PAIRS)[recipe]}.yaml"
    config: Any = OmegaConf.to_container(OmegaConf.load(file))
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": str(folder / "init"),
        "checkpoint_files": ["weights.pt"], "model_type": "LLAMA2", "output_dir": str(folder / out),
    }  # fmt: skip
    nodes = {
        "checkpointer": checkpointer,
        "ref_checkpointer": checkpointer,
        "teacher_checkpointer": {**checkpointer, "checkpoint_files": ["teacher.pt"]},
    }
    config |= {name: node for name, node in nodes.items() if name in config}
    for node in (config[name] for name in ("model", "teacher_model") if name in config):
        builder = "lora_llama2" if "lora_rank" in node else "llama2"
        node |= {"_component_": f"torchtune.models.llama2.{builder}", **MODEL}
    sizes = {
        "lr_scheduler": {"num_warmup_steps": 0},
        "quantizer": {"groupsize": 16},
        "metric_logger": {"filename": "log.txt"},
    }
    config |= {name: config[name] | change for name, change in sizes.items() if name in config}
    config["tokenizer"] = {
        "_component_": "torchtune.models.llama2.llama2_tokenizer",
        "path": str(folder / "tokenizer.model"), "max_seq_len": MAX_SEQ_LEN,
    }  # fmt: skip
    config["optimizer"] = {"_component_": "torch.optim.AdamW", "lr": 0.01}
    plain = {
        "output_dir": str(folder / out), "device": "cpu", "dtype": "fp32", "seed": 0, "epochs": 2, "shuffle": False,
        "optimizer_in_bwd": False, "gradient_accumulation_steps": 1, "max_steps_per_epoch": None,
        "enable_activation_checkpointing": False, "enable_activation_offloading": False,
        "log_peak_memory_stats": False,
    }  # fmt: skip
    return config | plain | changes


def run(recipe: str, config: dict[str, Any], *, ranks: int = 2) -> list[float]:
    """``tune run`` a recipe, one for several devices on ``ranks``, and return the losses that it logged."""
    from omegaconf import OmegaConf

    out = Path(config["output_dir"])
    out.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), out / "run.yaml")
    if recipe.endswith("distributed"):
        run_ranks(_call_on_cpu, ranks, recipe, out)
    else:
        _call(recipe, out)
    return [
        float(loss) for loss in re.findall(r"^Step.*? loss:(\S+)", (out / "logs/log.txt").read_text(), re.M)
    ]


def _call(recipe: str, out: Path) -> None:
    from torchtune._cli.tune import main

    with (
        mock.patch("sys.argv", ["tune", "run", recipe, "--config", str(out / "run.yaml")]),
        mock.patch("torch.cuda.is_available", return_value=False),  # where torchtune's collate makes masks
        mock.patch("datasets.config.HF_DATASETS_CACHE", out.parent / "cache"),
        torch.random.fork_rng(devices=[]),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main()


def _call_on_cpu(recipe: str, out: Path) -> None:
    """Call a recipe for several devices with the lines of it replaced that no CPU runs."""
    from torchao.quantization.qat.api import IntxFakeQuantizeConfig

    join = torch.distributed.init_process_group
    replaced = {
        "torchtune.training.get_memory_stats": lambda device: {},
        "torchtune.training.log_memory_stats": lambda stats, message="": None,
        "torchtune.training.cleanup_before_training": lambda: None,  # it calls torch.cpu.empty_cache
        "torch.distributed.init_process_group": lambda backend: join("gloo"),  # most name NCCL
        # torchtune's QAT with LoRA asks for the class of an older torchao
        "torchao.quantization.qat.api.FakeQuantizeConfig": IntxFakeQuantizeConfig,
    }
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        _call(recipe, out)
