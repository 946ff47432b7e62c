"""Pictures of how packing works, drawn from real plans: ``python -m docs.drawings`` writes them.

tests/test_docs.py compares them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lengths import lengths
from docs import methods_picture
from streampack import IterablePackedDataset, collate_packed, make_mask, plan_packs
from streampack.streaming.mixing import mixing

FOLDER = Path(__file__).resolve().parent / "pictures"

# Sizes in pixels. 480 wide, so that on a telephone the letters are still readable.
WIDTH, MARGIN, LETTER = 480, 12, 13
LINE = 20
SAMPLES = [int(length) for length in lengths("orca", count=20, seed=5, longest=1024)]
MAX_SEQ_LEN = 1024

Span = tuple[int, int]  # the number of a sample, and its tokens


class Picture:
    """SVG shapes, from the top down, on a white sheet that is readable in light and dark pages."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.shapes: list[str] = []
        self.top = MARGIN

    def text(
        self, text: str, *, left: float = MARGIN, anchor: str = "start", kind: str = "t", below: int = 0
    ) -> None:
        """Write a line at the current height, which does not move."""
        top = self.top + LETTER + below
        self.shapes.append(
            f'<text class="{kind}" x="{left:g}" y="{top:g}" text-anchor="{anchor}">{text}</text>'
        )

    def line(self, text: str, *, kind: str) -> None:
        """Write a line, and go to the next."""
        self.text(text, kind=kind)
        self.down(LINE - 2)

    def box(self, left: float, width: float, height: float, *, fill: str, kind: str = "") -> None:
        """Draw a rectangle at the current height, which does not move."""
        name = f' class="{kind}"' if kind else ""
        self.shapes.append(
            f'<rect{name} x="{left:g}" y="{self.top:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'
        )

    def down(self, pixels: float) -> None:
        self.top += pixels

    def svg(self) -> str:
        height = self.top + MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
                f'height="{height:g}" role="img" aria-label="{self.title}">',
                f"<title>{self.title}</title>",
                "<style>text{font:13px sans-serif;fill:#222}.b{font-weight:bold}.n{font-size:11px}"
                ".m{font:11px monospace}.s{stroke:#fff}</style>",
                '<defs><pattern id="p" width="6" height="6" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><rect width="6" height="6" fill="#eee"/>'
                '<rect width="2" height="6" fill="#bbb"/></pattern></defs>',
                '<rect width="100%" height="100%" rx="6" fill="#fff"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def colour(sample: int) -> str:
    """Return the colour of a sample; those of neighbours differ clearly."""
    return f"hsl({sample * 137 % 360} 60% {78 - sample % 3 * 7}%)"


PADDING = "url(#p)"


def draw_rows(picture: Picture, heading: str, rows: Sequence[Sequence[Span]]) -> None:
    """Draw rows of samples, each with its number, over their padding, under a heading that counts both."""
    real = sum(length for row in rows for _, length in row)
    padding = 100 - 100 * real / (len(rows) * MAX_SEQ_LEN)
    picture.text(heading, kind="b")
    picture.text(f"{len(rows)} rows, {padding:.0f} % padding", left=WIDTH - MARGIN, anchor="end", kind="t")
    picture.down(LINE + 2)
    scale = (WIDTH - 2 * MARGIN) / MAX_SEQ_LEN
    for row in rows:
        picture.box(MARGIN, WIDTH - 2 * MARGIN, LINE - 4, fill=PADDING)
        left = float(MARGIN)
        for sample, length in row:
            width = length * scale
            picture.box(left, width, LINE - 4, fill=colour(sample), kind="s")
            if width > 16:
                picture.text(str(sample + 1), left=left + width / 2, anchor="middle", kind="n", below=-1)
            left += width
        picture.down(LINE)
    picture.down(10)


def planned(strategy: str) -> list[list[Span]]:
    """Return the packs that a strategy plans of the samples."""
    plan = plan_packs(SAMPLES, MAX_SEQ_LEN, strategy=strategy)
    return [[(span.index, span.stop - span.start) for span in pack] for pack in plan]


def padding_and_packing() -> str:
    picture = Picture("The same samples padded, and packed")
    draw_rows(picture, "padded", [[(i, length)] for i, length in enumerate(SAMPLES)])
    draw_rows(picture, "packed", planned("exact_fit"))
    return picture.svg()


def strategies() -> str:
    picture = Picture("Twenty samples in packs by each strategy")
    for strategy in ("next_fit", "first_fit", "best_fit", "exact_fit"):
        draw_rows(picture, strategy, planned(strategy))
    return picture.svg()


SMALL = [5, 4, 6, 3]
SMALL_PACK = 16


def small_pack() -> IterablePackedDataset:
    """Return a dataset whose first pack has three samples; the first token of each is a prompt."""
    rows = [
        {"tokens": [10 * (i + 1) + j for j in range(length)], "labels": [-100] * 2 + [1] * (length - 2)}
        for i, length in enumerate(SMALL)
    ]
    return IterablePackedDataset(rows, max_seq_len=SMALL_PACK, strategy="first_fit", num_lanes=1)


def segments_of(lengths: Sequence[int]) -> list[int]:
    """Return the number of the sample that each token is of."""
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def one_pack() -> str:
    """Draw the arrays of one pack, token by token."""
    pack = next(iter(small_pack()))
    picture = Picture("Tokens, positions and labels of one pack")
    segments = segments_of(pack["seq_lens"].tolist())
    left, width = 86, (WIDTH - 86 - MARGIN) / SMALL_PACK
    for name in ("tokens", "input_pos", "labels"):
        picture.text(name, kind="m")
        for column, value in enumerate(pack[name].tolist()):
            segment = segments[column]
            padding = segment >= pack["num_seqs"]
            trained = pack["labels"][column] != -100
            fill = PADDING if padding else colour(segment)
            picture.box(left + column * width, width - 1, LINE - 2, fill=fill)
            shown = "·" if name == "labels" and not trained else str(value)
            picture.text(shown, left=left + (column + 0.5) * width, anchor="middle", kind="m")
        picture.down(LINE)
    picture.down(4)
    picture.line(f"seq_lens  {pack['seq_lens'].tolist()}", kind="m")
    picture.line("· is -100: prompts, the first token of a sample, padding", kind="n")
    return picture.svg()


def mask() -> str:
    """Draw which token attends to which: in one sequence, and in a pack."""
    picture = Picture("Attention in a row without boundaries, and in a pack")
    batch = collate_packed([next(iter(small_pack()))])
    isolated = make_mask(batch, attention="dense")[0].tolist()
    segments = segments_of(batch.seq_lens[0].tolist())
    real = len([segment for segment in segments if segment < 3])
    side = (WIDTH - 3 * MARGIN) / 2 / SMALL_PACK
    second = MARGIN + SMALL_PACK * side + MARGIN
    picture.text("one sequence: causal", kind="b")
    picture.text("a pack: block-causal", left=second, kind="b")
    picture.down(LINE + 2)
    for query in range(SMALL_PACK):
        for key in range(SMALL_PACK):
            for left, seen in ((MARGIN, key <= query), (second, isolated[query][key])):
                if query >= real or key >= real:
                    fill = PADDING if seen and query == key else "#f6f6f6"
                else:
                    fill = colour(segments[query]) if seen else "#f6f6f6"
                picture.box(left + key * side, side - 1, side - 1, fill=fill)
        picture.down(side)
    picture.down(2)
    picture.line("a row: what that token sees (columns)", kind="n")
    return picture.svg()


def lanes() -> str:
    """Draw the packs of four lanes by step, and the rank that makes each, before and after a resume on more ranks."""
    rows = [{"input_ids": [5] * 8} for _ in range(200)]
    packs_per_step = 4

    def read_by(ranks: int) -> list[int]:
        """Return which rank reads each lane."""
        dataset = IterablePackedDataset(rows, max_seq_len=16, num_lanes=4)
        owners: dict[int, int] = {}
        for rank in range(ranks):
            owners |= {pack.lane: rank for pack in dataset.stream(rank, ranks)}
        return [owners[lane] for lane in range(4)]

    picture = Picture("Packs of four lanes by step, before and after a resume on more ranks")
    left, width, gap = 66, 97, 14
    places = [left + step * width + gap * (step > 1) for step in range(4)]
    for begin, text in ((0, "2 ranks"), (2, "killed, resumed on 4 ranks")):
        picture.text(text, left=places[begin] + width - 2, anchor="middle", kind="b")
    picture.down(LINE)
    for step, place in enumerate(places):
        picture.text(f"step {step}", left=place + width / 2, anchor="middle", kind="n")
    picture.down(LINE)
    before, after = read_by(2), read_by(4)
    for lane in range(4):
        picture.text(f"lane {lane}")
        for step, place in enumerate(places):
            rank = (before, after)[step > 1][lane]
            picture.box(place, width - 3, LINE, fill=colour(rank * 2))
            text = f"pack {step * packs_per_step + lane}, rank {rank}"
            picture.text(text, left=place + width / 2 - 1, anchor="middle", kind="n", below=1)
        picture.down(LINE + 4)
    return picture.svg()


def shuffle_reach() -> str:
    """Draw the order in which the rows of six files are read by one lane, for several shuffle windows."""
    files, rows = 6, 16
    picture = Picture("The order in which rows of six files are read, by shuffle window")
    width = (WIDTH - 2 * MARGIN) / (files * rows)
    with tempfile.TemporaryDirectory() as folder:
        for file in range(files):
            lines = [json.dumps({"input_ids": [file]}) + "\n" for _ in range(rows)]
            Path(folder, f"{file}.jsonl").write_text("".join(lines))
        for window in (0, 8, 24, files * rows):
            packs = IterablePackedDataset(
                f"{folder}/*.jsonl", max_seq_len=1, num_lanes=1, shuffle=window or False, untrained="keep"
            )
            [reach] = mixing(packs.lane_config, 1).values()
            picture.text(f"shuffle={window}" if window else "shuffle=False", kind="b")
            told = f"rows of one file lie within {reach.spread:.0%} of an epoch"
            picture.text(told, left=WIDTH - MARGIN, anchor="end")
            picture.down(LINE + 2)
            for place, pack in enumerate(packs):
                picture.box(MARGIN + place * width, width, LINE, fill=colour(int(pack["tokens"][0])))
            picture.down(LINE + 10)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "padding_and_packing.svg": padding_and_packing,
    "strategies.svg": strategies,
    "one_pack.svg": one_pack,
    "mask.svg": mask,
    "lanes.svg": lanes,
    "shuffle_reach.svg": shuffle_reach,
    "../guides/methods.svg": methods_picture.draw,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
