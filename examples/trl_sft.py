"""Train with TRL's SFTTrainer on a stream of packs: TRL tokenizes and masks the prompts, streampack packs.

    pip install "streampack[hf]" trl
    python -m streampack_examples.trl_sft                              # half a minute on two cores
    torchrun --nproc_per_node 2 -m streampack_examples.trl_sft --gradient_accumulation_steps 1

Kill it and run it again, on another number of ranks if you like: it continues with the packs not trained yet.
All of SFTConfig are options; leave `packing` alone, which is TRL's own.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from streampack_examples.stdlib_text import pairs, random_llama, train_tokenizer
from transformers import HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

from streampack import IterablePackedDataset, TokensEncoder, prepare_trainer_for_packing


def main(argv: list[str]) -> SFTTrainer:
    """Train, or resume a killed run."""
    parser = HfArgumentParser(SFTConfig)
    parser.set_defaults(
        output_dir="build/trl_sft", max_steps=60, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=10, save_steps=20, report_to="none", max_length=512,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    )  # fmt: skip
    (args,) = parser.parse_args_into_dataclasses(argv)
    rows = pairs()
    tokenizer = train_tokenizer(rows)

    set_seed(args.seed)
    model = random_llama(tokenizer)
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    packs = IterablePackedDataset(
        trainer.train_dataset,  # tokenized, labels -100 on the prompts
        encoder=TokensEncoder(tokens="input_ids"),
        max_seq_len=512,
        padding_idx=tokenizer.pad_token_id,
        shuffle=True,
        epochs=None,
    )
    prepare_trainer_for_packing(trainer, train_dataset=packs)
    resumes = args.resume_from_checkpoint or any(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
