"""Questions and answers about the standard library, a tokenizer and a small llama, without a download."""

import importlib
import inspect
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODULES = (
    "argparse", "ast", "asyncio", "collections", "configparser", "csv", "datetime", "decimal", "difflib",
    "email.message", "fractions", "functools", "heapq", "http.client", "inspect", "itertools", "json", "logging", "os",
    "pathlib", "pickle", "random", "re", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile",
    "textwrap", "threading", "unittest", "urllib.parse", "xml.etree.ElementTree", "zipfile",
)  # fmt: skip


def pairs() -> list[dict[str, str]]:
    """Return about 2,000 rows ``{"prompt": "What does json.dumps do?", "completion": ...}``, each answer once."""
    rows = {answer: name for module in MODULES for name, answer in _documented(module)}
    return [
        {"prompt": f"What does {name} do?\n", "completion": answer} for answer, name in sorted(rows.items())
    ]


def _documented(module: str) -> Iterator[tuple[str, str]]:
    for name, thing in inspect.getmembers(importlib.import_module(module)):
        if name.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        yield f"{module}.{name}", inspect.getdoc(thing) or ""
        for method, function in (
            inspect.getmembers(thing, inspect.isroutine) if inspect.isclass(thing) else ()
        ):
            if not method.startswith("_"):
                yield f"{module}.{name}.{method}", inspect.getdoc(function) or ""


def train_tokenizer(rows: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 2,048 tokens, in a second."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def random_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a llama of two layers with random weights, which a CPU trains in seconds."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids))
