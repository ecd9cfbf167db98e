"""Pictures for a model under FSDP: its tower, which is never trained, and what it makes of the pictures of a pack.

Each rank holds the whole tower outside of FSDP, so that a rank whose packs have no pictures waits for none. Features of a picture
are the same in every step, and are kept. Knows nothing of losses.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from millrace.connectors.storage.images import StoredImages, opened
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.compute_type import compute_type
from millrace.connectors.trainers.packing import Pack
from millrace.core.config import RunConfig
from millrace.core.families.images import ImageRules, image_rules

KEPT = 512  # pictures whose features are kept


class SeenPack(NamedTuple):
    """What pictures put into a pack of T tokens."""

    positions: Tensor  # [4, 1, T] of the text, which start again in each sample, and on three axes
    places: Tensor  # [n] of the tokens that stand for pictures
    features: tuple[
        Tensor, ...
    ]  # [n, H] that replace their embeddings; then what is added after the first layers


class Sight:
    """Sees the pictures of the run's folder."""

    def __init__(self, config: RunConfig, tower: Module, device: Any) -> None:
        """tower: of the model, in any type."""
        self.rules: ImageRules = image_rules(config.model.path)
        self.marks = torch.tensor(self.rules.marks, device=device)
        compute = compute_type(config)
        self._tower = tower.to(device=device, dtype=compute).requires_grad_(False)
        self._stored = StoredImages(Store(config.storage.root).child(config.run.name))
        self._device, self._dtype = device, compute
        self._kept: OrderedDict[str, tuple[tuple[int, int, int], tuple[Tensor, ...]]] = OrderedDict()

    def of(self, pack: Pack) -> SeenPack:
        """The positions of a pack's tokens, and the features of its pictures. Raises MissingFileError if one of them is gone."""
        parts, features = [], []
        for row, start, end in zip(pack.rows, pack.bounds, pack.bounds[1:], strict=False):
            seen = [self._seen(name) for name in row.images]
            found = torch.from_numpy(
                self.rules.positions(row.tokens.tolist(), [grid for grid, _ in seen]).copy()
            )
            assert end - start == found.shape[1], "samples are not padded here"
            parts.append(found)
            features += [each for _, each in seen]
        axes = torch.cat(parts, dim=1).to(self._device) if parts else pack.position_ids.expand(3, -1)
        whole = tuple(torch.cat(each) for each in zip(*features, strict=True))
        places = (pack.input_ids[0] == self.rules.token).nonzero()[:, 0] if whole else pack.places[:0]
        return SeenPack(torch.cat([pack.position_ids, axes])[:, None], places, whole)

    def _seen(self, name: str) -> tuple[tuple[int, int, int], tuple[Tensor, ...]]:
        """A picture's patches as a grid, and its features."""
        if name not in self._kept:
            pixels = opened(self._stored.read(name).png)
            grid = self.rules.grid(pixels.shape[1], pixels.shape[0])
            patches = torch.from_numpy(self.rules.patches(pixels)).to(self._device, self._dtype)
            with torch.no_grad():
                out = self._tower(
                    patches, grid_thw=torch.tensor([grid], device=self._device), return_dict=True
                )
            self._kept[name] = grid, (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]
