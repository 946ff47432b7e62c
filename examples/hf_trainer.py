"""transformers' Trainer on a stream of packs: a small llama learns the standard library's docstrings, on a CPU.

    pip install "streampack[hf]"
    python examples/hf_trainer.py                                  # half a minute on two cores
    torchrun --nproc_per_node 2 examples/hf_trainer.py --gradient_accumulation_steps 1

Kill it and type it again, on another number of ranks if you like: it goes on with the packs that were not trained.
All of TrainingArguments are options.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stdlib_text import pairs, random_llama, train_tokenizer
from transformers import HfArgumentParser, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from streampack import (
    IGNORE_INDEX,
    Holdout,
    IterablePackedDataset,
    MapSource,
    Sample,
    prepare_trainer_for_packing,
)


class Encode:
    """From a row to a sample whose completion alone is trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __call__(self, row: Mapping[str, Any]) -> Sample:
        """Prompt, completion, end."""
        prompt, completion = (self.tokenizer(row[part])["input_ids"] for part in ("prompt", "completion"))
        completion = [*completion, self.tokenizer.eos_token_id]
        return Sample(np.array(prompt + completion), np.array([IGNORE_INDEX] * len(prompt) + completion))

    def fingerprint(self) -> str:
        """What a state must have been made with: here, how a question is tokenized."""
        return str(self.tokenizer("What does json.dumps do?")["input_ids"])


def main(argv: list[str]) -> Trainer:
    """Train, or go on where a killed run was."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="build/hf_trainer", max_steps=60, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=10, save_steps=20, eval_strategy="steps", eval_steps=20, report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    (args,) = parser.parse_args_into_dataclasses(argv)
    rows = pairs()
    tokenizer = train_tokenizer(rows)
    packing = {"max_seq_len": 512, "encoder": Encode(tokenizer), "overlong": "truncate"}
    packing["padding_idx"] = tokenizer.pad_token_id
    training, validation = (
        Holdout(MapSource(rows), share=0.05, part=part) for part in ("train", "validation")
    )
    train = IterablePackedDataset(training, shuffle=True, epochs=None, **packing)
    held_out = IterablePackedDataset(validation, num_lanes=args.world_size, **packing)

    set_seed(args.seed)
    trainer = Trainer(random_llama(tokenizer), args, train_dataset=train, eval_dataset=held_out)
    prepare_trainer_for_packing(trainer)
    trainer.train(resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
