"""Fine-tune a vision-language model folder on chats with images with transformers' Trainer, streamed and packed.

    pip install "streampack[vision]" torchvision
    python -m streampack_examples.vision_sft --model my_model --data "chats/*.jsonl"

A line is {"messages": [{"role": "user", "content": [{"type": "image", "path": "cat.jpg"}, {"type": "text", "text":
"..."}]}, {"role": "assistant", "content": "..."}]}, or has its images in a list "images"; the answers are trained.
Images are in the folder of the file that names them, or below --folder; lines cannot name others. Some lines may have
no images. Lines with broken or huge images are skipped, counted and listed. Kill it and run it again: it continues with
the packs not trained yet. All of TrainingArguments are options.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForImageTextToText,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from streampack import IterablePackedDataset, VisionEncoder, prepare_trainer_for_packing
from streampack.validation import one_line_errors


@dataclass
class VisionArguments:
    """The command's own options: model, data and limits of a pack."""

    model: str = field(
        metadata={"help": "a folder with weights, processor and chat template, or a name on the Hub"}
    )
    data: str = field(metadata={"help": "files of JSON lines, such as 'chats/*.jsonl'"})
    folder: str | None = field(
        default=None,
        metadata={"help": "the folder of the images, if they are not beside the data; a URL, too"},
    )
    max_seq_len: int = field(default=8192, metadata={"help": "tokens in a pack"})
    max_media: int | None = field(
        default=None,
        metadata={"help": "rows of pixel_values in a pack: patches for Qwen's models, else images or tiles"},
    )
    train_tower: bool = field(
        default=False, metadata={"help": "train the vision tower and its projector, too"}
    )
    attention: str = field(default="auto", metadata={"help": "flex is faster for gemma3 on CUDA"})


def main(argv: list[str]) -> Trainer:
    """Train, or resume a killed run."""
    parser = HfArgumentParser((VisionArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/vision", num_train_epochs=1, per_device_train_batch_size=1, learning_rate=1e-5,
        logging_steps=10, save_steps=100, report_to="none", use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        dataloader_num_workers=2,  # images are decoded beside the training
    )  # fmt: skip
    vision, args, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    encoder = VisionEncoder(vision.model, model=vision.model, folder=vision.folder)
    processor = encoder.processor
    model = AutoModelForImageTextToText.from_pretrained(vision.model, dtype=torch.float32)
    if not vision.train_tower:  # nor its projector
        model.requires_grad_(False)
        for part in (model.get_decoder(), model.get_output_embeddings()):
            part.requires_grad_(True)
    packs = IterablePackedDataset(
        vision.data,
        encoder=encoder,
        max_seq_len=vision.max_seq_len,
        max_media=vision.max_media,
        overlong="drop",
        padding_idx=processor.tokenizer.pad_token_id or 0,
        skip_bad=str(Path(args.output_dir) / "bad_records"),
        shuffle=True,
        epochs=None if args.max_steps > 0 else 1,
    )
    trainer = Trainer(model, args, processing_class=processor)
    prepare_trainer_for_packing(trainer, train_dataset=packs, attention=vision.attention)
    resumes = args.resume_from_checkpoint or any(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
