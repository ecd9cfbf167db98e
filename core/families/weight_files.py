"""The weight files of a checkpoint folder: their names, and the names of the tensors in them. No torch."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
ONLY_FILE = "model.safetensors"


def tensor_names(folder: Path) -> set[str]:
    """Names of the folder's tensors, by its index if it has one. None if they cannot be read; `weight_tensors` says why."""
    try:
        if (folder / INDEX).is_file():
            return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        with safe_open(folder / ONLY_FILE, "np") as file:
            return set(file.keys())
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return set()
