"""The picture of docs/guides/methods.md: twelve samples under every method of batching."""

from __future__ import annotations

from streampack.map_style.methods import METHODS, Row, plan_batches

SAMPLES = (11, 6, 7, 4, 8, 4, 3, 4, 3, 4, 5, 4)  # axolotl's example; 63 tokens
MAX_SEQ_LEN = 16
BATCH_SIZE = 4

# Sizes in pixels.
TOKEN, ROW, GAP = 7, 11, 6  # GAP is between batches
PANEL, COLUMNS = 29 * TOKEN, 3
TITLE, MARGIN = 16, 8


def planned(method: str) -> list[list[Row]]:
    """Return the batches of the twelve samples."""
    return plan_batches(method, SAMPLES, max_seq_len=MAX_SEQ_LEN, batch_size=BATCH_SIZE)


def draw() -> str:
    """Return the whole picture as SVG."""
    panels = []
    top = 0
    names = list(METHODS)
    for start in range(0, len(names), COLUMNS):
        line = [panel(name) for name in names[start : start + COLUMNS]]
        for column, (shapes, _) in enumerate(line):
            panels.append(f'<g transform="translate({column * PANEL + MARGIN} {top + MARGIN})">{shapes}</g>')
        top += max(height for _, height in line) + MARGIN
    size = f'width="{COLUMNS * PANEL + MARGIN}" height="{top + MARGIN}"'
    style = "text{font:10px sans-serif;fill:#000}.n{font-size:8px;text-anchor:middle}"
    style += ".p{fill:#ddd}.s{fill:none;stroke:#000}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, background, *panels, "</svg>"]) + "\n"


def panel(method: str) -> tuple[str, int]:
    """Draw one method's batches under its name; return shapes and height. A frame means: not isolated."""
    batches = planned(method)
    shapes = [f'<text y="10">{method}: {len(batches)} step{"s" * (len(batches) != 1)}</text>']
    top = TITLE
    for batch in batches:
        width = width_of(method, batch)
        for row in batch:
            shapes.append(draw_row(row, width=width, top=top))
            if row and not METHODS[method].isolated:
                used = sum(map(length_of, row)) * TOKEN - 1
                shapes.append(f'<rect class="s" y="{top}" width="{used}" height="{ROW - 1}"/>')
            top += ROW
        top += GAP
    return "\n".join(shapes), top


def width_of(method: str, batch: list[Row]) -> int:
    """Return the tokens of each row of a batch, padding included."""
    return MAX_SEQ_LEN if METHODS[method].packed else max(sum(map(length_of, row)) for row in batch)


def draw_row(row: Row, *, width: int, top: int) -> str:
    """Draw a row's samples, each with its number, over its padding in grey."""
    shapes = [f'<rect class="p" y="{top}" width="{width * TOKEN}" height="{ROW - 1}"/>']
    left = 0
    for span in row:
        size = length_of(span) * TOKEN
        colour = f"hsl({span.index * 150 % 360} 60% 75%)"  # hues of neighbours differ clearly
        shapes.append(
            f'<rect x="{left}" y="{top}" width="{size - 1}" height="{ROW - 1}" fill="{colour}"/>'
            f'<text class="n" x="{left + size / 2:g}" y="{top + 8}">{span.index + 1}</text>'
        )
        left += size
    return "\n".join(shapes)


def length_of(span: tuple[int, int, int]) -> int:
    """Return the tokens of a span."""
    _, start, stop = span
    return stop - start
