"""Train a small llama on the standard library's docstrings with transformers' Trainer, on a stream of packs.

    pip install "streampack[hf]"
    python -m streampack_examples.hf_trainer                           # half a minute on two cores
    torchrun --nproc_per_node 2 -m streampack_examples.hf_trainer --gradient_accumulation_steps 1

Kill it and run it again, on another number of ranks if you like: it continues with the packs not trained yet.
All of TrainingArguments are options.
"""

import sys
from pathlib import Path

import torch
from streampack_examples.stdlib_text import pairs, random_llama, train_tokenizer
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

from streampack import (
    ChatEncoder,
    Holdout,
    IterablePackedDataset,
    MapSource,
    prepare_trainer_for_packing,
)


def main(argv: list[str]) -> Trainer:
    """Train, or resume a killed run."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="build/hf_trainer", max_steps=60, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=10, save_steps=20, eval_strategy="steps", eval_steps=20, report_to="none",
        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    )  # fmt: skip
    (args,) = parser.parse_args_into_dataclasses(argv)
    rows = pairs()
    tokenizer = train_tokenizer(rows)
    packing = {"max_seq_len": 512, "encoder": ChatEncoder(tokenizer), "overlong": "truncate"}
    packing["padding_idx"] = tokenizer.pad_token_id
    training, validation = (
        Holdout(MapSource(rows), fraction=0.05, part=part) for part in ("train", "validation")
    )
    train = IterablePackedDataset(training, shuffle=True, epochs=None, **packing)
    held_out = IterablePackedDataset(validation, **packing)

    set_seed(args.seed)
    trainer = Trainer(random_llama(tokenizer), args, train_dataset=train, eval_dataset=held_out)
    prepare_trainer_for_packing(trainer)
    resumes = args.resume_from_checkpoint or any(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
