"""The encoder of conversations with images: a chat encoder with a Hugging Face processor."""

from __future__ import annotations

import copy
import json
import os
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from streampack.fingerprint import digest
from streampack.packing.encoders.chat import ChatEncoder
from streampack.packing.encoders.conversation import ReadColumns, parts_of
from streampack.packing.encoders.pictures import MAX_BYTES, MAX_PIXELS, Folders, PictureReader, shorten
from streampack.packing.encoders.tokenizer import HFTokenizer
from streampack.packing.encoders.vision_template import (
    Content,
    VisionTemplate,
    is_image,
    split_at_images,
)
from streampack.packing.media import MediaSample
from streampack.packing.model_positions import position_rule
from streampack.packing.pretrained import load_pretrained
from streampack.packing.shapes import is_empty, plain_message
from streampack.storage.base import with_path
from streampack.storage.retries import Storage
from streampack.types import IGNORE_INDEX, Array, IntArray, Sample

OF_TEXT = frozenset((
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets",
))  # fmt: skip
"""Names in the output of a processor that belong to the text, and not to the images."""
ONE_TEXT = ("Idefics3", "SmolVLM")
"""Processors whose arrays have a first axis for texts; here it has one entry."""

MOST_FOLDERS = 64
"""Folders of data files whose readers of images are kept."""
MOST_OF_A_ROW = 4
"""The images of a row together have at most this times ``max_pixels``: they are in memory at once."""


class VisionEncoder(ChatEncoder):
    """Encoder of conversations with images; it trains the answers, and never the tokens of an image.

    Messages are those of `ChatEncoder`, and their tokens those of the processor's ``apply_chat_template``. An image is
    a part of a message's content, ``{"type": "image"}`` or OpenAI's ``image_url``, or an entry of the column of images,
    which parts without an image of their own take in their order. Without such parts, ``<image>`` in a text is one, as
    LLaVA and LLaMA-Factory write it; without that, the images come before the first message of the user, as in TRL. An
    image is a path, a URL, bytes, a ``data:`` URL, an array ``[height, width, 3]`` of uint8, or a picture of Pillow. If
    it is missing, broken or too large, that is an error of its row, which ``skip_bad`` counts and lists; a server that
    does not answer ends the run. Rows without images make plain samples.

    Args:
        processor: one of transformers, or a folder or name on the Hub.
        model: the model, its config, or their folder, for its own rule of positions. Models with positions of several
            axes (those of Qwen) need it, others do not.
        images: the column of the images. Default: ``"images"``, or ``"image"`` in rows without.
        folder: the folder of the images, or several; URLs, too. Relative paths are relative to the first. An image
            outside is an error. Default: the folder of the file that the row is in.
        anywhere: let rows name images outside the folder: any file that this process may read, any server.
        storage: how image files are read, as for sources. Its ``options`` are for files in the folders; of web
            servers, for the first.
        max_pixels: the most pixels of an image, by its header: a larger one is not decoded, and none of more than twice
            ``PIL.Image.MAX_IMAGE_PIXELS``. The processor makes smaller ones of what is left, by its own settings.
        max_bytes: the most bytes of an image's file.
        columns, roles, answers, ignore: as for `ChatEncoder`.

    Raises:
        ValueError: for a processor without a chat template, or that does not say what it makes of an image.
        ImportError: without Pillow.
    """

    reads_images = True

    def __init__(
        self,
        processor: Any,
        *,
        model: Any = None,
        images: str | None = None,
        folder: Folders = None,
        anywhere: bool = False,
        storage: Storage | Mapping[str, Any] | None = None,
        max_pixels: int = MAX_PIXELS,
        max_bytes: int = MAX_BYTES,
        columns: Mapping[str, str] | str | None = None,
        roles: Mapping[str, str] | None = None,
        answers: str = "all",
        ignore: Sequence[str] = (),
    ) -> None:
        if isinstance(processor, str | os.PathLike):
            from transformers import AutoProcessor

            processor = load_pretrained(
                AutoProcessor, processor, what="processor", file="preprocessor_config.json"
            )
        if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_processor"):
            raise ValueError(
                f"{type(processor).__name__} has no image_token and image_processor; give the processor of a "
                "vision-language model (transformers.AutoProcessor)"
            )
        tokenizer = HFTokenizer(copy.copy(processor.tokenizer))  # whose template may be another
        if template := getattr(processor, "chat_template", None):
            tokenizer.tokenizer.chat_template = template
        super().__init__(tokenizer, columns=columns, roles=roles, answers=answers, ignore=ignore)
        self.processor = processor
        self.images = images
        self.columns = ReadColumns("VisionEncoder", ignore=self.ignore)
        self.read_picture = PictureReader(folder, anywhere, storage, max_pixels, max_bytes)
        self._beside: dict[str, VisionEncoder] = {}
        self.rule = None if model is None else position_rule(model)
        named = [getattr(processor, f"{kind}_token", None) for kind in ("video", "audio")]
        ids = tokenizer.tokenizer.convert_tokens_to_ids([each for each in named if isinstance(each, str)])
        self.media_ids = {*processor.image_token_ids, *ids} - {None, tokenizer.tokenizer.unk_token_id}
        self.template = VisionTemplate(tokenizer, processor.image_token)

    def beside(self, path: str | None, /) -> VisionEncoder:
        """Return the encoder for the rows of a file, whose images are in the file's folder if no other was given."""
        if path is None or self.read_picture.homes:
            return self
        folder = with_path(path, posixpath.dirname)
        if folder not in self._beside:
            if len(self._beside) >= MOST_FOLDERS:
                self._beside.clear()
            own = self._beside[folder] = copy.copy(self)
            own.read_picture = replace(self.read_picture, folder=folder)
        return self._beside[folder]

    def fingerprint(self) -> str:
        """Return what decides pixels and not tokens: of the processor, its means and sizes."""
        return digest(
            type(self.processor.image_processor).__name__, self.processor.image_processor.to_json_string()
        )

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        row, contents = self._with_contents(row)
        given = [image for content in contents for image in content.images]
        media, expansions = self._processed(self._pictures(given))
        left = iter(expansions)
        for content in contents:
            content.expansions = list(islice(left, len(content.images)))
        sample = super().__call__(row)
        seen, end = np.zeros(sample.tokens.size, np.bool_), 0
        for expansion in expansions:
            start, end = self._place_of(expansion, sample.tokens, end)
            seen[start:end] = True
        # One of these would take another sample's image.
        for token in self.media_ids.intersection(sample.tokens[~seen].tolist()):
            shown = self.tokenizer.tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"a text has the token {shown}, which stands for an image, video or sound; write it in another way"
            )
        if not given:
            return sample
        shape = next(iter(media.values())).shape
        return MediaSample(
            sample.tokens,
            np.where(seen, IGNORE_INDEX, sample.labels),
            media=media,
            positions=None if self.rule is None else self.rule(sample.tokens, media),
            cost=shape[0] * (shape[1] if len(shape) == 5 else 1),  # images, or tiles of each
            images=len(given),
        )

    def _pictures(self, given: Sequence[Any]) -> list[Any]:
        """Read the images of a row."""
        pictures, most = list[Any](), MOST_OF_A_ROW * self.read_picture.max_pixels
        for number, image in enumerate(given):
            pictures.append(self._read(number, image))
            if sum(each.width * each.height for each in pictures) > most:
                raise ValueError(
                    f"image {number}: with those before it in the row it has more than {most:,} pixels "
                    f"({MOST_OF_A_ROW} * max_pixels); give a row fewer images, or raise max_pixels"
                )
        return pictures

    def _read(self, number: int, given: Any) -> Any:
        """Read an image; its number is in errors."""
        try:
            return self.read_picture(given)
        except ConnectionError as error:
            error.add_note(f"image {number}")
            raise
        except (ValueError, OSError, RuntimeError) as error:
            raise ValueError(f"image {number}: {shorten(str(error))}") from None

    def _processed(self, pictures: Sequence[Any]) -> tuple[dict[str, Array], list[str]]:
        """Return the arrays that pictures become, the pixels first, and what the placeholder of each becomes."""
        if not pictures:
            return {}, []
        text, kind = " ".join([self.processor.image_token] * len(pictures)), type(self.processor).__name__
        made = self.processor(
            images=[list(pictures)], text=[text], return_text_replacement_offsets=True, return_tensors="pt"
        )
        names = sorted(made.keys() - OF_TEXT, key=lambda name: name != "pixel_values")
        arrays = {name: made[name][0 if kind.startswith(ONE_TEXT) else ...].numpy() for name in names}
        return arrays, [each["replacement"] for each in made["text_replacement_offsets"][0]]

    def _place_of(self, expansion: str, tokens: IntArray, start: int) -> tuple[int, int]:
        """Return where the tokens of an image begin and end; space at its ends may share tokens with text."""
        run = self.tokenizer.encode(expansion.strip(), add_bos=False, add_eos=False)
        for first in np.flatnonzero(tokens[start:] == run[0]) + start:
            if np.array_equal(tokens[first : first + len(run)], run):
                return int(first), int(first) + len(run)
        raise ValueError(
            "the tokens of an image depend on the text around it, so nothing says which they are"
        )

    def _with_contents(self, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Content]]:
        """Return a row without its column of images, in whose messages each content is a `Content`; and those."""
        row = self.renamed(row)
        name = self.images or ("image" if is_empty(row.get("images")) else "images")
        value: Any = row.get(name)
        several = isinstance(value, list | tuple) or getattr(value, "dtype", None) == np.dtype(object)
        listed = [] if is_empty(value) else list(value) if several else [value]
        talks = {column: _messages_in(row.get(column), self.roles) for column in self._columns_of(row)}
        messages, left, contents = list(chain(*talks.values())), iter(listed), list[Content]()
        if listed and not any(is_image(part) for message in messages for part in parts_of(message)):
            for message in messages:
                message["content"] = split_at_images(parts_of(message)) or None
        if listed and not any(is_image(part) for message in messages for part in parts_of(message)):
            user = next((message for message in messages if message["role"] == "user"), None)
            if user is None:
                raise ValueError(
                    f"column {name!r} has images, and no message of the user is there to hold them"
                )
            user["content"] = [*({"type": "image"} for _ in listed), *parts_of(user)]
        for message in messages:
            if parts := parts_of(message):
                message["content"] = Content(parts, left, name)
                contents.append(message["content"])
        if spare := len(list(left)):
            has = f"column {name!r} has {len(listed)} images"
            raise ValueError(f"{has}, and the messages have parts for {len(listed) - spare} of them")
        rest = {column: value for column, value in row.items() if column != name}
        return rest | {column: talk for column, talk in talks.items() if talk}, contents


def _messages_in(value: Any, roles: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Return copies of the messages that a column holds; none of a text, and of what is refused when it is parsed."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    found = [value] if isinstance(value, Mapping) else value
    good = isinstance(found, list | tuple | np.ndarray) and all(
        isinstance(message, Mapping) and message.keys() & {"role", "from"} for message in found
    )
    return [plain_message(message, f"message {i}", roles) for i, message in enumerate(found)] if good else []
