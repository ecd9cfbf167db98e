"""Rows with pictures and a tiny model that sees them, as a module of a user's that `run.prepare` calls."""

from __future__ import annotations

from typing import Any

MODEL, FILE = "seeing-model", "seen.jsonl"
ROWS = 24
MISSING = 4  # the row whose picture is not there
MODULE = f"""
import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from millrace.connectors.huggingface.tiny_vision import build_tiny_vision

SIDE = 32  # pixels of a token's side, at most


def prepare(config, kind="qwen2_5_vl"):
    if Path({FILE!r}).exists():
        return
    build_tiny_vision({MODEL!r}, kind)
    Path("drawn").mkdir(exist_ok=True)
    for number in range(6):
        shape = (SIDE * (1 + number % 3), SIDE * (1 + number % 2), 3)
        pixels = np.random.default_rng(number).integers(0, 255, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(f"drawn/{{number}}.png")
    partial = Path({FILE!r} + f".{{os.getpid()}}")
    partial.write_text("".join(json.dumps(row(number)) + "\\n" for number in range({ROWS})))
    partial.rename({FILE!r})


def row(number):
    \"\"\"Every third row has a picture, every third two, and one a picture that is not there.\"\"\"
    images = [f"drawn/{{(number + at) % 6}}.png" for at in range(number % 3)]
    prompt = "<image>" * len(images) + f"{{number}}+1="
    if number == {MISSING}:
        images = ["drawn/none.png"]
    return {{"prompt": prompt, "images": images, "label": str(number % 10)}}
"""
NAME = "seen_rows.py"  # of the module, beside the configuration
SETTINGS: dict[str, Any] = {
    "run.prepare": "seen_rows:prepare",
    "trainer.kind": "fsdp",
    "model.path": MODEL,
    "data.max_prompt_tokens": 64,
    "data.sources": [{"name": "seen", "path": FILE, "images_key": "images"}],
    "evaluation.sets": [
        {"name": "held_out", "path": FILE, "images_key": "images", "sampling": {"max_new_tokens": 16}}
    ],
}
