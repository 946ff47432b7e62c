"""torchtitan's debug model on the standard library's docstrings, in packs: a config registry for its trainer.

    pip install "streampack[torchtitan]" transformers
    python examples/torchtitan_packs.py             # writes a corpus and a tokenizer to build/torchtitan, once
    PYTHONPATH=examples torchrun --nproc_per_node 2 -m torchtitan.train --module torchtitan_packs --config debugmodel

Kill it and run it again, on another number of ranks if you like: it continues after its last checkpoint with the packs
not trained yet. All of torchtitan's flags are options.
"""

import json
from pathlib import Path

from streampack_examples.stdlib_text import pairs, train_tokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from streampack import Holdout, JSONLSource
from streampack.integrations.torchtitan import StreampackDataLoader

FOLDER = Path("build/torchtitan")


def write_corpus() -> None:
    """Write the corpus, and a tokenizer of as many tokens as the debug model has."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = pairs()
    train_tokenizer(rows).save_pretrained(FOLDER)
    (FOLDER / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def packs(part: str) -> StreampackDataLoader.Config:
    """Return the loader of a part of the corpus: 5 % of the rows are for validation."""
    corpus = JSONLSource(str(FOLDER / "corpus.jsonl"))
    return StreampackDataLoader.Config(
        source=Holdout(corpus, fraction=0.05, part=part),
        encoder={"_component_": "streampack.ChatEncoder"},  # takes torchtitan's tokenizer
        settings={"overlong": "truncate", "shuffle": part == "train", "vocab_size": 2048},
        infinite=part == "train",
    )


def debugmodel() -> Trainer.Config:
    """Return torchtitan's config of its debug model, trained on packs of 512 tokens."""
    config = llama3_debugmodel()
    config.hf_assets_path = str(FOLDER)
    config.dump_folder = str(FOLDER / "run")
    config.dataloader = packs("train")
    config.validator.enable = True
    config.validator.dataloader = packs("validation")
    config.validator.steps = 2
    config.training.seq_len = 512
    config.training.local_batch_size = 2
    config.training.steps = 60
    config.checkpoint.enable = True
    config.checkpoint.interval = 20
    return config


if __name__ == "__main__":
    write_corpus()
