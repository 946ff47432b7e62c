"""A run small enough for a test: the quickstart's config with a toy of a model and data of its own."""

import json
import re
from pathlib import Path

import streampack_configs
import torch
from omegaconf import OmegaConf

WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog"]


class WordTokenizer:
    """A tokenizer with the interface of torchtune's: words to ids, no files."""

    bos_id, eos_id, pad_id, vocab_size = 1, 2, 0, 16
    max_seq_len = None

    def encode(self, text, add_bos=True, add_eos=True):
        return (
            [1] * add_bos
            + [3 + WORDS.index(word) if word in WORDS else 15 for word in text.split()]
            + [2] * add_eos
        )

    def decode(self, tokens):
        return " ".join(WORDS[token - 3] for token in tokens if token >= 3)


def write_rows(path: Path, count: int) -> Path:
    """Write texts that a model can learn: words in a fixed cyclic order, 1 to 19 a row."""
    rows = ({"text": " ".join(WORDS[(i + j) % 8] for j in range(i * 7 % 19 + 1))} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_config(folder: Path, *, rows: int = 400, **changes):
    """Return a config, with dotted keys changed; write its weights and data under ``folder``."""
    from torchtune.models.llama3 import llama3

    model = {
        "vocab_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16,
        "max_seq_len": 32, "intermediate_dim": 32,
    }  # fmt: skip
    init = folder / "init"
    if not init.exists():
        init.mkdir(parents=True)
        torch.manual_seed(0)
        torch.save(llama3(**model).state_dict(), init / "model.bin")
        write_rows(folder / "rows.jsonl", rows)
    config = OmegaConf.load(Path(streampack_configs.__path__[0]) / "quickstart.yaml")
    config.output_dir = str(folder / "out")
    config.tokenizer = {"_component_": "tests.harness.tiny.WordTokenizer"}
    config.data = {
        "source": {"_component_": "streampack.JSONLSource", "paths": str(folder / "rows.jsonl")},
        "encoder": {"_component_": "streampack.TextEncoder"},
        "max_seq_len": 32, "buffer_size": 16, "shuffle": 50, "num_lanes": 2,
    }  # fmt: skip
    config.model = {"_component_": "torchtune.models.llama3.llama3", **model}
    config.checkpointer.checkpoint_dir = str(init)
    config.optimizer = {"_component_": "torch.optim.AdamW", "lr": 0.02}
    config.lr_scheduler.num_warmup_steps = 2
    config.validation = {"fraction": 0.1, "max_packs": 4}
    config.run_val_every_n_steps = 5
    config.metric_logger.filename = "log.txt"
    plain = {
        "max_steps": 12, "epochs": None, "batch_size": 2, "gradient_accumulation_steps": 2,
        "save_every_n_steps": 4, "num_workers": 0, "device": "cpu",
    }  # fmt: skip
    for key, value in (plain | changes).items():
        OmegaConf.update(config, key, value, force_add=True, merge=False)
    if config.validation is None:
        config.run_val_every_n_steps = None
    return config


def losses(folder: Path, name: str = "loss") -> dict[int, str]:
    """Return a logged metric by step; a later line for the same step replaces an earlier one."""
    text = (folder / "out" / "logs" / "log.txt").read_text()
    return {int(m[1]): m[2] for m in re.finditer(rf"Step (\d+) \| (?:\S+ )*?{name}:(\S+)", text)}


def numbers(folder: Path, name: str = "loss") -> dict[int, float]:
    """`losses` as numbers."""
    return {step: float(value) for step, value in losses(folder, name).items()}


def mixed_config(folder: Path, **changes):
    """`tiny_config` on a mixture of two sources."""
    config = tiny_config(folder, log_every_n_steps=1, **changes)
    sources = []
    for i, (name, weight) in enumerate((("counting", 3), ("words", 1))):
        path = folder / f"{name}.jsonl"
        texts = (" ".join(WORDS[(k + i * j) % 8] for j in range(1 + k % (9 + 9 * i))) for k in range(400))
        path.write_text("".join(json.dumps({"line": text}) + "\n" for text in texts))
        sources.append(
            {
                "name": name,
                "source": {"_component_": "streampack.JSONLSource", "paths": str(path)},
                "encoder": {"_component_": "streampack.TextEncoder", "column": "line"},
                "weight": weight,
            }
        )
    config.data.source = {"_component_": "streampack.Mix", "sources": sources, "stop": "never"}
    return config


BASE = {
    "vocab_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16,
    "max_seq_len": 32, "intermediate_dim": 32,
}  # fmt: skip
ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "apply_lora_to_output": True,
    "lora_rank": 4, "lora_alpha": 12.0,
}  # fmt: skip


def lora_config(folder: Path, *, base=BASE, adapters=ADAPTERS, **changes):
    """`tiny_config` for a model with adapters."""
    config = tiny_config(folder, **{"data.num_lanes": 4, "lr_scheduler": None} | changes)
    from torchtune.models.llama3 import llama3

    config.model = {"_component_": "torchtune.models.llama3.lora_llama3", **base, **adapters}
    torch.manual_seed(0)
    torch.save(llama3(**base).state_dict(), folder / "init" / "model.bin")
    config.checkpointer.checkpoint_dir = str(folder / "init")
    return config


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_step(step: int, monkeypatch, act=interrupt) -> None:
    """Raise KeyboardInterrupt, or ``act``, in the given step of AdamW from now on."""
    update, calls = torch.optim.AdamW.step, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == step:
            act()
        return update(*args)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
