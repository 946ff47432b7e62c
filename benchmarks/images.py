"""Padding of packs of images and text, within two budgets, beside the lower bound, greedy packing and padded batches.

Run ``python -m benchmarks.images``; README.md in this folder explains the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks import report
from streampack import plan_packs

HEADER = "way | packs | above bound | padding | points above | max_media used"
STRATEGIES = ("exact_fit", "best_fit", "first_fit", "next_fit")
PATCHES = 4  # of an image for each of its tokens, as in models of Qwen
# Tokens of a pack; how many samples; median and sigma of their texts, which are log-normal; weights of the numbers of
# images; the least and most tokens of an image.
MIXES = {
    "web pages, 0 to 4 images": (8192, 12_000, 200, 1.0, (0.4, 0.35, 0.15, 0.06, 0.04), (16, 576)),
    "scans, 0 to 2 pages": (8192, 10_000, 150, 0.9, (0.15, 0.7, 0.15), (300, 1280)),
    "documents, 1 to 8 pages": (16_384, 6000, 150, 0.9, (0, *[0.125] * 8), (1000, 1280)),
}
# What a mix takes of all packs' max_media over what it takes of their max_seq_len.
RATIOS = (1.25, 1.0, 0.8)


def draw(name: str, *, part: float, seed: int) -> tuple[list[int], list[int]]:
    """Return tokens and patches of a part of the samples of a mix."""
    _, count, median, sigma, weights, (least, most) = MIXES[name]
    rng, count = np.random.default_rng(seed), int(part * count)
    texts = np.clip(median * np.exp(sigma * rng.standard_normal(count)), 16, 4000).astype(int).tolist()
    images = rng.choice(len(weights), count, p=weights)
    seen = [int(np.exp(rng.uniform(np.log(least), np.log(most), n)).astype(int).sum()) for n in images]
    return list(map(sum, zip(texts, seen, strict=True))), [PATCHES * tokens for tokens in seen]


def padded(lengths: list[int], media: list[int], max_seq_len: int, max_media: int) -> tuple[int, int]:
    """Pad batches of samples as they come, within both budgets; return how many batches, and their tokens."""
    batches, places, longest, samples, patches = 1, 0, 0, 0, 0
    for length, own in zip(lengths, media, strict=True):
        if max(longest, length) * (samples + 1) > max_seq_len or patches + own > max_media:
            batches, places = batches + 1, places + longest * samples
            longest, samples, patches = 0, 0, 0
        longest, samples, patches = max(longest, length), samples + 1, patches + own
    return batches, places + longest * samples


def section(name: str, ratio: float, *, part: float, seed: int) -> str:
    """Make packs and batches of a mix in every way; format the table."""
    lengths, media = draw(name, part=part, seed=seed)
    max_seq_len, tokens, patches = MIXES[name][0], sum(lengths), sum(media)
    max_media = max(round(patches / tokens * max_seq_len / ratio), *media)
    bound = max(math.ceil(tokens / max_seq_len), math.ceil(patches / max_media))
    ways = {"lower bound": (bound, bound * max_seq_len)}
    for each in STRATEGIES:
        packs = plan_packs(lengths, max_seq_len, strategy=each, media=media, max_media=max_media)
        ways[each] = (count := sum(1 for _ in packs), count * max_seq_len)
    ways["padded batches"] = padded(lengths, media, max_seq_len, max_media)
    least, rows = tokens / bound / max_seq_len, []
    for way, (made, places) in ways.items():
        full = tokens / places
        cells = [way, f"{made:,}", f"{made - bound:,}", f"{1 - full:.2%}", f"{100 * (least - full):.2f}"]
        rows.append([*cells, f"{patches / made / max_media:.1%}"])
    title = f"## {name}; max_seq_len {max_seq_len:,}, max_media {max_media:,}"
    counts = f"{len(lengths):,} samples, {tokens:,} tokens, {patches:,} patches."
    return "\n\n".join([title, counts, report.table(HEADER, rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    parser = report.parser(__doc__, smoke="a 50th of the samples")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (%(default)s)")
    options = parser.parse_args(arguments)
    part = 0.02 if options.smoke else 1.0
    found = [section(name, ratio, part=part, seed=options.seed) for name in MIXES for ratio in RATIOS]
    title = "Packing images and text within two budgets, buffer of 128 samples"
    about = f"Seed {options.seed}. Explained in ../README.md."
    report.publish(options, "images", title, about, *found, packages=["numpy"])


if __name__ == "__main__":
    main()
