"""Contents of messages in parts, texts and images, and the chat template that renders them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from streampack.packing.encoders.conversation import read_part
from streampack.packing.encoders.pictures import KEYS
from streampack.packing.encoders.steps import Tokens
from streampack.packing.encoders.template import ChatTemplate, Messages
from streampack.packing.encoders.tokenizer import HFTokenizer

MARK = "<image>"


class Content(str):
    """A message's content in parts, for its template; as a text the last part, which is empty for an image.

    Args:
        parts: as rows give them.
        left: the images of the row's column; parts for images that have none of their own take the next.
        name: of the column.
    """

    parts: list[dict[str, Any]]
    images: list[Any]
    expansions: list[str]  # what the placeholder of each image becomes

    def __new__(cls, parts: Sequence[Any], left: Iterator[Any], name: str) -> Content:
        """Read the parts."""
        made, images, text = list[dict[str, Any]](), list[Any](), ""
        for part in parts:
            kind, text = read_part(part)
            if is_image(part):
                own = any(part.get(key) is not None for key in KEYS)
                images.append(part if own else next(left, None))
                if images[-1] is None:
                    raise ValueError(
                        f"there are more parts for images than images in column {name!r}, or one is null; "
                        "VisionEncoder(images=...) names another column"
                    )
                made, text = [*made, {"type": "image"}], ""
            elif kind == "text" and isinstance(text, str):
                made.append({"type": "text", "text": text})
            else:
                raise ValueError(
                    f"a message has a part that is {kind!r}, and a {type(text).__name__} as its text; only texts and "
                    "images can be packed"
                )
        self = super().__new__(cls, text)
        self.parts, self.images, self.expansions = made, images, []
        return self


class VisionTemplate(ChatTemplate):
    """A chat template whose placeholders of images become what the processor makes of them, before tokens are made."""

    def __init__(self, tokenizer: HFTokenizer, placeholder: str) -> None:
        texts, settings = [text for text, _ in tokenizer.chat.templates], tokenizer.chat.settings
        super().__init__(texts, settings=settings)
        self.placeholder = placeholder
        # As the processor does, which begins what the template begins in another way.
        self.bos = tokenizer.tokenizer.bos_token
        self.prefix = tokenizer.encode("", add_bos=None, add_eos=False)

    def begun(self, text: str, tokens: Tokens) -> Tokens:
        """See `ChatTemplate`."""
        if not self.prefix or (self.bos and text.startswith(self.bos)):
            return tokens
        starts = tokens.starts and [0] * len(self.prefix) + list(tokens.starts)
        return Tokens(self.prefix + tokens.ids, starts)

    def render(
        self, messages: Messages, *, tools: Any = None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """See `ChatTemplate`. Spans are those of the text in which images have their tokens."""
        given, expansions = [], list[str]()
        for message in messages:
            content, parts = message["content"], [{"type": "text", "text": message["content"]}]
            if isinstance(content, Content):
                parts = content.parts
                expansions += content.expansions
            given.append({**message, "content": parts})
        text, spans = super().render(given, tools=tools, prompt=prompt)
        first, *others = text.split(self.placeholder)
        if len(others) != len(expansions):
            raise ValueError(
                f"the chat template writes {len(others)} placeholder(s) of images ({self.placeholder}) for "
                f"{len(expansions)} image(s); texts may not hold it, and the template must write one for each image"
            )
        shifts = [0, *accumulate(len(each) - len(self.placeholder) for each in expansions)]

        def moved(place: int) -> int:
            return place + shifts[text.count(self.placeholder, 0, place)]

        whole = first + "".join(chain(*zip(expansions, others, strict=True)))
        return whole, spans and [(moved(start), moved(stop)) for start, stop in spans]


def is_image(part: Any) -> bool:
    """Return whether a part of a content stands for an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def split_at_images(parts: Sequence[Any]) -> list[Any]:
    """Return the parts of a content, with parts for images in place of each ``<image>`` in its texts.

    >>> split_at_images(["<image>What?"])
    [{'type': 'image'}, 'What?']
    """
    made = []
    for part in parts:
        _, text = read_part(part)
        if isinstance(text, str) and MARK in text:
            pieces = [[{"type": "image"}, piece] for piece in text.split(MARK)]
            made += [each for each in chain(*pieces) if each][1:]
        else:
            made.append(part)
    return made
