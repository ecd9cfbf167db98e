"""The weight files of a checkpoint folder: their names, how one starts, and the names of the tensors in them. No torch."""

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
ONLY_FILE = "model.safetensors"
ALIGNED = 8  # bytes that the length of a header is a multiple of


def file_start(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """What stands before the values in a safetensors file: of each tensor its name, stored type, shape and bytes, in the order of the values."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored, shape, size in tensors:
        start, end = end, end + size
        entries[name] = {"dtype": stored, "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNED)
    return struct.pack("<Q", len(header)) + header


def tensor_names(folder: Path) -> set[str]:
    """Names of the folder's tensors, by its index if it has one. None if they cannot be read; `weight_tensors` says why."""
    try:
        if (folder / INDEX).is_file():
            return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        with safe_open(folder / ONLY_FILE, "np") as file:
            return set(file.keys())
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return set()
