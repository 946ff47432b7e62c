"""Tokens as text in a terminal: what is trained, what is masked, and where sequences begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from streampack.streaming.lane_config import LaneConfig
from streampack.types import IGNORE_INDEX, Pack

if TYPE_CHECKING:
    from rich.text import Text

TRAINED, MASKED, SPECIAL, PADDING = "bold", "dim", "reverse", "dim italic"
LEGEND = "bold is trained, dim is masked, reversed is a special token"


def decoded_pack(pack: Pack, config: LaneConfig) -> Iterator[Text]:
    """Yield the lines of a pack: for each sequence, where it came from, and its text.

    Args:
        pack: any pack of a run.
        config: of its dataset; rows without a decoder are shown as ids.
    """
    from rich.text import Text

    source, start = config.source, 0
    for number, fragment in enumerate(pack.fragments, start=1):
        length = fragment.stop - fragment.start
        tokens, labels = (each[start : start + length].tolist() for each in (pack.tokens, pack.labels))
        trained = [label != IGNORE_INDEX for label in labels]
        of = f"{source.names[source.source_index(fragment.row_id)]}, " if source.names else ""
        part = f", from token {fragment.start:,} on" if fragment.start else ""
        yield Text(
            f"── sequence {number}: {of}{source.locate(fragment.row_id)}{part}; {length:,} tokens, "
            f"{sum(trained):,} trained" + (f", {fragment.padding:,} of padding" if fragment.padding else ""),
            style="cyan",
        )
        yield decoded(tokens, trained, decoder_of(config.encoder(fragment.row_id)))
        start += fragment.length
    if padding := pack.tokens.size - start:
        yield Text(f"── padding: {padding:,} tokens", style=PADDING)


def decoder_of(encode: Any) -> Callable[[list[int]], str] | None:
    """Return the function of an encoder that decodes ids; None if it has none."""
    return encode.decode if hasattr(encode, "decode") else None


def decoded(
    tokens: Sequence[int], trained: Sequence[bool], decode: Callable[[list[int]], str] | None
) -> Text:
    """Return tokens as one styled text; special tokens that their tokenizer does not write are shown as ``<id>``."""
    from rich.text import Text

    text, hidden = Text(), _Hidden(decode)
    # The first label of a sequence is never trained, so its state is that of the second.
    states = [*trained[1:2], *trained[1:]] if len(trained) > 1 else list(trained)
    kinds = [(state, hidden(token)) for token, state in zip(tokens, states, strict=True)]
    at = 0
    for (state, special), group in groupby(kinds):
        stop = at + len(list(group))
        run, style = list(tokens[at:stop]), TRAINED if state else MASKED
        if decode is None:
            text.append(" ".join(map(str, run)) + " ", style=style)
        elif special:
            for token in run:
                text.append(f"<{token}>", style=f"{style} {SPECIAL}")
        else:
            text.append(decode(run), style=style)
        at = stop
    return text


class _Hidden:
    """Tells the tokens that decode to nothing: torchtune's tokenizers leave special tokens out."""

    def __init__(self, decode: Callable[[list[int]], str] | None) -> None:
        self.decode = decode
        self.known: dict[int, bool] = {}

    def __call__(self, token: int) -> bool:
        if self.decode is None:
            return False
        if token not in self.known:
            self.known[token] = not self.decode([token])
        return self.known[token]
