"""The command ``streampack score``: log-likelihoods of the rows of a config's source."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Write the log-likelihood of each row's trained tokens, in the order of the rows.

  streampack score --config my.yaml --out scores.jsonl
  streampack score --config my.yaml --model outputs/merged --out scores.parquet
  torchrun --nproc_per_node 2 -m streampack score --config my.yaml --out scores.jsonl

The rows are those of data.source, encoded by data.encoder and packed to data.max_seq_len. The model is the config's
model with the weights of its checkpointer, or with --model a folder of Hugging Face's format; then no other keys of
the config are needed than tokenizer and data.

A line has the columns of its row, and logp (a sum, in nats), num_tokens and greedy (whether each token is the model's
most likely one); for a pair or a group of answers logps, num_tokens and greedy are lists. A job that was killed goes on
when the same command is given again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="to write; ends in .jsonl or .parquet"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="a model in Hugging Face's format, instead of the config's"
    )
    parser.add_argument(
        "--overlong", default="error", metavar="CHOICE",
        help="rows longer than data.max_seq_len: error, truncate (leave out their beginnings) or windows (error)",
    )  # fmt: skip
    parser.add_argument(
        "--per-token", action="store_true", help="write the log-probability of each token, too: token_logps"
    )
    parser.add_argument("--without-rows", action="store_true", help="leave the columns of the rows out")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="of the names of the columns to write")


def run(options: argparse.Namespace, config: Any) -> int:
    """Score the rows, and return the exit status."""
    from streampack.training.score_rows import score_rows

    line = score_rows(
        config,
        out=options.out,
        model=options.model,
        overlong=options.overlong,
        per_token=options.per_token,
        with_rows=not options.without_rows,
        prefix=options.prefix,
    )
    if line:
        sys.stdout.write(f"{line}\n")
    return 0
