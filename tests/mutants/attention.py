"""Mutants of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.mutants.registry import mutant, patch_function


@mutant
def masks_of_the_first_pack() -> None:
    """All packs of a batch get the dense mask of its first one."""
    from streampack.attention import dense_mask

    def make(good: Any) -> Any:
        def of_first(seq_lens: Any, **settings: Any) -> Any:
            return good(seq_lens[:1].expand_as(seq_lens), **settings)

        return of_first

    patch_function(dense_mask, make)


@mutant
def eight_sequences_in_a_block_mask() -> None:
    """A block mask knows the first eight sequences of a pack; those behind them see one another."""
    from streampack.attention import flex_mask

    def make(good: Any) -> Any:
        return lambda seq_lens, **settings: good(seq_lens[:, :8], **settings)

    patch_function(flex_mask, make)


@mutant
def packs_joined_where_one_ends() -> None:
    """``cu_seqlens`` lack the ends of packs: the last sequence of one sees into the first of the next."""
    from streampack.attention import cu_seqlens_of

    def make(good: Any) -> Any:
        def joined(seq_lens: Any, *, max_seq_len: int, **settings: Any) -> Any:
            ends = good(seq_lens, max_seq_len=max_seq_len, **settings)
            inner = (ends % max_seq_len == 0) & (ends < ends[-1])
            return ends.where(~inner, 0).cummax(0).values.to(ends.dtype)

        return joined

    patch_function(cu_seqlens_of, make)


@mutant
def window_without_the_token_itself() -> None:
    """A sliding window is one token short: the query's own token is counted beside it."""
    from streampack.attention import varlen_attention

    def make(good: Any) -> Any:
        def short(*qkv: Any, window: int | None = None, **settings: Any) -> Any:
            return good(*qkv, window=window and max(1, window - 1), **settings)

        return short

    patch_function(varlen_attention, make)


@mutant
def scores_scaled_behind_the_softcap() -> None:
    """Scores are capped before they are scaled, and so hardly ever below the softcap that is meant."""
    from streampack.attention import varlen_attention

    def make(good: Any) -> Any:
        def capped(q: Any, *kv: Any, scale: Any = None, softcap: Any = None, **settings: Any) -> Any:
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            return good(q, *kv, scale=scale, softcap=softcap and softcap * factor, **settings)

        return capped

    patch_function(varlen_attention, make)


@mutant
def answers_see_the_one_before() -> None:
    """Behind a shared prompt, an answer sees the answer before it."""
    change_inputs(lambda inputs, batch: inputs(chained(batch)))


@mutant
def boundaries_without_the_padding_of_sequences() -> None:
    """With ``pad_seqs_to``, boundaries are counted without padding, and each lies too early."""

    def early(inputs: Any, batch: Any) -> Any:
        return inputs(batch if isinstance(batch, Mapping) else replace(batch, seq_lens=batch.unpadded_lens))

    change_inputs(early)


@mutant
def dropout_of_the_attention_lost() -> None:
    """Preparing a torchtune model ends the dropout of its attention, because kernels have none."""
    from streampack.attention import prepare_model_for_packing

    def make(good: Any) -> Any:
        def prepare(model: Any, **settings: Any) -> Any:
            for module in model.modules():
                if isinstance(getattr(module, "attn_dropout", None), float):
                    module.attn_dropout = 0.0
            return good(model, **settings)

        return prepare

    patch_function(prepare_model_for_packing, make)


@mutant
def positions_of_later_packs_begin_at_1() -> None:
    """A transformers model gets positions from 1 on in all packs of a batch but the first."""

    def late(inputs: Any, batch: Any) -> Any:
        given = inputs(batch)
        if "position_ids" in given:
            given["position_ids"] = given["position_ids"].clone()
            given["position_ids"][..., 1:, :] += 1
        return given

    change_inputs(late)


@mutant
def states_go_on_into_the_third_sequence() -> None:
    """Convolutions and state-space layers take a pack's second and third sequence for one."""

    def joined(inputs: Any, batch: Any) -> Any:
        given = inputs(batch)
        if isinstance(batch, Mapping) or batch.seq_lens.shape[1] < 3:
            return given
        lengths = batch.seq_lens.clone()
        lengths[:, 1] += lengths[:, 2]
        lengths[:, 2:] = torch.nn.functional.pad(lengths[:, 3:], (0, 1))
        others = inputs(replace(batch, seq_lens=lengths))
        return given | {name: others[name] for name in ("packed_seq_lens", "seq_idx") if name in others}

    change_inputs(joined)


@mutant
def leaks_in_training_mode_missed() -> None:
    """``find_leaks`` says nothing of leaks that a model has in training mode only."""
    from streampack.attention import find_leaks

    def make(good: Any) -> Any:
        def blind(*args: Any, **settings: Any) -> Any:
            report = good(*args, **settings)
            return replace(report, leaks=tuple(leak for leak in report.leaks if not leak.training))

        return blind

    patch_function(find_leaks, make)


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


def change_inputs(call: Callable[[Any, Any], Any]) -> None:
    """Let prepared models be given ``call(inputs, batch)`` in place of ``inputs(batch)``."""
    from streampack.attention import prepare_model_for_packing

    def make(good: Any) -> Any:
        return lambda model, **settings: _Inputs(good(model, **settings), call)

    patch_function(prepare_model_for_packing, make)


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
    return replace(batch, groups=replace(groups, parents=parents))
