"""Pictures of random pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as a file."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()
