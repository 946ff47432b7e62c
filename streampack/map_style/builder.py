"""The function that builds a `PackedDataset` from the YAML of a stock torchtune recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.instantiate import COMPONENT, build
from streampack.map_style.dataset import PackedDataset
from streampack.packing.encoders import check_tokenizer, eos_of, padding_id


def packed_dataset(
    tokenizer: Any,
    *,
    dataset: Mapping[str, Any],
    packed: bool = False,
    max_seq_len: int | None = None,
    padding_idx: int | None = None,
    parity: str | None = None,
    **settings: Any,
) -> PackedDataset:
    """Build a `PackedDataset` from the YAML of a stock torchtune recipe.

    ::

        dataset:
          _component_: streampack.packed_dataset
          packed: True
          dataset:
            _component_: torchtune.datasets.alpaca_dataset

    The recipe reads ``packed: True`` from this node and passes ``tokenizer``, whose ``max_seq_len`` and ``pad_id`` are
    the defaults. The inner node is built with a copy of the tokenizer that does not truncate, so that ``overlong``
    decides about long samples. By default they are cut, and keep their EOS, as by a tokenizer with a ``max_seq_len``;
    the ledger counts what is cut off. The node may name any component that `streampack.instantiate` allows. The
    recipe's log says how many samples a pack has.

    With ``parity="torchtune"`` the packs are those of the inner builder with ``packed: True``: the tokenizer
    truncates, and the padding is 0, whatever the ``pad_id``. (``text_completion_dataset`` then splits by default:
    write ``split_across_pack: True`` here.)

    ``settings`` are the other arguments of `PackedDataset`.

    Raises:
        ValueError: for a node with which a stock recipe would train wrongly, and whatever `PackedDataset` refuses.
    """
    from torchtune.utils import get_logger, log_rank_zero

    from streampack.map_style.of_torchtune import TunePackedDataset

    if packed is not True:
        raise ValueError(
            f"packed={packed!r}: write `packed: True` beside `_component_: streampack.packed_dataset`. The recipe "
            "chooses its collate function by it; without it the positions and the boundaries between samples "
            "would be dropped in silence, and samples would see one another"
        )
    if not isinstance(dataset, Mapping) or COMPONENT not in dataset:
        raise ValueError(
            f"dataset={dataset!r} must be a node with a {COMPONENT}, such as "
            "{_component_: torchtune.datasets.alpaca_dataset}; PackedDataset(ds, max_seq_len=...) takes a built one"
        )
    for name in ("packed", "split_across_pack", "max_packs"):
        if dataset.get(name):
            raise ValueError(
                f"{name}={dataset[name]!r} in the inner dataset node: packing is the outer node's, where it "
                f"takes {name} too; remove it from the inner one"
            )
    longest = getattr(tokenizer, "max_seq_len", None)
    max_seq_len = longest if max_seq_len is None else max_seq_len
    if max_seq_len is None:
        raise ValueError(
            "max_seq_len is None here and in the tokenizer; set max_seq_len, the tokens of a pack, in this node"
        )
    if padding_idx is None:
        padding_idx = 0 if parity else padding_id(tokenizer)
    if not parity:
        tokenizer, eos_id = check_tokenizer(tokenizer), eos_of(tokenizer)
        cuts = longest is not None and not settings.get("split_across_pack")
        settings = {"eos_id": eos_id, "overlong": "truncate" if cuts else None, **settings}
    packs = TunePackedDataset(
        build(dataset, tokenizer),
        max_seq_len=max_seq_len,
        padding_idx=padding_idx,
        parity=parity,
        **settings,
    )
    rate = packs.ledger().samples / max(1, len(packs))
    log_rank_zero(get_logger(), f"{packs!r}, {rate:.1f} samples a pack; batch_size counts packs")
    return packs
