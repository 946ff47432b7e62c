"""Reads and decodes the images of rows (paths, URLs, bytes, arrays) within limits, as they may come from anywhere."""

from __future__ import annotations

import base64
import errno
import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from streampack.storage.base import FileStorage, gone, redact
from streampack.storage.listing import storage_of
from streampack.storage.remote import scheme_of
from streampack.storage.retries import PERMANENT, Refused, Storage
from streampack.validation import require_positive

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Accepted formats. Their decoders run no other program, and the size in the header bounds their memory. EPS would run
a program, and a tile of a TIFF may be larger than its image."""
KEYS = ("bytes", "image", "image_url", "url", "path", "value")
"""Keys under which a mapping holds an image: a part of a message's content, OpenAI's ``image_url``, datasets' feature
Image, or a part as in LLaMA-Factory."""
MAX_PIXELS = 1 << 25
MAX_BYTES = 1 << 26
MOST_SCANS = 100
"""Limit on the scans of a progressive JPEG, which usually has about ten. A scan of 60 bytes may take as long to decode
as the entire image, so a file of 64 MiB could take hours."""
MOST_SAID = 400  # characters of an error, whose path may be a file in base64 by mistake


Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


@dataclass
class PictureReader:
    """Reads images as RGB, upright and on a white background. Of an animation, it reads the first frame.

    The arguments are those of `VisionEncoder`.
    """

    folder: Folders
    anywhere: bool
    storage: Storage | Mapping[str, Any] | None
    max_pixels: int = MAX_PIXELS
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise ImportError("images need Pillow: pip install pillow") from error
        given = [self.folder] if isinstance(self.folder, str | os.PathLike | None) else self.folder
        self.homes = [_normal(os.fspath(each)) for each in given if each is not None]
        if not given:
            raise ValueError("folder=[] names no folder; give one, or leave it out")
        for each in self.homes:
            if scheme_of(each) is None and not Path(each).is_dir():
                raise ValueError(f"folder={each!r} is no folder; every image of a row would be missing")
        self.told = Storage.of(self.storage)
        require_positive(self.max_pixels, "max_pixels")
        require_positive(self.max_bytes, "max_bytes")
        # By scheme, and by whether they receive the options.
        self.storages: dict[tuple[str | None, bool], FileStorage] = {}

    def __call__(self, given: Any, /) -> Image:
        """Return the decoded image.

        Raises:
            ValueError: if it is missing, broken, too large, or not an image.
            ConnectionError: if it cannot be read now, but may be later.
        """
        from PIL import Image

        while isinstance(given, Mapping):
            given = next((given[key] for key in KEYS if given.get(key) is not None), None)
        if isinstance(given, str | os.PathLike):
            given = self._read(os.fspath(given))
        if isinstance(given, bytes | bytearray | memoryview):
            given = bytes(given)
            if len(given) > self.max_bytes:
                raise ValueError(f"it has {len(given):,} bytes, max_bytes is {self.max_bytes:,}")
            if given[:2] == b"\xff\xd8" and (scans := given.count(b"\xff\xda")) > MOST_SCANS:
                raise ValueError(f"it is a JPEG of {scans:,} scans; at most {MOST_SCANS} are decoded")
        elif not isinstance(given, Image.Image) and getattr(given, "ndim", 0) < 2:
            raise ValueError(
                f"it is {'null' if given is None else f'a {type(given).__name__}'}; give a path, a URL, the bytes of a "
                "file, an array [height, width, 3] of uint8, or a picture of Pillow"
            )
        try:
            with warnings.catch_warnings():
                # Pillow warns above 89 million pixels. The limit here is max_pixels.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                if isinstance(given, bytes):
                    given = Image.open(io.BytesIO(given), formats=FORMATS)  # reads the header only
                elif not isinstance(given, Image.Image):
                    self._require_size(*given.shape[1::-1])
                    given = Image.fromarray(given)
                return self._upright(given)
        except ValueError:
            raise
        except Exception as error:  # the decoders of the formats raise many types of exceptions
            why = str(error).partition(" <_io")[0]  # Pillow appends the address of the stream in memory
            raise ValueError(
                f"it cannot be decoded ({type(error).__name__}: {why}); formats are {', '.join(FORMATS)}, and arrays "
                "[height, width, 3] of uint8"
            ) from None

    def _read(self, path: str) -> bytes:
        if path[:5] == "data:":
            head, _, body = path.partition(",")
            if not head.endswith(";base64"):
                raise ValueError("its data: URL is not base64")
            return base64.b64decode(body, validate=True)
        path = path.removeprefix("file://")
        if self.homes and scheme_of(path) is None and not Path(path).is_absolute():
            path = f"{self.homes[0].rstrip('/')}/{path}"
        path = _normal(path)
        scheme, shown = scheme_of(path), redact(path)
        # Options for one web server, such as a token, must not be sent to others.
        homes = self.homes[:1] if scheme in ("http", "https") else self.homes
        inside = any(_is_inside(path, each) for each in homes) or not (
            self.homes or scheme in ("http", "https")
        )
        try:
            self._require_inside(path)
            if (scheme, inside) not in self.storages:
                told = self.told if inside else replace(self.told, options={})
                self.storages[scheme, inside] = storage_of([path], told, self._require_inside)
            storage = self.storages[scheme, inside]
            [path] = storage.pinned([path])
            file = storage.look(path)
            if not 0 <= file.size <= self.max_bytes:
                raise ValueError(f"{shown} has {file.size:,} bytes, max_bytes is {self.max_bytes:,}")
            # Known files are not looked up again. Only this one is kept, as a set of all images would keep growing.
            known = storage.own()[1]
            known.clear()
            known.add(file.path)
            return storage.fetch(file, 0, file.size)
        except FileNotFoundError as error:
            raise ValueError(f"{shown}: {gone(error, shown)}") from None
        except (OSError, ImportError) as error:
            never = (errno.ENAMETOOLONG, errno.ELOOP)
            if isinstance(error, PERMANENT) or getattr(error, "errno", None) in never:
                raise ValueError(str(error)) from None
            raise ConnectionError(
                f"{shorten(str(error))}; the row is not at fault, so the run ends: resume it when images can be read, "
                "or remove the row"
            ) from error

    def _require_inside(self, path: str) -> None:
        """Refuse a path, or the target of a server's redirect, that is outside all of the folders."""
        if self.anywhere or any(_is_inside(path, each) for each in self.homes):
            return
        why = ": the row is of no file that could give the folder of its images; name the folder (folder=...)"
        if self.homes:
            homes = " and ".join(map(redact, self.homes))
            why = f" leads out of the folder of images, {homes}; add its folder (folder=[...])"
        raise Refused(
            f"{redact(path)}{why}, or allow any path if you trust the rows (VisionEncoder(anywhere=True))"
        )

    def _upright(self, picture: Image) -> Image:
        from PIL import Image, ImageOps

        self._require_size(*picture.size)
        if picture.mode in ("F", "I"):
            raise ValueError(f"its mode is {picture.mode!r}, and nothing says which of its numbers is white")
        upright = ImageOps.exif_transpose(picture)
        if upright.mode[:4] == "I;16":  # Pillow would clip values above 255
            upright = Image.fromarray((np.asarray(upright) // 257).astype(np.uint8))
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")

    def _require_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1 or width * height > self.max_pixels:
            raise ValueError(
                f"it has {width:,} x {height:,} pixels, max_pixels is {self.max_pixels:,}; make it smaller beforehand, "
                "or raise max_pixels"
            )


def shorten(text: str) -> str:
    """Return a text, without its middle if it is long."""
    half = MOST_SAID // 2
    return text if len(text) <= MOST_SAID else f"{text[:half]} [...] {text[-half:]}"


def _normal(path: str) -> str:
    """Return a local path in the form that its storage reads, absolute and without ``..``; a URL unchanged."""
    return path if scheme_of(path) else os.path.normpath(Path(path).expanduser().absolute())


def _is_inside(path: str, folder: str) -> bool:
    if scheme_of(folder) is None:
        return scheme_of(path) is None and Path(path).resolve().is_relative_to(Path(folder).resolve())
    # A server may decode the path before it reads it.
    return path.startswith(f"{folder.rstrip('/')}/") and ".." not in re.split(r"[/\\]", unquote(path))
