"""Mutants of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from streampack import Batch
from streampack.packing.batch import stack_paths
from tests.mutants.registry import replaces


class _Inputs:
    """What `prepare_model_for_packing` returned, called in another way."""

    def __init__(self, good: Any, call: Callable[[Any, Any], Any]) -> None:
        self.good, self.call = good, call

    def __call__(self, batch: Any) -> Any:
        return self.call(self.good, batch)

    def __getattr__(self, name: str) -> Any:
        if name in ("good", "call") or name.startswith("__"):  # asked for by copy and pickle
            raise AttributeError(name)
        return getattr(self.good, name)


def calling_inputs(call: Callable[[Any, Any], Any]) -> Any:
    """Let prepared models be given ``call(inputs, batch)`` in place of ``inputs(batch)``."""

    @wraps(call)
    def prepare(good: Any, model: Any, **settings: Any) -> Any:
        return _Inputs(good(model, **settings), call)

    return replaces("streampack.attention:prepare_model_for_packing")(prepare)


@replaces("streampack.attention:dense_mask")
def masks_of_the_first_pack(good, seq_lens, **settings):
    """All packs of a batch get the dense mask of its first one."""
    return good(seq_lens[:1].expand_as(seq_lens), **settings)


@replaces("streampack.attention:flex_mask")
def eight_sequences_in_a_block_mask(good, seq_lens, **settings):
    """A block mask knows the first eight sequences of a pack; those behind them see one another."""
    return good(seq_lens[:, :8], **settings)


@replaces("streampack.attention:cu_seqlens_of")
def packs_joined_where_one_ends(good, seq_lens, *, max_seq_len, **settings):
    """``cu_seqlens`` lack the ends of packs: the last sequence of one sees into the first of the next."""
    ends = good(seq_lens, max_seq_len=max_seq_len, **settings)
    inner = (ends % max_seq_len == 0) & (ends < ends[-1])
    return ends.where(~inner, 0).cummax(0).values.to(ends.dtype)


@replaces("streampack.attention:varlen_attention")
def window_without_the_token_itself(good, *qkv, window=None, **settings):
    """A sliding window is one token short: the query's own token is counted beside it."""
    return good(*qkv, window=window and max(1, window - 1), **settings)


@replaces("streampack.attention:varlen_attention")
def scores_scaled_behind_the_softcap(good, q, *kv, scale=None, softcap=None, **settings):
    """Scores are capped before they are scaled, and so hardly ever below the softcap that is meant."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return good(q, *kv, scale=scale, softcap=softcap and softcap * factor, **settings)


@calling_inputs
def answers_see_the_one_before(inputs, batch):
    """Behind a shared prompt, an answer sees the answer before it."""
    return inputs(chained(batch))


@calling_inputs
def boundaries_without_the_padding_of_sequences(inputs, batch):
    """With ``pad_seqs_to``, boundaries are counted without padding, and each lies too early."""
    return inputs(batch if isinstance(batch, Mapping) else replace(batch, seq_lens=batch.unpadded_lens))


@replaces("streampack.attention:prepare_model_for_packing")
def dropout_of_the_attention_lost(good, model, **settings):
    """Preparing a torchtune model ends the dropout of its attention, because kernels have none."""
    for module in model.modules():
        if isinstance(getattr(module, "attn_dropout", None), float):
            module.attn_dropout = 0.0
    return good(model, **settings)


@calling_inputs
def positions_of_later_packs_begin_at_1(inputs, batch):
    """A transformers model gets positions from 1 on in all packs of a batch but the first."""
    given = inputs(batch)
    if "position_ids" in given:
        given["position_ids"] = given["position_ids"].clone()
        given["position_ids"][..., 1:, :] += 1
    return given


@calling_inputs
def states_go_on_into_the_third_sequence(inputs, batch):
    """Convolutions and state-space layers take a pack's second and third sequence for one."""
    given = inputs(batch)
    if isinstance(batch, Mapping) or batch.seq_lens.shape[1] < 3:
        return given
    lengths = batch.seq_lens.clone()
    lengths[:, 1] += lengths[:, 2]
    lengths[:, 2:] = torch.nn.functional.pad(lengths[:, 3:], (0, 1))
    others = inputs(replace(batch, seq_lens=lengths, longest=None))
    return given | {name: others[name] for name in ("packed_seq_lens", "seq_idx") if name in others}


@replaces("streampack.attention:find_leaks")
def leaks_in_training_mode_missed(good, *args, **settings):
    """``find_leaks`` says nothing of leaks that a model has in training mode only."""
    report = good(*args, **settings)
    return replace(report, leaks=tuple(leak for leak in report.leaks if not leak.training))


def chained(batch: Any) -> Any:
    """Return a batch in which each answer to a shared prompt continues the answer before it."""
    groups = None if isinstance(batch, Mapping) else batch.groups
    if groups is None:
        return batch
    parents = tuple(
        tuple(
            number - 1 if parent >= 0 and pack[number - 1] == parent else parent
            for number, parent in enumerate(pack)
        )
        for pack in groups.parents
    )
    paths = stack_paths(parents, batch.seq_lens.shape[1])
    return replace(batch, groups=replace(groups, parents=parents, paths=paths))


# What a step would wait for on a GPU. None of these changes a number.


def read(number: torch.Tensor) -> None:
    """Let the host wait for a number; on the meta device there is none."""
    if number.device.type != "meta":
        int(number)


@replaces("streampack.attention.layout:as_packed")
def sequences_of_a_dict_counted_on_the_device(good, batch):
    """The host reads how many sequences a dict on a device has."""
    found = good(batch)
    if isinstance(batch, Mapping):
        read((found.seq_lens > 0).sum(1).max())
    return found


@calling_inputs
def longest_sample_of_a_dict_read(inputs, batch):
    """The host reads the largest position of a dict on a device."""
    found = inputs(batch)
    if isinstance(batch, Mapping) and "position_ids" in found:
        read(found["position_ids"].max())
    return found


@replaces("streampack.attention.mixers:host_lengths")
def lengths_for_mixers_read_back(good, batch):
    """The lengths that mixers need are read from the device, once a pass."""
    return good(batch if isinstance(batch, Mapping) else replace(batch, longest=None))


@replaces("streampack.attention.layout:prefix_keys")
def keys_of_prefixes_sent_to_the_device(good, batch):
    """The keys of shared prefixes are made on the host and copied, unpinned, for each forward pass."""
    found = good(batch)
    torch.zeros(found[2].shape, dtype=torch.int32).to(batch.tokens.device, non_blocking=True)
    return found


@replaces("streampack.training.data:join_documents")
def joined_sequences_as_long_as_a_document(good, batch):
    """Where documents are joined, kernels are told the length of the longest one, and compute no more of a sequence."""
    return replace(good(batch), longest=batch.longest)


@calling_inputs
def positions_of_images_by_their_tokens(inputs, batch):
    """Images have positions of text, as packers give them that know of one axis."""
    found = inputs(batch)
    if isinstance(batch, Batch) and batch.media is not None and batch.media.positions is not None:
        found["position_ids"] = batch.input_pos.expand(3, *batch.input_pos.shape)
    return found
