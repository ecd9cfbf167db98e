"""Pictures of prompts: read from where a row names them, decoded with bounds, and kept in the run's folder once by their content.

A picture becomes plain RGB pixels in the size in which the model sees it, and is stored as PNG without anything else of the file
that it came from. Owns what is taken for a picture; knows nothing of models or prompts.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from millrace.connectors.storage.faults import is_transient, retried
from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.store import Store, split_url
from millrace.core.contracts.images import NAME, Given
from millrace.core.contracts.source_path import leaves
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LARGEST = 32 << 20  # bytes of a file
MOST_PIXELS = 32 << 20  # of a picture before it is resized; decoded these are 96 MiB
MOST_SCANS = 32  # of a JPEG; programs that write progressive ones make about ten
JPEG = b"\xff\xd8"  # how its files start
START_OF_SCAN = 0xDA  # a marker's second byte
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # of a JPEG's next segment
DATA = re.compile(r"data:([^,;]*)(;[^,]*)?,", re.IGNORECASE)
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
FOLDER = "images"
ENTRIES = 1 << 16  # of kept pictures that are remembered


class ImageError(ValueError):
    """Why a picture cannot be used: `kind of reason: details`."""


@dataclass(frozen=True)
class Picture:
    """A decoded picture: its pixels [height, width, 3] and its name, their hash."""

    name: str
    width: int
    height: int
    png: bytes


def read_given(given: Given, base: str | None) -> bytes:
    """The bytes of a picture's file. base: the folder from which relative paths count; None: there is none.

    Raises ImageError if there is no such file, or not one of a picture; StorageError if the storage does not answer.
    """
    if isinstance(given, bytes):
        return _bounded(given)
    if given[:5].lower() == "data:":
        return _bounded(_of_data_url(given))
    return _bounded(_of_file(_url(given, base)))


def decoded(data: bytes) -> Image.Image:
    """RGB pixels of a file in one of FORMATS; what is transparent becomes white, and only a film's first frame counts.

    Looks at the size before it decodes. Raises ImageError.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ImageError(f"bad image: {width} x {height} pixels, more than {MOST_PIXELS}")
        if data.startswith(JPEG) and _scans(data) > MOST_SCANS:
            raise ImageError(f"bad image: a JPEG that is drawn more than {MOST_SCANS} times over")
        image.load()
        upright = ImageOps.exif_transpose(image)
        return _of_16_bits(upright) if upright.mode.startswith("I;16") else _without_alpha(upright)
    except ImageError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise anything on a broken file
        raise ImageError(f"bad image: {_reason(error)}") from error


def picture_of(image: Image.Image, size: tuple[int, int]) -> Picture:
    """The picture in this width and height, as a model is shown it."""
    resized = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    return Picture(_name(resized), *size, as_stored(np.asarray(resized)))


def opened(png: bytes) -> NDArray[np.uint8]:
    """The pixels [height, width, 3] of a stored or sent PNG. Raises ImageError."""
    return np.asarray(decoded(png), dtype=np.uint8)


class StoredImages:
    """The pictures of a run's folder, by name."""

    def __init__(self, store: Store) -> None:
        """store: of the run's folder."""
        self._store = store
        self._entries: dict[str, FileEntry] = {}  # of what this process has kept, by name

    @staticmethod
    def path(name: str) -> str:
        """The path of a picture, relative to the run's folder."""
        assert NAME.fullmatch(name), "a picture's name is a hash"
        return f"{FOLDER}/{name[:2]}/{name}.png"

    def keep(self, pictures: Iterable[Picture]) -> list[FileEntry]:
        """The entries of pictures, each once, in the order of their names. Writes what is not there yet."""
        by_name = {picture.name: picture for picture in pictures}
        return in_threads(self._kept, [by_name[name] for name in sorted(by_name)])

    def read(self, name: str) -> Picture:
        """A picture. Raises MissingFileError if it is gone, CorruptFileError if it is not the one of this name."""
        path = self.path(name)
        url = self._store.url_of(path)
        data = self._store.read(path, LARGEST)
        try:
            image = decoded(data)
        except ImageError as error:
            raise CorruptFileError(str(error), where=url) from error
        if _name(image) != name:
            raise CorruptFileError("its pixels do not have the hash in its name", where=url)
        return Picture(name, *image.size, data)

    def _kept(self, picture: Picture) -> FileEntry:
        known = self._entries.get(picture.name)
        if known is not None:
            return known
        path = self.path(picture.name)
        # of another version of the encoder, the file of the same pixels may differ
        there = self._store.exists(path)
        entry = self._store.entry(path) if there else self._store.write(path, picture.png)
        if len(self._entries) >= ENTRIES:
            self._entries.clear()
        self._entries[picture.name] = entry
        return entry


def _bounded(data: bytes) -> bytes:
    if len(data) > LARGEST:
        raise ImageError(f"bad image: more than {LARGEST} bytes")
    return data


def _of_data_url(text: str) -> bytes:
    head = DATA.match(text[:200])
    if head is None or not (head[2] or "").lower().endswith(";base64"):
        raise ImageError("bad image: a data URL that is not in base64")
    if len(text) > LARGEST * 3 // 2:
        raise ImageError(f"bad image: more than {LARGEST} bytes")
    try:
        return base64.b64decode("".join(text[head.end() :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"bad image: a data URL that is not base64: {error}") from error


def _url(path: str, base: str | None) -> str:
    """The place of a file. A relative path stays in the folder of the data that names it."""
    if "\0" in path:
        raise ImageError("bad image: a path with a zero byte")
    scheme, separator, _ = path.partition("://")
    if separator and not SCHEME.fullmatch(scheme):
        raise ImageError(f"bad image: {path[:80]} is no path or URL")
    if separator or path.startswith("/"):
        return path
    if base is None:
        raise ImageError(
            f"missing image: {path[:80]}: a function's row has no folder; name it by its whole path"
        )
    if leaves(path):
        raise ImageError(f"bad image: {path[:80]} leads out of the folder of its data")
    return f"{base.rstrip('/')}/{path}"


def _of_file(url: str) -> bytes:
    web = url.lower().startswith(("http://", "https://"))
    try:
        store, name = split_url(url)
        # refuses a pipe or a device, which may never end
        size = store.local_size(name)
        if size is not None and size > LARGEST:
            raise ImageError(f"bad image: {size} bytes, more than {LARGEST}")
        return retried("read", url, lambda: _head(store, name), probe=web)
    except (ValueError, ImportError) as error:
        # fsspec does not know the kind of URL, or lacks a package for it
        raise (
            error if isinstance(error, ImageError) else ImageError(f"bad image: {url[:80]}: {error}")
        ) from error
    except MissingFileError as error:
        raise ImageError(f"missing image: {url[:200]}") from error
    except StorageError as error:
        # a row cannot stop a run by naming what is no file, or a host that is gone
        if web or error.__cause__ is None or not is_transient(error.__cause__):
            raise ImageError(f"missing image: {url[:200]}: {error.reason[:200]}") from error
        raise


def _head(store: Store, name: str) -> bytes:
    with store.fs.open(f"{store.root}/{name}", "rb") as file:
        data: bytes = file.read(LARGEST + 1)
    return data


def _scans(data: bytes) -> int:
    """How often a JPEG goes over its pixels. A scan may have 50 bytes, and takes as long as a decoding."""
    at, count = 2, 0
    while at + 4 <= len(data) and count <= MOST_SCANS:
        size = int.from_bytes(data[at + 2 : at + 4])
        if data[at + 1] == START_OF_SCAN:
            count += 1
            after = MARKER.search(data, at + 2 + size)
            at = after.start() if after else len(data)
        else:
            at += 2 + size
    return count


def _of_16_bits(image: Image.Image) -> Image.Image:
    """A grey picture by the upper half of its values: Pillow would cut them off at 255, so that all is white."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if clear is not None:
        grey[values == clear] = 255
    return Image.fromarray(grey).convert("RGB")


def _without_alpha(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or "transparency" in image.info:
        seen = image.convert("RGBA")
        ground = Image.new("RGBA", seen.size, "white")
        return Image.alpha_composite(ground, seen).convert("RGB")
    return image.convert("RGB")


def as_stored(pixels: NDArray[np.uint8]) -> bytes:
    """The PNG file of pixels [height, width, 3], with nothing else in it."""
    data = io.BytesIO()
    Image.fromarray(pixels, "RGB").save(data, "PNG")
    return data.getvalue()


def _name(image: Image.Image) -> str:
    width, height = image.size
    return hashlib.sha256(f"{width}x{height}:".encode() + image.tobytes()).hexdigest()


def _reason(error: Exception) -> str:
    text: Any = " ".join(str(error).split())
    if type(error).__name__ == "UnidentifiedImageError":
        return f"no picture of a kind that is read ({', '.join(FORMATS)})"
    return f"{type(error).__name__}: {text}"[:200]
