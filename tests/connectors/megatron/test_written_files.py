"""Files of a checkpoint: whatever pieces they are written in, they hold the bytes, and their hashes are those of the bytes."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from millrace.connectors.megatron.checkpoint.file_writer import PIECE, _Hashing

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
