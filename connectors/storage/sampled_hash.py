"""The hash of a file by its size, its header and three samples: of weights that are too large to be read whole at each start."""

import hashlib
from pathlib import Path

SMALL = 32 << 20  # larger files are not hashed whole
SAMPLE = 1 << 16  # bytes hashed at three places of a larger file
HEADER = 8  # bytes with the length of a safetensors file's header


def sampled_hash(file: Path) -> str:
    """The hash of a small file covers it whole; of a weight file its size, its header (names, types and shapes) and three samples."""
    size = file.stat().st_size
    hashed = hashlib.sha256(str(size).encode())
    with file.open("rb") as handle:
        if size <= SMALL and file.suffix != ".safetensors":
            hashed.update(handle.read())
            return hashed.hexdigest()
        header = int.from_bytes(handle.read(HEADER), "little") if file.suffix == ".safetensors" else 0
        hashed.update(handle.read(min(header, SMALL)))
        for start in (HEADER + header, size // 2, max(0, size - SAMPLE)):
            handle.seek(start)
            hashed.update(handle.read(SAMPLE))
    return hashed.hexdigest()
