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
from torch.nn.functional import pad

from millrace.connectors.storage.images import StoredImages, opened
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.compute_type import compute_type
from millrace.connectors.trainers.packing import Pack, zigzag_positions
from millrace.core.config import RunConfig
from millrace.core.families.images import ImageRules, image_rules
from millrace.core.families.picture_features import Features, picture_features

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
        """tower: of the model, on the device in the type of computation."""
        self.rules: ImageRules = image_rules(config.model.path)
        self.marks = torch.tensor(self.rules.marks, device=device)
        compute = compute_type(config)
        self.tower = tower.requires_grad_(False)
        self._stored = StoredImages(Store(config.storage.root).child(config.run.name))
        self._device, self._dtype = device, compute
        self._kept: OrderedDict[str, Features] = OrderedDict()

    def of(self, pack: Pack, context: Any = None) -> SeenPack:
        """The positions of this rank's tokens of a pack, and the features of pictures that they stand for.

        context: the group of context parallel ranks, if there are several. Raises MissingFileError if a picture is gone.
        """
        parts, features = [], []
        for row, start, end in zip(pack.rows, pack.bounds, pack.bounds[1:], strict=False):
            seen = [self._seen(name) for name in row.images]
            found = torch.from_numpy(
                self.rules.positions(row.tokens.tolist(), [grid for grid, _ in seen]).copy()
            )
            parts.append(pad(found, (0, end - start - found.shape[1])))
            features += [each for _, each in seen]
        axes = torch.cat(parts, dim=1).to(self._device) if parts else None
        whole = tuple(torch.cat(each) for each in zip(*features, strict=True))
        marked = pack.input_ids[0] == self.rules.token
        if context is not None:
            own = zigzag_positions(pack.bounds, context.size(), context.rank()).to(self._device)
            axes = None if axes is None else axes[:, own]
            whole = self._of_tokens(pack, own[marked], whole)
        axes = pack.position_ids.expand(3, -1) if axes is None else axes
        places = marked.nonzero()[:, 0] if whole else pack.places[:0]
        return SeenPack(torch.cat([pack.position_ids, axes])[:, None], places, whole)

    def _of_tokens(self, pack: Pack, tokens: Tensor, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The features of some of the tokens that stand for pictures. whole: of all such tokens of the pack, in order."""
        marked = torch.zeros(pack.bounds[-1], dtype=torch.bool)
        for row, start in zip(pack.rows, pack.bounds, strict=False):
            marked[start : start + len(row.tokens)] = torch.from_numpy(row.tokens == self.rules.token)
        numbers = (marked.cumsum(0) - 1).to(self._device)
        return tuple(each[numbers[tokens]] for each in whole)

    def _seen(self, name: str) -> Features:
        """A picture's patches as a grid, and its features."""
        if name not in self._kept:
            pixels = opened(self._stored.read(name).png)
            self._kept[name] = picture_features(self.tower, self.rules, pixels, self._dtype, self._device)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]
