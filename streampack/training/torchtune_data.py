"""Rows of a run from torchtune's dataset builders. They are packed or padded here, not by torchtune."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets.exceptions import DatasetGenerationError

from streampack.instantiate import COMPONENT, build, errors_of, resolve
from streampack.packing.collated import Collate
from streampack.packing.encoders import TokensEncoder
from streampack.packing.encoders.answers import group_of
from streampack.packing.encoders.base import Encoder
from streampack.packing.groups import Group
from streampack.packing.samples import sample_from_pair
from streampack.sources.memory import MapSource
from streampack.sources.mixture import Mix
from streampack.sources.reading import spread
from streampack.sources.source import Source
from streampack.training.collated_rows import RowEncoder, WholeRows, collate_of
from streampack.training.world import World
from streampack.validation import did_you_mean

log = logging.getLogger(__name__)

Node = Mapping[str, Any]

UNLIMITED = 1 << 20
"""Limit on the tokens of a sample if neither the tokenizer nor the model has one."""
LOOKED_AT = 64
"""Rows that are encoded at the start of a run to count those that the tokenizer cuts."""
IDS = ("tokens", "chosen_input_ids", "rejected_input_ids")
LOCAL_FILE = "a file of your own is read by source: json (or csv, parquet), data_files: FILE, split: train"


@dataclass(frozen=True)
class RunRows:
    """Rows of a run, their encoder, and the settings of their `IterablePackedDataset`."""

    source: Source
    encoder: Any  # None: the encoder of the training rows
    settings: dict[str, Any]


class PairEncoder(Encoder):
    """Encodes rows of torchtune's preference datasets as a group of two answers that stores their prompt once."""

    makes_groups = True

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        """See `Encoder`."""
        pair = {
            name: sample_from_pair(row[f"{name}_input_ids"], row[f"{name}_labels"])
            for name in ("chosen", "rejected")
        }
        return group_of(pair, fields={}, share_prefix=True, untrained=True)


def torchtune_rows(
    nodes: Node | Sequence[Node],
    *,
    key: str,
    tokenizer: Any,
    world: World,
    positions: int | None = None,
    collate_fn: str | None = None,
) -> RunRows:
    """Build the datasets of one or more nodes, and check their first rows.

    Several datasets are read end to end, as torchtune's recipes do, or as a `Mix` if the nodes have a ``weight``. With
    ``packed: True``, a pack has ``tokenizer.max_seq_len`` tokens, or twice that for pairs, which are two sequences.
    Otherwise, each sample is a row of a padded batch.

    ``key`` is the key of the ``nodes`` in the config, for messages. ``positions`` is the model's number of positions,
    None if unknown.

    Raises:
        ValueError: with a message of one line, if nodes build nothing, cannot be combined, or yield no samples.
    """
    each = list(nodes) if isinstance(nodes, Sequence) else [nodes]
    packed = bool(each[0].get("packed", False))  # the config's checks refuse nodes that differ
    splits = packed and _common("split_across_pack", [_splits(node, key) for node in each], key)
    collate = collate_of(collate_fn, tokenizer=tokenizer)
    limit: int | None = getattr(tokenizer, "max_seq_len", None)  # the tokenizer cuts longer samples
    if positions is not None and (limit or 0) > positions:
        raise ValueError(
            f"tokenizer.max_seq_len={limit} is above the model's {positions} positions; lower it to {positions}"
        )
    if splits:  # torchtune cuts each document before it packs; here it continues in the next pack
        tokenizer = copy.copy(tokenizer)
        tokenizer.max_seq_len = None
    with world.main_first():
        datasets = [_built(node, key, tokenizer) for node in each]
    with world.raise_on_all():
        first = [
            _first_row(dataset, node, key, collate) for dataset, node in zip(datasets, each, strict=True)
        ]
        pairs = _common(
            "whether rows are preference pairs", ["chosen_input_ids" in row for row in first], key
        )
    if limit is not None and not splits and collate is None and world.is_main:
        for dataset in datasets:
            # A bad row raises its error, with the row's number, when training reads it.
            with suppress(Exception):
                _warn_of_cuts(dataset, limit, key)
    size = limit or positions or UNLIMITED
    settings: dict[str, Any] = {"max_seq_len": min(2 * size, positions or 2 * size) if pairs else size}
    if splits:
        settings["split_across_pack"] = True
    elif not packed:
        settings["strategy"] = "padded"
    encoder: Encoder = PairEncoder() if pairs else TokensEncoder() if collate is None else RowEncoder(collate)
    if hasattr(tokenizer, "decode"):
        vars(encoder)["decode"] = partial(_text, tokenizer)  # for code that displays samples
    return RunRows(
        _joined(datasets, each, key, MapSource if collate is None else WholeRows), encoder, settings
    )


def _text(tokenizer: Any, tokens: list[int]) -> str:
    try:
        return str(tokenizer.decode(tokens))
    except Exception:  # SentencePiece raises for special tokens, which torchtune numbers after its vocabulary
        return " ".join(map(str, tokens))


def _joined(datasets: Sequence[Any], nodes: Sequence[Node], key: str, kind: type[MapSource]) -> Source:
    """Return one source of all datasets: end to end, or mixed by their weights."""
    from torchtune.datasets import ConcatDataset

    weights = [node.get("weight") for node in nodes]
    if None not in weights:
        names = [f"{number}_{node.get('subset', key)}".replace("/", "_") for number, node in enumerate(nodes)]
        return Mix(
            [
                {"name": name, "source": kind(dataset), "weight": weight}
                for name, dataset, weight in zip(names, datasets, weights, strict=True)
            ]
        )
    if set(weights) != {None}:
        raise ValueError(
            f"{key}: some nodes have a weight and others none; give a weight to all nodes, or to none"
        )
    return kind(datasets[0] if len(datasets) == 1 else ConcatDataset(list(datasets)))


def _splits(node: Node, key: str) -> bool:
    """Return whether documents continue in the next pack, as set in the node or by the builder's default."""
    found = inspect.signature(resolve(node[COMPONENT])).parameters.get("split_across_pack")
    default = found.default if found else node[COMPONENT] == "torchtune.datasets.wikitext_dataset"
    return bool(node.get("split_across_pack", default))


def _common(what: str, values: Sequence[bool], key: str) -> bool:
    if len(set(values)) > 1:
        raise ValueError(
            f"{key}: {what} is True in some nodes and False in others, but their samples go into the same packs; give "
            "all nodes one value"
        )
    return values[0]


def _built(node: Node, key: str, tokenizer: Any) -> Any:
    """Build a dataset without torchtune's packing."""
    known = inspect.signature(resolve(node[COMPONENT])).parameters
    unpacked = {name: value for name, value in node.items() if name not in ("packed", "weight")}
    # The builder passes arguments that it does not know on to another library. Its errors then suggest known names.
    near = [did_you_mean(name, known) for name in unpacked if name not in {*known, COMPONENT}]
    with errors_of(key, "".join(near).removeprefix("; "), of_files=LOCAL_FILE):
        try:
            return build(unpacked | ({"packed": False} if "packed" in known else {}), tokenizer)
        except DatasetGenerationError as error:  # its message names neither the file nor the cause
            raise ValueError(f"{node.get('data_files', node.get('source'))}: {error.__cause__}") from error


def _first_row(dataset: Any, node: Node, key: str, collate: Collate | None) -> Mapping[str, Any]:
    """Return the first row of a dataset, after trying on it everything that a run does with rows."""
    way_out = "map your columns by column_map or column, or mend the row"
    with errors_of(f"{key}: {node[COMPONENT]}: the first row", way_out, of_files=LOCAL_FILE):
        if not len(dataset):
            raise ValueError("is missing: the data are empty")
        row: Mapping[str, Any] = dataset[0]
        if collate is None:
            encoder = PairEncoder() if "chosen_input_ids" in row else TokensEncoder()
            if "encoder_input" in row:
                way_out = (
                    "set collate_fn: torchtune.data.padded_collate_tiled_images_and_mask and packed: False"
                )
                raise ValueError(f"has images; {way_out}")
            encoder(row)
    if collate is not None:
        with errors_of(
            "collate_fn cannot take the first row",
            "it expects rows of another kind; for text, remove the key",
        ):
            batch = collate([dict(row)])
            batch["tokens"], batch["labels"]
    return row


def _warn_of_cuts(dataset: Any, limit: int, key: str) -> None:
    """Warn if the tokenizer cuts samples, and say how many of `LOOKED_AT` rows it cuts."""
    from torchtune.datasets import TextCompletionDataset

    most = limit - isinstance(dataset, TextCompletionDataset)  # it keeps room for one token
    rows = [dataset[number] for number in spread(len(dataset), LOOKED_AT)]
    cut = sum(max(len(ids) for name, ids in row.items() if name in IDS) >= most for row in rows)
    if cut:
        log.warning(
            "%s: tokenizer.max_seq_len=%d cuts longer samples; %d of %d rows looked at have %d tokens, so they are cut",
            key, limit, cut, len(rows), most,
        )  # fmt: skip
