"""The tokens at which engines stop by a checkpoint folder's files: `eos_token_id` of generation_config.json, else of config.json.

Owns reading it, and how an export names more of them. Knows nothing of tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GENERATION, CONFIG = "generation_config.json", "config.json"
# transformers reads these keys of config.json instead
OF_GENERATION = ("bos_token_id", "pad_token_id")


def engine_ends(folder: str | Path) -> list[int]:
    """Ids of the tokens at which engines stop by themselves. Empty if neither file names one."""
    for name in (GENERATION, CONFIG):
        eos = _read(Path(folder) / name).get("eos_token_id")
        if eos is not None:
            return [int(token) for token in eos] if isinstance(eos, list) else [int(eos)]
    return []


def name_ends(folder: Path, ends: Sequence[int]) -> None:
    """Make programs that generate from this folder stop at these tokens too."""
    named = engine_ends(folder)
    every = list(dict.fromkeys([*named, *ends]))
    if every == named:
        return
    path, config = folder / GENERATION, _read(folder / CONFIG)
    taken = {name: config[name] for name in OF_GENERATION if config.get(name) is not None}
    values = _read(path) if path.is_file() else taken
    # with this key transformers would take config.json's tokens
    values.pop("_from_model_config", None)
    values["eos_token_id"] = every if len(every) > 1 else every[0]
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}
