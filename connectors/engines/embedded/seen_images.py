"""The pictures of one prompt, as a decoder and its cache need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SeenImages:
    """The pictures of one prompt: where they are, what they are, and the rotary positions of the prompt's tokens."""

    key: str  # a hash of all pictures in their order
    places: Tensor  # [n] of the tokens that stand for pictures
    features: tuple[
        Tensor, ...
    ]  # [n, H] that replace their embeddings; then what is added after the first layers
    positions: Tensor  # [3, T]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenImages) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def behind(self) -> int:
        """How many positions fewer than tokens the prompt has."""
        return self.positions.shape[1] - 1 - int(self.positions.max())

    def at(self, length: int) -> Tensor:
        """Rotary positions [3, length] of the prompt's tokens and those after it."""
        more = torch.arange(self.positions.shape[1], length) - self.behind
        return torch.cat([self.positions, more.expand(3, -1)], dim=1)[:, :length]
