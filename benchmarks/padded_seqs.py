"""Padding of packs whose sequences are padded to a multiple (``pad_seqs_to``), beside the least that any packer needs.

Run ``python -m benchmarks.padded_seqs``; README.md in this folder explains the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import lengths as corpora
from benchmarks import report

MULTIPLES = (1, 4, 8, 16, 32, 64, 128)
HEADER = (
    "lengths",
    "pad_seqs_to",
    "packs",
    "lower bound",
    "padding",
    "in the bound",
    "points above",
    "at ends",
)


def row(name: str, multiple: int, *, count: int, max_seq_len: int, seed: int) -> list[str]:
    """Return a row of the table: the packs that ``exact_fit`` makes of the lengths called ``name``."""
    from streampack import plan_packs

    lengths = corpora.lengths(
        name, count=count, seed=seed, longest=min(corpora.LONGEST, max_seq_len)
    ).tolist()
    tokens, padded = sum(lengths), sum(length + -length % multiple for length in lengths)
    packs = sum(1 for _ in plan_packs(lengths, max_seq_len, pad_seqs_to=multiple))
    bound = corpora.lower_bound([padded], max_seq_len)
    padding, least = (1 - tokens / (number * max_seq_len) for number in (packs, bound))
    return [
        name,
        str(multiple),
        f"{packs:,}",
        f"{bound:,}",
        f"{padding:.2%}",
        f"{least:.2%}",
        f"{100 * (padding - least):.2f}",
        f"{(padded - tokens) / (packs * max_seq_len):.2%}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, print and write the table."""
    parser = report.parser(__doc__, smoke="300 samples")
    add = parser.add_argument
    add("--samples", type=int, default=20_000, help="samples of each distribution (%(default)s)")
    add("--max-seq-len", type=int, default=4096, help="tokens in a pack (%(default)s)")
    add("--seed", type=int, default=0, help="of the order of the samples (%(default)s)")
    options = parser.parse_args(arguments)
    count = 300 if options.smoke else options.samples
    rows = [
        row(name, multiple, count=count, max_seq_len=options.max_seq_len, seed=options.seed)
        for name in corpora.DISTRIBUTIONS
        for multiple in MULTIPLES
    ]
    report.publish(
        "padded-seqs",
        options,
        f"# Sequences padded to a multiple: {options.max_seq_len:,} tokens a pack, exact_fit",
        report.machine_line("streampack", "numpy"),
        f"{count:,} samples of each distribution, seed {options.seed}. Explained in ../README.md.",
        report.table(HEADER, rows),
    )


if __name__ == "__main__":
    main()
