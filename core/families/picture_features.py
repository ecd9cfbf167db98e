"""What the tower of a model that sees makes of a picture, for trainer and embedded engine. The tower is transformers'."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.core.families.images import ImageRules

Features = tuple[tuple[int, int, int], tuple[Tensor, ...]]


@torch.no_grad()
def picture_features(
    tower: Any, rules: ImageRules, pixels: NDArray[np.uint8], dtype: torch.dtype, device: Any = "cpu"
) -> Features:
    """A picture's grid of patches, and features [n, H] of its n tokens: their embeddings, then what is added after the first layers.

    pixels: of the fitted picture [height, width, 3]. dtype, device: of the tower.
    """
    grid = rules.grid(pixels.shape[1], pixels.shape[0])
    patches = torch.from_numpy(rules.patches(pixels)).to(device, dtype)
    out = tower(patches, grid_thw=torch.tensor([grid], device=device), return_dict=True)
    return grid, (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
