"""Files of a checkpoint: whatever pieces they are written in, they hold the bytes, and their hashes are those of the bytes."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import sys
from pathlib import Path

import pytest

from millrace.connectors.trainers.checkpoint.file_writer import PIECE, _Hashing

WRITES = {
    "nothing": [],
    "a byte": [1],
    "just under a piece": [PIECE - 1],
    "a piece": [PIECE],
    "just over a piece": [PIECE + 1],
    "many pieces at once": [5 * PIECE + 3],
    "small ones that add up to pieces": [PIECE // 3] * 10,
    "a header, a tensor, a header, a tensor": [64, 2 * PIECE + 7, 64, 3 * PIECE],
    "an empty write between": [10, 0, PIECE],
}


@pytest.mark.parametrize("name", WRITES)
def test_every_byte_is_written_and_hashed(tmp_path: Path, name: str) -> None:
    draw, hashing = random.Random(0), _Hashing()
    pieces = [draw.randbytes(size) for size in WRITES[name]]
    with hashing.create_stream(str(tmp_path / "file"), "wb") as stream:
        for piece in pieces:
            assert stream.write(piece) == len(piece)
        stream.flush()
    whole = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == whole
    (entry,) = hashing.entries
    assert (entry.path, entry.size) == ("file", len(whole))
    assert entry.sha256 == hashlib.sha256(whole).hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such hints")
def test_what_is_written_leaves_memory(tmp_path: Path) -> None:
    """At most the last pieces of a file are in the system's memory once it is written, where a file's can be given back at all."""
    content, plain = bytes(PIECE), tmp_path / "plain"
    with open(plain, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(plain):
        pytest.skip("this file system keeps its files in memory")
    with _Hashing().create_stream(str(tmp_path / "file"), "wb") as stream:
        for _ in range(16):
            stream.write(content)
    assert in_memory(tmp_path / "file") <= 3 * PIECE
    assert (tmp_path / "file").stat().st_size == 16 * PIECE


def in_memory(path: Path) -> int:
    """Bytes of a file that are in the system's memory."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        pages = (ctypes.c_ubyte * (-(-len(view) // mmap.PAGESIZE)))()
        first = ctypes.c_char.from_buffer(view)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view)), pages
        )
        del first  # the view is closed
        assert not failed
        return sum(page & 1 for page in pages) * mmap.PAGESIZE
