"""torchtune's dataset builders as the data of a run: their samples row by row, packed or padded here."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streampack.instantiate import COMPONENT, build, resolve
from streampack.packing.encoders import TokensEncoder
from streampack.packing.encoders.answers import group_of
from streampack.packing.encoders.base import Encoder
from streampack.packing.groups import Group
from streampack.packing.samples import sample_from_pair
from streampack.sources.as_source import as_source
from streampack.sources.reading import spread
from streampack.sources.source import Source
from streampack.training.world import World

log = logging.getLogger(__name__)

Nodes = Mapping[str, Any] | Sequence[Mapping[str, Any]]

UNLIMITED = 1 << 20
"""Tokens of the longest sample where neither tokenizer nor model has a limit."""
LOOKED_AT = 64
"""Rows that are encoded at the start of a run, to count those that the tokenizer cut."""
LOCAL_FILE = "a file of your own is read by source: json (or csv, parquet), data_files: FILE, split: train"


@dataclass(frozen=True)
class RunRows:
    """Rows of a run, with their encoder and settings of an `IterablePackedDataset`."""

    source: Source
    encoder: Any  # None: the training rows'
    settings: dict[str, Any]


class PairEncoder(Encoder):
    """Encoder of the rows of torchtune's preference datasets: two answers in one group, their prompt kept once."""

    makes_groups = True
    share_prefix = True

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        """See `Encoder`."""
        pair = {
            name: sample_from_pair(row[f"{name}_input_ids"], row[f"{name}_labels"])
            for name in ("chosen", "rejected")
        }
        return group_of(pair, fields={}, share_prefix=True, untrained=True)


def torchtune_rows(nodes: Nodes, *, key: str, tokenizer: Any, positions: int | None, world: World) -> RunRows:
    """Build the datasets of one node or of several, end to end as torchtune's recipes do, and look at their first rows.

    With ``packed: True`` a pack has ``tokenizer.max_seq_len`` tokens, or twice as many for pairs, which are two
    sequences. Otherwise each sample is a row of a padded batch.

    Args:
        nodes: the config's value.
        key: its name, for messages.
        tokenizer: of the run.
        positions: of the model; None: unknown.
        world: the ranks. Rank 0 downloads first.

    Raises:
        ValueError: in one line, for nodes that build nothing, do not go together, or make no samples.
    """
    each = list(nodes) if isinstance(nodes, Sequence) else [nodes]
    packed = _common("packed", [_packed(node, key) for node in each], key)
    splits = packed and _common("split_across_pack", [_splits(node, key) for node in each], key)
    limit = getattr(tokenizer, "max_seq_len", None)
    if packed and limit is None:
        raise ValueError(
            f"{key}: packed: True needs the length of a pack, and tokenizer.max_seq_len is null; set it, for example "
            "tokenizer.max_seq_len=4096"
        )
    if positions is not None and (limit or 0) > positions:
        raise ValueError(
            f"tokenizer.max_seq_len={limit} is above the model's {positions} positions; lower it to {positions}"
        )
    if splits:  # torchtune cuts each document before it packs; here it continues in the next pack
        tokenizer = copy.copy(tokenizer)
        tokenizer.max_seq_len = None
    with world.main_first():
        datasets = [_built(node, key, tokenizer) for node in each]
    first = [_first_row(dataset, node, key) for dataset, node in zip(datasets, each, strict=True)]
    pairs = _common("whether rows are preference pairs", ["chosen_input_ids" in row for row in first], key)
    if len(datasets) > 1:
        from torchtune.datasets import ConcatDataset

        datasets = [ConcatDataset(datasets)]
    [dataset] = datasets
    if limit is not None and not splits and world.is_main:
        _say_cuts(dataset, limit, key)
    size = limit or positions or UNLIMITED
    settings: dict[str, Any] = {"max_seq_len": min(2 * size, positions or 2 * size) if pairs else size}
    if splits:
        settings["split_across_pack"] = True
    elif not packed:
        settings["strategy"] = "padded"
    return RunRows(as_source(dataset), PairEncoder() if pairs else TokensEncoder(), settings)


def _packed(node: Mapping[str, Any], key: str) -> bool:
    packed, component = node.get("packed", False), node[COMPONENT]
    if not isinstance(packed, bool):
        raise ValueError(f"{key}.packed={packed!r} is neither True nor False")
    if packed and component.startswith("torchtune.datasets.multimodal."):
        raise ValueError(
            f"{key}: {component} has images, which torchtune's models take padded only; set packed: False"
        )
    return packed


def _splits(node: Mapping[str, Any], key: str) -> bool:
    """Return whether documents continue in the next pack: as the node says, or its builder does by default."""
    found = inspect.signature(resolve(node[COMPONENT])).parameters.get("split_across_pack")
    default = found.default if found else node[COMPONENT] == "torchtune.datasets.wikitext_dataset"
    return bool(node.get("split_across_pack", default))


def _common(what: str, values: Sequence[bool], key: str) -> bool:
    if len(set(values)) > 1:
        raise ValueError(
            f"{key}: {what} is True in some nodes and False in others, and their samples go into the same packs; give "
            "all nodes one value"
        )
    return values[0]


@contextmanager
def _named(key: str, way_out: str = "") -> Iterator[None]:
    """Raise the errors of builders in one line that begins with the key."""
    try:
        yield
    except Exception as error:  # whatever a builder or a library below it may raise
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        if isinstance(error, KeyError) and " " not in what:
            what = f"there is no {what}"
        elif not isinstance(error, ValueError):
            what = f"{type(error).__name__}: {what}"
        if isinstance(error.__cause__ or error, OSError):
            way_out = LOCAL_FILE
        raise ValueError(f"{key}: {what}{way_out and '; '}{way_out}") from error


def _built(node: Mapping[str, Any], key: str, tokenizer: Any) -> Any:
    """Build a dataset without torchtune's packing, and check that its rows have numbers."""
    known = inspect.signature(resolve(node[COMPONENT])).parameters
    unpacked = {name: value for name, value in node.items() if name != "packed"}
    with _named(key):
        dataset = build(unpacked | ({"packed": False} if "packed" in known else {}), tokenizer)
    if node.get("streaming"):
        raise ValueError(
            f"{key}: torchtune's datasets have no length with streaming=True; leave it out, or read the stream by "
            "data: {source: {_component_: streampack.HFSource, ...}, encoder: ...}"
        )
    return dataset


def _first_row(dataset: Any, node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    with _named(
        f"{key}: {node[COMPONENT]}: the first row",
        "map your columns by column_map or column, or mend the row",
    ):
        if not len(dataset):
            raise ValueError("is missing: the data are empty")
        row: Mapping[str, Any] = dataset[0]
        encoder = PairEncoder() if "chosen_input_ids" in row else TokensEncoder()
        encoder(row)
        return row


def _say_cuts(dataset: Any, limit: int, key: str) -> None:
    """Say once that the tokenizer cuts samples, and how many it cut of some rows."""
    numbers = spread(len(dataset), min(LOOKED_AT, len(dataset)))
    rows = [dataset[number] for number in numbers]
    cut = sum(max(len(ids) for name, ids in row.items() if name in IDS) >= limit for row in rows)
    log.info(
        "%s: the tokenizer cuts samples to tokenizer.max_seq_len=%d tokens; of %d rows looked at, %d have that many",
        key, limit, len(rows), cut,
    )  # fmt: skip


IDS = ("tokens", "chosen_input_ids", "rejected_input_ids")
