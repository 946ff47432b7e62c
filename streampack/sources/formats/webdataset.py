"""`WebDatasetSource`: tar files whose members of one base name are a sample, as WebDataset reads them."""

from __future__ import annotations

import json
import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.formats.lines import torn
from streampack.sources.mechanics.files import FileSource, divide, divide_scanned
from streampack.sources.mechanics.other_kinds import by_content
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.sources.reading import spread
from streampack.storage.base import ParallelMap, path_in
from streampack.storage.compression import COMPRESSED, DAMAGED, content
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher, RangeStream, tail_of
from streampack.storage.retries import Storage

log = logging.getLogger(__name__)
TAR = (*(f".tar{packed}" for packed in ("", *COMPRESSED)), ".tgz")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
IMAGES = ("jpg", "jpeg", "png", "webp")
DECODED = ("txt", "json", "cls", *IMAGES)
BLOCK = tarfile.BLOCKSIZE
MOST_BYTES = 1 << 28  # of a member that is read
PROBED_FILES = 16


class Member(NamedTuple):
    """A file in a tar."""

    begin: int  # byte of its first header
    end: int  # byte after it
    name: str
    data: bytes | Damage | None  # None if it was skipped

    @property
    def key(self) -> str:
        """Its path up to the first dot of the base name, which all members of a sample have."""
        folder, slash, base = self.name.rpartition("/")
        return folder + slash + base.partition(".")[0]

    @property
    def ending(self) -> str:
        """Extension after that dot, in lower case."""
        return self.name.rpartition("/")[2].partition(".")[2].lower()


class WebDatasetSource(FileSource):
    """The samples of WebDataset's tar files. A sample is the members that follow each other and share a base name.

    A row has the fields of the sample's ``.json``, ``text`` of its ``.txt``, ``cls`` of its ``.cls``, a list ``images``
    of the bytes of its ``.jpg``, ``.jpeg``, ``.png`` and ``.webp``, which `VisionEncoder` takes, and ``__key__``. Other
    members are skipped: the log names each kind once, and ``skipped`` counts them. A sample without a member that is
    read is no row.

    A tar of this machine is cut into lanes at samples; its headers are read once for that. A resume seeks to a sample.
    One behind a URL, or a compressed one, is not cut: if there are fewer than lanes, several lanes read the same one
    and take turns with its samples. A resume reads a compressed one from its beginning.

    >>> import io, tarfile, tempfile
    >>> from streampack.sources import Reading
    >>> path = tempfile.mkdtemp() + "/a.tar"
    >>> with tarfile.open(path, "w") as tar:
    ...     (member := tarfile.TarInfo("0001.txt")).size = 4
    ...     tar.addfile(member, io.BytesIO(b"Once"))
    >>> [row.data for row in WebDatasetSource(path).read(Reading())]
    [{'__key__': '0001', 'text': 'Once'}]

    Args:
        paths: files, folders or globs, see `JSONLSource`; ``shard-{000..146}.tar`` names 147 files. Of a folder, the
            ``.tar`` files in it, also compressed (``.tar.gz``, ``.tgz``, ...).
        manifest: see `JSONLSource`.
        storage: see `JSONLSource`.

    Raises:
        ValueError: as `JSONLSource`; when rows are read, for a tar without a member that is read, one that was cut off,
            and a member of more than 256 MiB.
    """

    unit = "byte"
    near = 1 << 18
    whole = "tar file"
    probed_by_bytes = True

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        if paths is not None:
            given = [paths] if isinstance(paths, str | os.PathLike) else paths
            paths = [name for path in given for name in expanded(os.fspath(path))]
        super().__init__(find_files(paths, manifest=manifest, endings=TAR, storage=storage))
        self.skipped: Counter[str] = Counter()

    @override
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        if not self.local:
            return divide(self.files.sizes, num_lanes, whole=range(len(self.files)))
        scanned = set(np.flatnonzero(self.sizes).tolist()) - self.files.packed
        return divide_scanned(
            self.files,
            num_lanes,
            scanned=scanned - self.bad.keys(),
            starts_after=self._starts_after,
            parallel_map=parallel_map,
            least=BLOCK,
        )

    @override
    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        file = self.files[part.file]
        begin = offset if file.seekable else 0
        stop = part.stop if file.seekable and part.stop is not None else file.size
        stream = RangeStream(fetcher, file, begin, stop, tail=tail_of(begin, stop))
        opened = content(stream, name=path_in(file.path))
        at = begin
        try:
            head = b"" if begin else opened.peek(BLOCK)[:BLOCK]
            if head[257:262] != b"ustar" and (problem := by_content(file.shown, head)) is not None:
                raise Damage(problem, offset=0)
            found, first = False, None
            archive = tarfile.open(fileobj=opened, mode="r|", tarinfo=_Strict)  # noqa: SIM115 - closes nothing
            for sample in samples(members(archive, begin, part.stop, wanted=self._wanted)):
                first = first or sample[0].name
                at = sample[-1].end
                kept = [member for member in sample if member.data is not None]
                found = found or bool(kept)
                if kept and sample[0].begin >= offset:
                    yield sample[0].begin, kept, at
        except DAMAGED as error:
            raise torn(at, error) from None
        except tarfile.ReadError as error:
            what = f"the tar is damaged or cut off after byte {at:,} ({error}); copy it again"
            raise Damage(what, offset=at) from None
        if not begin and not found and part.stop in (None, file.size):
            what = f"its first member is {first}" if first else "it is empty"
            raise Damage(f"no member of it ends in .{', .'.join(DECODED)}; {what}", offset=0)

    @override
    def decode(self, part: Part, offset: int, raw: Sequence[Member]) -> Mapping[str, Any]:
        row: dict[str, Any] = {"__key__": raw[0].key}
        # The fields of the .json come first, so that none of them takes another member's place.
        for member in sorted(raw, key=lambda member: not member.ending.endswith("json")):
            try:
                row |= _decoded(member, row.get("images", []) if _kind(member) in IMAGES else [])
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{member.name}: {error}") from None
        return row

    @override
    def natural_lanes(self) -> int:
        """Return one lane per MiB of tars that can be cut, and one for each other."""
        whole = set(range(len(self.files))) if not self.local else self.files.packed
        return sum(1 if n in whole else max(1, size >> 20) for n, size in enumerate(self.files.sizes))

    @override
    def sample(self, count: int) -> tuple[list[Example], float]:
        """Return the first rows of up to 16 files."""
        sound = [number for number in range(len(self.files)) if number not in self.bad]
        some = [sound[i] for i in spread(len(sound), PROBED_FILES)]
        found, read = list[Example](), 0.0
        for number in some:
            rows, end = self._first(number, -(-count // len(some)))
            found, read = found + rows, read + end
        return found, sum(self.files.sizes) / max(1, read)

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return the first rows of the first file."""
        return self._first(next(n for n in range(len(self.files)) if n not in self.bad), count)[0]

    def _first(self, number: int, count: int) -> tuple[list[Example], float]:
        """Return the first rows of a file, and how many stored bytes they take."""
        found, file, fetcher = list[Example](), self.files[number], self.fetcher()
        end, whole = 0, True
        try:
            for offset, raw, after in self.records(Part(number), 0, fetcher):
                if len(found) == count:
                    whole = False
                    break
                found.append(example((number, offset), partial(self.decode, Part(number), offset, raw)))
                end = after
        except (ValueError, FileNotFoundError):  # training reports it
            found.append(Example((number, end), None))
        return found, file.size if whole else end if file.seekable else fetcher.bytes

    def _wanted(self, name: str) -> bool:
        ending = name.rpartition(".")[2].lower()
        if ending in DECODED:
            return True
        self.skipped[ending] += 1
        if self.skipped[ending] == 1:
            log.warning("members such as %s are skipped: .%s is not read", name, ending)
        return False

    def _starts_after(self, number: int, at: Sequence[int]) -> Sequence[int]:
        """Return for each of some bytes of a tar of this machine where the next sample begins."""
        found, size, usable = list[int](), self.files[number].size, False
        try:
            with tarfile.open(self.files[number].path, "r:", tarinfo=_Strict) as archive:
                for sample in samples(members(archive, 0, wanted=lambda name: False)):
                    usable = usable or any(_kind(member) in DECODED for member in sample)
                    while len(found) < len(at) and sample[0].begin >= at[len(found)]:
                        found.append(sample[0].begin)
        except (FileNotFoundError, tarfile.ReadError):
            pass  # is raised again where the part is read
        found = found if usable else []  # else it is one part, which says so
        return [*found, *[size] * (len(at) - len(found))]


def expanded(path: str) -> list[str]:
    """Return the names that a path with WebDataset's braces stands for.

    >>> expanded("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    if (found := BRACES.search(path)) is None:
        return [path]
    first, last = found.groups()
    before, after = path[: found.start()], path[found.end() :]
    numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in expanded(f"{before}{number}{after}")]


class _Strict(tarfile.TarInfo):
    """A member's header. `TarFile` itself takes a broken one for the end, and a missing end for one."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def members(
    archive: tarfile.TarFile, base: int, stop: int | None = None, *, wanted: Callable[[str], bool]
) -> Iterator[Member]:
    """Yield the files in a tar, whose bytes are read from byte ``base`` on, up to the first sample from ``stop`` on."""
    key: str | None = None  # of the last one
    for info in archive:
        archive.members = []  # type: ignore[attr-defined] # else they would all be kept
        begin, end = base + info.offset, base + archive.offset
        member = Member(begin, end, info.name.removeprefix("./"), None)
        if not info.isreg() or member.name.rpartition("/")[2].startswith("."):
            continue
        if stop is not None and begin >= stop and member.key != key:
            return
        if wanted(member.name):
            file = archive.extractfile(info) if info.size <= MOST_BYTES else None
            what = f"it has {info.size:,} bytes, {MOST_BYTES:,} at most are read"
            member = member._replace(data=file.read() if file else Damage(what, offset=begin))
        key = member.key
        yield member


def samples(found: Iterable[Member]) -> Iterator[list[Member]]:
    """Yield the members of each sample."""
    sample = list[Member]()
    for member in found:
        if sample and member.key != sample[0].key:
            yield sample
            sample = []
        sample.append(member)
    if sample:
        yield sample


def _kind(member: Member) -> str:
    return member.ending.rpartition(".")[2]


def _decoded(member: Member, images: list[bytes]) -> Mapping[str, Any]:
    """Return the columns of a member. ``images`` are those of the members before."""
    if isinstance(member.data, Damage):
        raise member.data
    assert member.data is not None
    kind = _kind(member)
    if kind in IMAGES:
        return {"images": [*images, member.data]}
    if kind == "cls":
        return {"cls": int(member.data)}
    if kind == "txt":
        return {"text": member.data.decode()}
    value = json.loads(member.data)
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, this is a {type(value).__name__}")
    return value
