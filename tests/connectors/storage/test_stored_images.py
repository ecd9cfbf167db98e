"""Pictures of rows: read from wherever a row names them, refused with a reason, and kept once."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from millrace.connectors.storage import images
from millrace.connectors.storage.images import (
    FORMATS,
    ImageError,
    StoredImages,
    as_stored,
    decoded,
    opened,
    picture_of,
    read_given,
)
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, MissingFileError
from tests.support.noise import as_file, noise

PIXELS = noise(30, 20)
FILE = as_file(PIXELS)


def of_claimed_size(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


def of_many_scans(times: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    file = as_file(PIXELS, "JPEG", progressive=True)
    return file[:-2] + file[file.rindex(b"\xff\xda") : -2] * times + file[-2:]


HOSTILE = {
    "no picture": b"hello",
    "nothing": b"",
    "a page": b"<html><script>alert(1)</script></html>",
    "vector graphics": b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>',
    "a picture of a kind that is not read": as_file(PIXELS, "TIFF"),
    "cut off": FILE[: len(FILE) // 2],
    "a JPEG cut off": as_file(PIXELS, "JPEG")[:300],
    "more pixels than a picture may have": of_claimed_size(8192, 8192),
    "more than Pillow itself takes": of_claimed_size(100_000, 100_000),
    "a JPEG that takes minutes": of_many_scans(30),
    "a broken checksum": FILE[:40] + bytes([FILE[40] ^ 255]) + FILE[41:],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_picture_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ImageError, match="^bad image: ."):
        decoded(HOSTILE[name])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    image = decoded(as_file(PIXELS, kind))
    assert (image.mode, image.size) == ("RGB", PIXELS.size)
    if kind in ("PNG", "BMP"):
        assert image.tobytes() == PIXELS.tobytes()


def test_a_progressive_jpeg_is_read() -> None:
    assert decoded(of_many_scans(10)).size == PIXELS.size


def test_what_is_transparent_becomes_white_and_a_turned_photograph_upright() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decoded(as_file(clear)).getpixel((0, 0)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(as_file(PIXELS, "JPEG", exif=exif)).size == (20, 30)


def test_a_grey_picture_of_16_bits_keeps_its_shades() -> None:
    """It became white: Pillow cuts values off at 255."""
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    image = Image.fromarray(values)
    assert np.asarray(decoded(as_file(image))).tolist() == np.stack([values >> 8] * 3, axis=2).tolist()
    assert decoded(as_file(image, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_a_picture_is_stored_with_nothing_of_its_file_but_the_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret description"
    file = as_file(PIXELS, "PNG", icc_profile=b"secret profile", exif=exif)
    assert b"secret" in file
    picture = picture_of(decoded(file), PIXELS.size)
    assert picture == picture_of(decoded(as_file(PIXELS, "BMP")), PIXELS.size)
    assert b"secret" not in picture.png
    assert opened(picture.png).tolist() == np.asarray(PIXELS).tolist()


def test_a_picture_is_kept_once_by_its_content(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    kept = StoredImages(store)
    one, other = (picture_of(noise(20, 20, seed), (20, 20)) for seed in (1, 2))
    entries = kept.keep([other, one, one])
    assert [entry.path for entry in entries] == sorted(kept.path(each.name) for each in (one, other))
    before = {path: os.stat(tmp_path / path).st_mtime_ns for path in store.list()}
    assert kept.keep([one]) == [entry for entry in entries if entry.path == kept.path(one.name)]
    assert {path: os.stat(tmp_path / path).st_mtime_ns for path in store.list()} == before
    assert kept.read(one.name) == one


def test_a_picture_that_changed_or_is_gone_is_named(tmp_path: Path) -> None:
    kept = StoredImages(Store(str(tmp_path)))
    picture = picture_of(noise(20, 20), (20, 20))
    (entry,) = kept.keep([picture])
    (tmp_path / entry.path).write_bytes(as_stored(np.asarray(noise(20, 20, 9))))
    with pytest.raises(CorruptFileError, match="hash in its name"):
        kept.read(picture.name)
    (tmp_path / entry.path).write_bytes(b"<html>")
    with pytest.raises(CorruptFileError, match="bad image"):
        kept.read(picture.name)
    (tmp_path / entry.path).unlink()
    with pytest.raises(MissingFileError):
        kept.read(picture.name)


def test_pictures_are_read_from_paths_urls_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(FILE)
    with fsspec.filesystem("memory").open("/pictures/a.png", "wb") as file:
        file.write(FILE)
    encoded = base64.b64encode(FILE).decode()
    whole = str(tmp_path / "sub" / "a.png")
    for given in (
        *("sub/a.png", whole, f"file://{whole}", "memory://pictures/a.png", FILE),
        *(f"data:image/png;base64,{encoded}", f"DATA:;BASE64,{encoded[:9]}\n{encoded[9:]}"),
    ):
        assert read_given(given, str(tmp_path)) == FILE


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("no.png", "missing image: "),
        ("sub", "missing image: "),
        ("../a.png", "bad image: ../a.png leads out of the folder"),
        ("sub/../../a.png", "bad image: sub/../../a.png leads out"),
        ("a\0.png", "bad image: a path with a zero byte"),
        ("x" * 300, "missing image: "),
        ("unknown://host/a.png", "bad image: unknown://host/a.png"),
        ("simplecache::memory://pictures/a.png", "bad image: simplecache::memory"),
        ("s3://", "missing image: "),
        ("memory://nowhere/a.png", "missing image: "),
        ("data:image/png,abc", "bad image: a data URL that is not in base64"),
        ("data:image/png;base64,####", "bad image: a data URL that is not base64"),
        ("/dev/zero", "missing image: /dev/zero: "),
        ("http://127.0.0.1:9/a.png", "missing image: http://127.0.0.1:9/a.png"),
    ],
)
def test_a_place_without_a_picture_is_refused_with_a_reason(tmp_path: Path, given: str, reason: str) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(ImageError) as raised:
        read_given(given, str(tmp_path))
    assert str(raised.value).startswith(reason)


def test_a_row_of_a_function_has_no_folder() -> None:
    with pytest.raises(ImageError, match="missing image: a.png: a function's row has no folder"):
        read_given("a.png", None)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "LARGEST", 100)
    (tmp_path / "a.png").write_bytes(FILE)
    with fsspec.filesystem("memory").open("/pictures/large.png", "wb") as file:
        file.write(FILE)
    for given in (
        "a.png",
        "memory://pictures/large.png",
        FILE,
        f"data:;base64,{base64.b64encode(FILE).decode()}",
    ):
        with pytest.raises(ImageError, match="more than 100"):
            read_given(given, str(tmp_path))
