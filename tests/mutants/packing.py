"""Mutants of packing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streampack import Batch, Group, Ledger
from streampack.packing.assemble import assemble, positions
from streampack.packing.groups import ROOT, pack_groups
from streampack.packing.planner import Planner
from streampack.packing.settings import Packing
from tests.mutants.registry import mutant, patch, patch_function


def with_settings(change: Any) -> Any:
    """Make a planner's ``__init__`` that takes the settings that ``change`` makes of those given."""
    return lambda good: lambda self, packing, pull: good(self, change(packing), pull)


@mutant
def long_pieces_put_off() -> None:
    """The oldest piece goes to the buffer's end if it has more than half a pack, so it may wait without end."""

    def make(good: Any) -> Any:
        def next_pack(self: Any) -> Any:
            begun = self.placed or self.offset
            if not begun and len(self.lengths) > 1 and self.lengths[0] > self.packing.max_seq_len // 2:
                self.waiting.append(self.waiting.pop(0))
                self.lengths.append(self.lengths.pop(0))
            return good(self)

        return next_pack

    patch(Planner, "next_pack", make)


@mutant
def few_pieces_to_choose_from() -> None:
    """However large ``buffer_size`` is, eight pieces wait at most, and packs are less full."""
    patch(
        Planner,
        "__init__",
        with_settings(lambda packing: replace(packing, buffer_size=min(packing.buffer_size, 8))),
    )


@mutant
def no_limit_of_sequences_where_samples_continue() -> None:
    """With ``split_across_pack``, packs have more sequences than ``max_seqs_per_pack``."""

    def change(packing: Packing) -> Packing:
        return replace(packing, max_seqs_per_pack=None) if packing.split_across_pack else packing

    patch(Planner, "__init__", with_settings(change))


@mutant
def last_first_label_trained() -> None:
    """The last token of a pack's next to last sequence is trained to predict the first token of the last one."""

    def make(good: Any) -> Any:
        def assembled(sequences: Any, *, pad_seqs_to: int = 1, **settings: Any) -> Any:
            tokens, labels = good(sequences, pad_seqs_to=pad_seqs_to, **settings)
            if len(sequences) > 2:
                start = sum(-(-each.tokens.size // pad_seqs_to) * pad_seqs_to for each in sequences[:-1])
                labels[start] = sequences[-1].labels[0]
            return tokens, labels

        return assembled

    patch_function(assemble, make)


@mutant
def third_sequences_begin_at_1() -> None:
    """The positions of each sequence from a pack's third on count from 1."""

    def make(good: Any) -> Any:
        def counted(packs: Any, max_seq_len: int, *, starts: Any = None) -> Any:
            found = good(packs, max_seq_len, starts=starts)
            for row, seq_lens in zip(found, packs, strict=True):
                row[sum(seq_lens[:2]) : sum(seq_lens)] += 1
            return found

        return counted

    patch_function(positions, make)


@mutant
def very_long_samples_cut_at_the_other_side() -> None:
    """With ``truncate_side="left"``, a sample of more than twice a pack keeps its beginning, not its end."""

    def make(good: Any) -> Any:
        def pieces(self: Any, length: int) -> Any:
            found = good(self, length)
            cut = self.overlong == "truncate" and length > 2 * self.max_seq_len
            return [(0, self.max_seq_len)] if cut and found else found

        return pieces

    patch(Packing, "pieces_of", make)


@mutant
def cut_off_tokens_booked_as_overlong() -> None:
    """The ledger counts tokens that were cut off as those of samples that were dropped whole."""

    def make(good: Any) -> Any:
        def drop(self: Any, reason: str, tokens: int, *, samples: int = 1) -> None:
            good(self, "overlong" if reason == "truncated" else reason, tokens, samples=samples)

        return drop

    patch(Ledger, "drop", make)


@mutant
def later_groups_continue_the_first_prompt() -> None:
    """In a pack of several groups, the answers of later ones see the first group's prompt instead of their own."""

    def make(good: Any) -> Any:
        def packed(sequences: Any, labels: Any, *, max_seq_len: int) -> Any:
            found = good(sequences, labels, max_seq_len=max_seq_len)
            own = [parent for each in sequences for parent in getattr(each, "parents", (ROOT,))]
            return replace(found, parents=tuple(own))

        return packed

    patch_function(pack_groups, make)


@mutant
def ends_of_prompts_cut_off() -> None:
    """With ``truncate_side="left"``, a group that is too long loses the ends of its prompts, not their beginnings."""

    def make(good: Any) -> Any:
        def truncated(self: Any, limit: int, *, side: str) -> Any:
            found = good(self, limit, side=side)
            if found is None or side == "right":
                return found
            index = [
                i
                for (start, _), length in zip(self.bounds, found.lengths, strict=True)
                for i in range(start, start + length)
            ]
            return Group(self.tokens[index], self.labels[index], lengths=found.lengths, parents=found.parents,
                         fields=found.fields, token_fields=found.token_fields)  # fmt: skip

        return truncated

    patch(Group, "truncated", make)


@mutant
def padding_within_sequences_counted() -> None:
    """The tokens of a batch, and so tokens per second, include the padding that ``pad_seqs_to`` puts in."""
    patch(
        Batch,
        "num_tokens",
        lambda good: lambda self: sum(each.length for pack in self.fragments for each in pack),
    )
