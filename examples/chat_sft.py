"""Fine-tune a Hugging Face model folder on your own chats with transformers' Trainer, streamed and packed.

    pip install "streampack[hf]"
    python -m streampack_examples.chat_sft --model my_model --data "chats/*.jsonl"

A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or has another
shape that people publish (Alpaca's, ShareGPT's, prompt with completion). The answers are trained. Kill it and run it
again: it continues with the packs not trained yet. It may do so on another number of ranks, if ranks x
gradient_accumulation_steps stays the same. All of TrainingArguments are options. Model, tokenizer and report.html, a
page of the run, are written to output_dir.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

from streampack import HFTokenizer, IterablePackedDataset, encoder_for, prepare_trainer_for_packing
from streampack.inspection.trainer_report import write_trainer_report
from streampack.streaming.first_look import first_look
from streampack.validation import one_line_errors


@dataclass
class ChatArguments:
    """Model, data and packing. The words about rows are those of `streampack inspect` and of a recipe's ``data:``."""

    model: str = field(
        metadata={"help": "a folder with weights, tokenizer and chat template, or a name on the Hub"}
    )
    data: list[str] = field(
        metadata={"help": "files, folders or URLs, such as 'chats/*.jsonl': JSON, Parquet, Arrow, text, tar"}
    )
    max_seq_len: int = field(default=4096, metadata={"help": "tokens in a pack"})
    overlong: str = field(
        default="error",
        metadata={"help": "longer rows: error, truncate, truncate_left, drop, split"},
    )
    columns: str = field(
        default="", metadata={"help": "your columns and ours: question=instruction,answer=output"}
    )
    roles: str = field(default="", metadata={"help": "your roles and ours: bot=assistant"})
    answers: str | None = field(
        default=None, metadata={"help": "all, or last: of each chat, to train only that"}
    )
    ignore: str = field(default="", metadata={"help": "columns to skip on purpose: tools,label"})
    skip_bad: bool = field(
        default=False,
        metadata={"help": "skip rows that cannot be read, and list them in output_dir/bad_records"},
    )
    strategy: str = field(
        default="exact_fit",
        metadata={"help": "how packs are filled, such as `streampack inspect` recommends"},
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "a file of Jinja, if the tokenizer has no template"}
    )


def main(argv: list[str]) -> Trainer:
    """Train, or resume a killed run."""
    parser = HfArgumentParser((ChatArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/chat", num_train_epochs=1, per_device_train_batch_size=1, learning_rate=2e-5,
        logging_steps=10, save_steps=100, report_to="none", use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cache=True,  # saved in the model's config; in training, packs switch the cache off
    )  # fmt: skip
    chat, args, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    tokenizer = HFTokenizer(chat.model, chat_template=chat.chat_template)
    if chat.chat_template is not None:  # so that it is saved with the weights
        tokenizer.tokenizer.chat_template = Path(chat.chat_template).read_text(encoding="utf-8")
    data = chat.data if len(chat.data) > 1 else chat.data[0]
    packs = IterablePackedDataset(
        data,
        encoder=encoder_for(
            data,
            tokenizer,
            columns=chat.columns,
            roles=chat.roles,
            answers=chat.answers,
            ignore=chat.ignore,
            pairs=False,
            strict=not chat.skip_bad,
        ),
        max_seq_len=chat.max_seq_len,
        overlong=chat.overlong,
        strategy=chat.strategy,
        skip_bad=chat.skip_bad and str(Path(args.output_dir) / "bad_records"),
        padding_idx=tokenizer.pad_id,
        shuffle=True,
        epochs=None if args.max_steps > 0 else 1,
    )
    if args.process_index == 0:
        print(*first_look(packs.lane_config), sep="\n")
    # Weights in bf16 would round small updates away. With bf16, the model computes in bf16 and keeps fp32 weights.
    model = AutoModelForCausalLM.from_pretrained(chat.model, dtype=torch.float32)
    trainer = Trainer(model, args, processing_class=tokenizer.tokenizer)
    prepare_trainer_for_packing(trainer, train_dataset=packs)
    resumes = args.resume_from_checkpoint or any(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes)
    trainer.save_model()
    page = write_trainer_report(trainer)
    if trainer.is_world_process_zero():
        print("the run as a page:", page)
    return trainer


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
