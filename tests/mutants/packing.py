"""Mutants of packing."""

from __future__ import annotations

from dataclasses import replace

from streampack import Batch, Group, Ledger
from streampack.packing.assemble import assemble, positions
from streampack.packing.groups import ROOT, lacks_training, pack_groups
from streampack.packing.media import stack_media
from streampack.packing.planner import Planner
from streampack.packing.settings import Packing
from tests.mutants.registry import replaces


@replaces(Planner, "next_pack")
def long_pieces_put_off(good, self):
    """The oldest piece goes to the buffer's end if it has more than half a pack, so it may wait without end."""
    if not self.offset and len(self.lengths) > 1 and self.lengths[0] > self.packing.max_seq_len // 2:
        self.waiting.append(self.waiting.pop(0))
        self.lengths.append(self.lengths.pop(0))
    return good(self)


@replaces(Planner, "__init__")
def few_pieces_to_choose_from(good, self, packing, pull):
    """However large ``buffer_size`` is, eight pieces wait at most, and packs are less full."""
    good(self, replace(packing, buffer_size=min(packing.buffer_size, 8)), pull)


@replaces(Planner, "__init__")
def no_limit_of_sequences_where_samples_continue(good, self, packing, pull):
    """With ``split_across_pack``, packs have more sequences than ``max_seqs_per_pack``."""
    good(self, replace(packing, max_seqs_per_pack=None) if packing.split_across_pack else packing, pull)


@replaces(assemble)
def last_first_label_trained(good, sequences, *, pad_seqs_to=1, **settings):
    """The last token of a pack's next to last sequence is trained to predict the first token of the last one."""
    tokens, labels = good(sequences, pad_seqs_to=pad_seqs_to, **settings)
    if len(sequences) > 2:
        start = sum(-(-each.tokens.size // pad_seqs_to) * pad_seqs_to for each in sequences[:-1])
        labels[start] = sequences[-1].labels[0]
    return tokens, labels


@replaces(positions)
def third_sequences_begin_at_1(good, packs, max_seq_len, *, starts=None):
    """The positions of each sequence from a pack's third on count from 1."""
    found = good(packs, max_seq_len, starts=starts)
    for row, seq_lens in zip(found, packs, strict=True):
        row[sum(seq_lens[:2]) : sum(seq_lens)] += 1
    return found


@replaces(lacks_training)
def groups_judged_as_one(good, sample):
    """A group lacks training only if none of its answers is trained, so a cut leaves pairs with an empty answer."""
    return all(map(good, sample.answers())) if isinstance(sample, Group) else good(sample)


@replaces(Packing, "pieces_of")
def very_long_samples_cut_at_the_other_side(good, self, length):
    """With ``overlong="truncate_left"``, a sample of more than twice a pack keeps its beginning, not its end."""
    found = good(self, length)
    cut = self.overlong == "truncate_left" and length > 2 * self.max_seq_len
    return [(0, self.max_seq_len)] if cut and found else found


@replaces(Ledger, "drop")
def cut_off_tokens_booked_as_overlong(good, self, reason, tokens, *, samples=1):
    """The ledger counts tokens that were cut off as those of samples that were dropped whole."""
    good(self, "overlong" if reason == "truncated" else reason, tokens, samples=samples)


@replaces(pack_groups)
def later_groups_continue_the_first_prompt(good, sequences, labels, *, max_seq_len):
    """In a pack of several groups, the answers of later ones see the first group's prompt instead of their own."""
    found = good(sequences, labels, max_seq_len=max_seq_len)
    own = [parent for each in sequences for parent in getattr(each, "parents", (ROOT,))]
    return replace(found, parents=tuple(own))


@replaces(Group, "truncated")
def ends_of_prompts_cut_off(good, self, limit, *, side):
    """With ``overlong="truncate_left"``, a group that is too long loses the ends of its prompts, not the beginnings."""
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


@replaces(Batch, "num_tokens")
def padding_within_sequences_counted(good, self):
    """The tokens of a batch, and so tokens per second, include the padding that ``pad_seqs_to`` puts in."""
    return sum(each.length for pack in self.fragments for each in pack)


@replaces(Planner, "next_pack")
def drift_bounded_as_at_the_beginning(good, self):
    """How many long pieces may wait follows from the packs since a resume, so it plans other packs than the run."""
    self.packs = getattr(self, "packs_since_resume", 0)
    self.packs_since_resume = self.packs + 1
    return good(self)


@replaces(Planner, "__init__")
def no_limit_of_media(good, self, packing, pull):
    """Packs take more media than ``max_media``."""
    good(self, replace(packing, max_media=None), pull)


@replaces(stack_media)
def pixels_of_the_last_pack_first(good, packs, input_pos):
    """Where two packs of a batch have as many rows of pixels, they are exchanged."""
    found = good(packs, input_pos)
    if found is None:
        return found
    rows = [sum(own) for own in found.rows.get("pixel_values", ())]
    if len(rows) > 1 and rows[-1] and rows.count(rows[-1]) > 1:
        pixels, first = found.tensors["pixel_values"], rows.index(rows[-1])
        a, b, size = sum(rows[:first]), sum(rows[:-1]), rows[-1]
        pixels[a : a + size], pixels[b : b + size] = (
            pixels[b : b + size].clone(),
            pixels[a : a + size].clone(),
        )
    return found
