"""A tiny model with a tokenizer, and tasks of lm-evaluation-harness on rows of our own, as files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from tests.harness.hf_models import build
from tests.harness.hf_tokenizers import byte_level

WORDS = ["one", "two", "three", "this", "is", "a", "test", "what", "the", "sky", "blue", "of", "and"]
MAX_LENGTH = 64
TASKS = ("choices", "texts", "answers")


def write_model(folder: Path, family: str = "llama", **changes: Any) -> str:
    """Save a model in fp32 and its tokenizer; return the path."""
    tokenizer = byte_level(bos_by_itself=True)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model: Any = build(family, **sizes | changes)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def write_tasks(folder: Path, *, rows: int = 12) -> str:
    """Write a task of each kind of request; return the folder. Some texts are longer than the model's context."""
    rng = random.Random(5)
    few = "'one two' is 'three'. " * 2  # all questions begin alike
    choices = [
        {
            "question": few + words(rng, 1, 12),
            "options": [words(rng, 1, 4) for _ in range(4)],
            "answer": i % 4,
        }
        for i in range(rows)
    ]
    choices[1] |= {"question": few + words(rng, 90, 90)}
    choices[2] |= {"options": ["one", "two", "one", "three"]}  # of one token, and one twice
    texts = [{"text": words(rng, 1, 150 if i % 3 else 8)} for i in range(rows)]
    answers = [{"question": words(rng, 1, 20), "answer": words(rng, 1, 2)} for _ in range(rows)]
    answers[3] |= {"question": words(rng, 120, 120)}
    shared = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
    tasks: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "choices": (
            choices,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_target": "{{answer}}",
                "doc_to_choice": "{{options}}",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            },
        ),
        "texts": (
            texts,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [
                    {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
                ],
            },
        ),
        "answers": (
            answers,
            {
                "output_type": "generate_until",
                "doc_to_text": "{{question}}",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["\n", "the"], "max_gen_toks": 12, "do_sample": False},
                "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
            },
        ),
    }
    for name, (data, task) in tasks.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in data))
        config = shared | {"task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}} | task
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return str(folder)
