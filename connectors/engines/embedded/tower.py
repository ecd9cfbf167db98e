"""The tower of a model that sees pictures, as transformers has it, and what it makes of the pictures of a request.

Owns the tower's weights, which no step changes though trainers send them, and the features of pictures. The language model is in `model`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.connectors.engines.embedded.model import FIELD, Decoder, ModelError
from millrace.connectors.engines.embedded.sampling import RequestError
from millrace.connectors.engines.embedded.seen_images import SeenImages
from millrace.connectors.storage.images import LARGEST, ImageError, opened
from millrace.core.contracts.images import DATA_URL
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import Architecture
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.images import image_rules, sees_images
from millrace.core.families.picture_features import Features, picture_features
from millrace.core.families.registry import family_named

FEATURES = 256  # pictures whose features are kept


class Tower:
    """Sees pictures for one model."""

    def __init__(self, folder: Path, shape: Architecture, dtype: torch.dtype) -> None:
        """Raises ModelError if the folder does not hold the whole tower."""
        from transformers import AutoConfig, AutoModel

        try:
            self.rules = image_rules(str(folder), FIELD)
        except ConfigError as error:
            raise ModelError(str(error)) from error
        self._shape, self._dtype = shape, dtype
        self._prefix = family_named(shape.family).beside[0]
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.random.fork_rng(devices=[]):
            self._model = AutoModel.from_config(config.vision_config).to(dtype).eval()
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self.read(folder)

    def read(self, folder: Path) -> None:
        """Take the weights of a folder. Raises ModelError if it does not hold the whole tower."""
        try:
            stored = FolderTensors(str(folder), self._shape, FIELD, whole=False)
            tensors = {name: stored[name] for name in stored.kept if name.startswith(self._prefix)}
        except ConfigError as error:
            raise ModelError(str(error)) from error
        held, nothing = self.tensors, torch.empty(0)
        for name in sorted({*held, *tensors}):
            if held.get(name, nothing).shape != tensors.get(name, nothing).shape:
                raise ModelError(f"{FIELD} = {folder}: its tower is not whole: {name}")
        self.replace(tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by their names in a folder."""
        return {self._prefix + name: tensor for name, tensor in self._model.state_dict().items()}

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these weights, of names and shapes that it has. Features stay if none differs, as in a sync."""
        held = self.tensors
        changed = [name for name, tensor in tensors.items() if not held[name].equal(tensor.to(self._dtype))]
        for name in changed:
            held[name].copy_(tensors[name])
        if changed:
            self._kept.clear()

    def expanded(self, ids: Sequence[int], image_data: Any) -> tuple[list[int], SeenImages]:
        """A prompt with as many tokens for each picture as it has, of ids with one for each; and the pictures. Raises RequestError."""
        rules = self.rules
        given = [image_data] if isinstance(image_data, str) else image_data
        if not isinstance(given, list) or not given or not all(isinstance(item, str) for item in given):
            raise RequestError("image_data: data URLs of PNG files are wanted, one for each picture")
        places = sum(token == rules.token for token in ids)
        if places != len(given):
            raise RequestError(
                f"image_data: {len(given)} pictures, and input_ids has {places} places for them"
            )
        seen = [self._seen(number, item) for number, item in enumerate(given)]
        grids = [grid for _, grid, _ in seen]
        prompt = rules.expanded(ids, (parts[0].shape[0] for _, _, parts in seen))
        tokens = torch.tensor(prompt)
        features = tuple(torch.cat(each) for each in zip(*(parts for _, _, parts in seen), strict=True))
        key = hashlib.sha256("".join(name for name, _, _ in seen).encode()).hexdigest()
        positions = torch.from_numpy(rules.positions(prompt, grids).copy())
        return prompt, SeenImages(key, (tokens == rules.token).nonzero()[:, 0], features, positions)

    def _seen(self, number: int, url: str) -> tuple[str, tuple[int, int, int], tuple[Tensor, ...]]:
        """A picture's hash, its patches' grid and its features."""
        if not url.startswith(DATA_URL) or len(url) > LARGEST * 3 // 2:
            raise RequestError(
                f"image_data: number {number} is no data URL of a PNG file of at most {LARGEST} bytes"
            )
        try:
            data = base64.b64decode(url.removeprefix(DATA_URL), validate=True)
            name = hashlib.sha256(data).hexdigest()
            if name not in self._kept:
                self._kept[name] = self._features(data)
                while len(self._kept) > FEATURES:
                    self._kept.popitem(last=False)
        except (binascii.Error, ImageError) as error:
            raise RequestError(f"image_data: number {number}: {error}") from error
        return name, *self._kept[name]

    def _features(self, data: bytes) -> Features:
        pixels = opened(data)
        high, wide, _ = pixels.shape
        side = self.rules.side
        if high % side or wide % side:
            raise ImageError(f"{wide} x {high} pixels: both sides must be multiples of {side}")
        return picture_features(self._model, self.rules, pixels, self._dtype)


def tower_of(folder: Path, decoder: object) -> Tower | None:
    """The tower beside a decoder, which then gives pictures their positions; None if the model sees none."""
    if not isinstance(decoder, Decoder) or not sees_images(str(folder)):
        return None
    tower = Tower(folder, decoder.shape, decoder.weights.dtype)
    decoder.see(tower.rules.sections, tower.rules.interleaved)
    return tower
