"""The settings that decide which tokens share a pack, and what follows from them for one sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.accounting import trained_tokens
from streampack.packing.strategies import PADDED, STRATEGIES
from streampack.types import IGNORE_INDEX, Sample
from streampack.validation import refuse_text, require, require_multiple, require_positive

OVERLONG = ("error", "drop", "truncate", "truncate_left", "split")
BUFFER_SIZE = 128  # pieces, by default
SPLIT_HINT = "; for documents that continue in the next pack set split_across_pack=True"


@dataclass(frozen=True, slots=True)
class Packing:
    """The settings that decide which tokens share a pack. They are checked here, for every caller.

    ``overlong`` says what happens to a sample longer than ``max_seq_len``: ``"error"`` (the default), ``"drop"``,
    ``"truncate"`` (cuts off its end), ``"truncate_left"`` (cuts off its beginning) or ``"split"`` into several pieces.

    ``strategy`` is ``"exact_fit"`` by default. With ``split_across_pack=True``, every sample may continue in the next
    pack. Then a ``strategy`` is refused, and ``overlong`` is ``"split"`` by default. ``max_seqs_per_pack`` limits the
    sequences in a pack; None sets no limit.

    ``strategy="padded"`` packs nothing: each pack is one sample, as long as that sample, in the order of arrival, and a
    batch is padded to its longest sample. Then ``max_seq_len`` only limits the length of a sample, and ``buffer_size``
    and ``max_seqs_per_pack`` are refused.

    ``pad_seqs_to`` pads every sequence to a multiple of this number, inside the sequence. Context parallelism over n
    ranks needs 2 n, because it cuts each sequence into 2 n chunks. ``max_seq_len`` must be a multiple of it, so that
    the padding at a pack's end is one, too.

    ``max_media`` limits the media in a pack, in the unit of `MediaSample.cost`: patches of images, or images. None sets
    no limit.

    Raises:
        ValueError: for a setting that is out of range or unknown.
    """

    max_seq_len: int
    strategy: str | None = None
    buffer_size: int = BUFFER_SIZE
    split_across_pack: bool = False
    overlong: str | None = None
    max_seqs_per_pack: int | None = None
    pad_seqs_to: int = 1
    max_media: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "buffer_size", "max_seqs_per_pack", "pad_seqs_to", "max_media"):
            if getattr(self, name) is not None or name not in ("max_seqs_per_pack", "max_media"):
                object.__setattr__(self, name, require_positive(getattr(self, name), name))
        require_multiple(self.max_seq_len, "max_seq_len", self.pad_seqs_to, "pad_seqs_to")
        refuse_text(self.split_across_pack, "split_across_pack", "True or False")
        if self.strategy is None and not self.split_across_pack:
            object.__setattr__(self, "strategy", "exact_fit")
        if self.strategy is not None:
            require(self.strategy, "strategy", (*STRATEGIES, PADDED), hint=SPLIT_HINT)
            if self.split_across_pack:
                raise ValueError(
                    f"strategy={self.strategy!r} has no effect with split_across_pack=True, which fills packs in the "
                    "order of arrival; leave one of the two out"
                )
        if self.strategy == PADDED:
            self._refuse_unused()
        if self.overlong is None:
            object.__setattr__(self, "overlong", "split" if self.split_across_pack else "error")
        require(self.overlong, "overlong", OVERLONG)
        if self.split_across_pack and self.max_media is not None:
            raise ValueError(
                "split_across_pack=True fills packs in the order of arrival, and a sample with images is never split; "
                "leave it out, or max_media where nothing has images"
            )

    def _refuse_unused(self) -> None:
        for name, unset in (("buffer_size", BUFFER_SIZE), ("max_seqs_per_pack", None)):
            if (value := getattr(self, name)) != unset:
                raise ValueError(
                    f"{name}={value} has no effect with strategy={PADDED!r}, where each pack is one sample; leave "
                    f"{name} out, or pack by another strategy"
                )

    def pieces_of(self, length: int) -> list[tuple[int, int]]:
        """Return ``(start, stop)`` of each piece of a sample of ``length`` tokens; no pieces if it is dropped.

        Raises:
            ValueError: if it is too long or empty. The caller puts the sample's place before the message.
        """
        limit = self.max_seq_len
        if length < 1:
            raise ValueError(f"has {length} tokens; remove it, or drop empty samples before packing")
        if length <= limit or (self.split_across_pack and self.overlong == "split"):
            return [(0, length)]
        if self.overlong == "split":
            return [(start, min(start + limit, length)) for start in range(0, length, limit)]
        if self.overlong == "truncate":
            return [(0, limit)]
        if self.overlong == "truncate_left":
            return [(length - limit, length)]
        if self.overlong == "drop":
            return []
        raise ValueError(
            f"has {length} tokens, max_seq_len is {limit}; "
            "set overlong to 'split', 'truncate' or 'drop', or raise max_seq_len"
        )

    def padded(self, length: int) -> int:
        """Return the tokens that ``length`` tokens of a sample take in a pack."""
        return length + -length % self.pad_seqs_to

    def pack_len(self, used: int) -> int:
        """Return the length of a pack with ``used`` tokens before its trailing padding; ``used=0`` is a null pack."""
        return (used or self.pad_seqs_to) if self.strategy == PADDED else self.max_seq_len

    def cuts(self, length: int, start: int, stop: int) -> range:
        """Return where a sample of ``length`` tokens is cut, given that ``[start, stop)`` is one of its fragments.

        A cut at i separates tokens i - 1 and i. Any one fragment determines all cuts, because they are ``max_seq_len``
        tokens apart.
        """
        limit = self.max_seq_len
        if start == 0 and stop == length:
            return range(0)
        if not self.split_across_pack:
            return range(limit, length, limit)
        # The first cut is at the end of the pack in which the sample begins, after 1 to max_seq_len tokens. A fragment
        # that does not begin the sample begins at a later cut, or at this one.
        first_cut = stop if start == 0 else (start - 1) % limit + 1
        return range(first_cut, length, limit)

    @property
    def filled_by(self) -> str:
        """How packs are filled, for messages: the strategy, or ``split_across_pack``."""
        return self.strategy or "split_across_pack"

    @property
    def max_segments(self) -> int | None:
        """Limit on the segments of a pack, its sequences and its padding. None without ``max_seqs_per_pack``."""
        return None if self.max_seqs_per_pack is None else self.max_seqs_per_pack + 1


def trained_if_split(
    sample: Sample, start: int, stop: int, *, packing: Packing, isolated: bool = True
) -> int | None:
    """Return the number of trained tokens in all fragments of a sample; None if it is not split.

    ``[start, stop)`` is any one of the fragments. The result is the value of `Fragment.trained`. If samples are
    ``isolated``, the first label of every fragment is not trained. If they are not, it is trained unless the fragment
    begins a pack.

    >>> trained_if_split(Sample(np.arange(10), np.arange(10)), 4, 8, packing=Packing(4, overlong="split"))
    7
    """
    if start == 0 and stop == sample.tokens.size:
        return None
    bounds = packing.pieces_of(sample.tokens.size)
    kept_start, kept_stop = bounds[0][0], bounds[-1][1]  # what overlong leaves of the sample
    cuts = packing.cuts(kept_stop - kept_start, start - kept_start, stop - kept_start)
    if not cuts:
        return None
    kept = sample.cut(kept_start, kept_stop)
    if isolated:
        return trained_tokens(kept, cuts)
    # A new pack begins after each cut. The sample's first fragment also begins a pack if it fills one.
    pack_starts = [0, *cuts] if cuts[0] == packing.max_seq_len else cuts
    not_trained = sum(1 for start in pack_starts if kept.labels[start] != IGNORE_INDEX)
    return int(np.count_nonzero(kept.labels != IGNORE_INDEX)) - not_trained
