"""The command ``streampack tokenize``: the rows of a config's source as token shards."""

from __future__ import annotations

import argparse
import json
from typing import Any

DESCRIPTION = """\
Write data.source, encoded by data.encoder, as token shards, which streampack.TokenShardSource reads.

  streampack tokenize --config my.yaml --out tokens --workers 16

A command that was killed goes on when it is given again. The folder may lie in an object store (s3://, gs://, az://).
On a Ray cluster, whose nodes all reach the folder, lanes are tasks, tried again where a node dies:

  streampack tokenize --config my.yaml --out s3://bucket/tokens --engine ray --address auto --lanes 800

Without an engine, on several machines that reach the folder, each writes a part,
in any order, and one of them the index at the end:

  streampack tokenize --config my.yaml --out s3://bucket/tokens --lanes 800 --shard 0/50    ... to 49/50
  streampack tokenize --config my.yaml --out s3://bucket/tokens --lanes 800 --finish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder of the shards, or a URL")
    parser.add_argument(
        "--storage-options",
        type=_options,
        metavar="JSON",
        help="of fsspec's file system, for a URL; secrets are better in the environment, where others do not see them",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument(
        "--lanes", type=int, metavar="N", help="parts of the source, at least as many as workers or shards"
    )
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="uint16, uint32, or auto (auto)")
    parser.add_argument(
        "--engine", default="processes", metavar="NAME", help="processes, or ray: a Ray cluster (processes)"
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of the Ray cluster, such as auto; default: RAY_ADDRESS, or a new one here",
    )
    parser.add_argument(
        "--shard", type=_shard, metavar="I/N", help="write the I-th of N parts, from 0/N, and no index"
    )
    parser.add_argument("--finish", action="store_true", help="write the index, once all parts are there")


def run(options: argparse.Namespace, config: Any) -> int:
    """Write the shards, and return the exit status."""
    from streampack.tokenize.tokenize import from_config, tokenize
    from streampack.training.config import to_plain

    tokenize(
        **from_config(to_plain(config)),
        out=options.out,
        workers=options.workers,
        lanes=options.lanes,
        dtype=options.dtype,
        engine=options.engine,
        address=options.address,
        shard=options.shard,
        finish=options.finish,
        storage={"options": options.storage_options or {}},
    )
    return 0


def _shard(text: str) -> tuple[int, int]:
    """Parse the word of ``--shard``."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write I/N, such as 0/8")
    return int(index), int(count)


def _options(text: str) -> dict[str, Any]:
    """Parse the word of ``--storage-options``."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("it is no JSON object; write such as '{\"anon\": true}'")
    return found
