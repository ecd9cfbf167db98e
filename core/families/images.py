"""How a model sees pictures: their size, their patches, the tokens that stand for them and the positions of these. No torch.

Owns the arithmetic of Qwen2-VL's image processor (Wang et al. 2024, section 2.1; transformers has it as Qwen2VLImageProcessor):
sides are rounded to whole tokens within bounds on the area, a token is a square of merged patches, and a rotary position has three
axes: time, row and column. Knows nothing of files of pictures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.errors import ConfigError
from millrace.core.families.config_file import read_object

PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # the second as transformers 5 writes it
LONGEST_SIDE = 200  # times the shorter one; processors refuse longer strips
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
SIDES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # names of areas in newer files
WHOLE = "take a whole checkpoint of a model that sees pictures"
NEEDED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}


class ImageSizeError(ValueError):
    """A picture that the model cannot be shown; the message says why."""


@dataclass(frozen=True)
class VisionFamily:
    """Models that see pictures. patch: pixels of a patch's side if config.json does not say. interleaved: whether the axes of
    rotary positions take turns among a head's dimensions, instead of one block each. sections: pairs of dimensions by axis."""

    patch: int
    interleaved: bool
    sections: tuple[int, int, int]


SEEING = {
    "qwen2_5_vl": VisionFamily(patch=14, interleaved=False, sections=(16, 24, 24)),
    "qwen3_vl": VisionFamily(patch=16, interleaved=True, sections=(24, 20, 20)),
    "qwen3_vl_moe": VisionFamily(patch=16, interleaved=True, sections=(24, 20, 20)),
}


@dataclass(frozen=True)
class ImageRules:
    """The picture settings of one model, in pixels, from its config.json and its processor's file."""

    patch: int  # side of a patch
    merge: int  # patches of a token's side
    frames: int  # times that a still picture is repeated in a patch
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float  # of a channel's value
    token: int  # the id that stands for a picture
    film: int  # the id that stands for a film, which no prompt may have
    marks: tuple[int, ...]  # ids that no answer may contain
    sections: tuple[int, int, int]
    interleaved: bool

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def fitted(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Width and height to which a picture is resized, so that it takes at most `most` tokens. Raises ImageSizeError."""
        long, short = max(width, height), min(width, height)
        if long > LONGEST_SIDE * short:
            raise ImageSizeError(
                f"{width} x {height} pixels: one side is more than {LONGEST_SIDE} times the other"
            )
        side, ceiling = self.side, min(self.max_pixels, most * self.side**2)
        floor = min(self.min_pixels, ceiling)
        high, wide = (round(pixels / side) * side for pixels in (height, width))
        if high * wide > ceiling:
            factor = math.sqrt(height * width / ceiling)
            high, wide = (max(side, math.floor(pixels / factor / side) * side) for pixels in (height, width))
        elif high * wide < floor:
            factor = math.sqrt(floor / (height * width))
            high, wide = (math.ceil(pixels * factor / side) * side for pixels in (height, width))
        if high * wide > ceiling:
            raise ImageSizeError(
                f"{width} x {height} pixels: it takes {self.tokens(wide, high)} tokens at least, and {ceiling // side**2} are allowed"
            )
        return wide, high

    def tokens(self, width: int, height: int) -> int:
        """Tokens that stand for a picture of a fitted size."""
        assert width % self.side == 0, "the picture is fitted"
        assert height % self.side == 0, "the picture is fitted"
        return (width // self.side) * (height // self.side)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches of a fitted picture: frames, rows and columns."""
        return 1, height // self.patch, width // self.patch

    def expanded(self, ids: Sequence[int], counts: Iterable[int]) -> list[int]:
        """Token ids in which each picture has as many as it takes, of ids with one for each. counts: by picture, in their order."""
        left = iter(counts)
        return [each for token in ids for each in ([token] * next(left) if token == self.token else [token])]

    def patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The patches [n, 3 * frames * patch * patch] of a fitted picture [height, width, 3], those of a token together."""
        high, wide, _ = pixels.shape
        mean, std = (np.array(three, dtype=np.float32) for three in (self.mean, self.std))
        values = (pixels.astype(np.float32) * np.float32(self.scale) - mean) / std
        m, p = self.merge, self.patch
        cut = values.transpose(2, 0, 1).reshape(3, high // self.side, m, p, wide // self.side, m, p)
        rows = cut.transpose(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, 3, patch, patch]
        repeated = np.repeat(rows[:, :, :, :, :, None], self.frames, axis=5)
        return np.ascontiguousarray(repeated.reshape(-1, 3 * self.frames * p * p))

    def positions(self, ids: Sequence[int], grids: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        """Rotary positions [3, T] of one sample's tokens: time, row and column. A text's tokens have the same on all axes.

        grids: of its pictures, in their order.
        """
        found: list[NDArray[np.int64]] = []
        at = position = 0
        for _, rows, columns in grids:
            rows, columns = rows // self.merge, columns // self.merge
            start = at + list(ids[at:]).index(self.token)
            found.append(_line(position, start - at))
            position += start - at
            row, column = np.divmod(np.arange(rows * columns), columns)
            found.append(np.stack([np.zeros_like(row), row, column]) + position)
            position += max(rows, columns)
            at = start + rows * columns
        found.append(_line(position, len(ids) - at))
        return np.concatenate(found, axis=1)


def _line(start: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, start + count), (3, count))


def sees_images(folder: str) -> bool:
    """Whether a folder's config.json names a model that can be shown pictures here."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return (
        isinstance(config, dict) and config.get("model_type") in SEEING and bool(config.get("vision_config"))
    )


def image_rules(folder: str, field: str = "model.path") -> ImageRules:
    """The picture settings of a folder's model. Raises ConfigError if it sees none, or in a way that is not built."""
    where = f"{field} = {folder}"
    config = read_object(Path(folder) / "config.json", where, WHOLE)
    family = SEEING.get(config.get("model_type", ""))
    vision = config.get("vision_config")
    if family is None or not isinstance(vision, dict):
        raise ConfigError(
            f"no pictures are shown to model_type {config.get('model_type')!r}",
            where=where,
            remedy=f"take a model of {', '.join(SEEING)}, or set images_key=null",
        )
    processor = _processor(folder, where)
    for name, needed in NEEDED.items():
        if processor.get(name, needed) is not needed:
            raise ConfigError(
                f"its processor has {name} = {processor[name]}, and only {needed} is supported",
                where=where,
                remedy=WHOLE,
            )
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    rotary = (text or {}).get("rope_parameters") or (text or {}).get("rope_scaling") or {}
    missing = [name for name in MARKS if not isinstance(config.get(name), int)]
    if missing:
        raise ConfigError(f"config.json has no {missing[0]}", where=where, remedy=WHOLE)
    patch, merge = vision.get("patch_size", family.patch), vision.get("spatial_merge_size", 2)
    for name, value in (("patch_size", patch), ("merge_size", merge)):
        if processor.get(name, value) != value:
            raise ConfigError(
                f"its processor has {name} = {processor[name]}, and config.json {value}",
                where=where,
                remedy=WHOLE,
            )
    side = patch * merge
    return ImageRules(
        patch=patch,
        merge=merge,
        frames=vision.get("temporal_patch_size", 2),
        min_pixels=processor.get("min_pixels", 4 * side**2),
        max_pixels=processor.get("max_pixels", 1280 * side**2),
        mean=_three(processor, "image_mean", where),
        std=_three(processor, "image_std", where),
        scale=processor.get("rescale_factor", 1 / 255),
        token=config["image_token_id"],
        film=config["video_token_id"],
        marks=tuple(config[name] for name in MARKS),
        sections=tuple(rotary.get("mrope_section", family.sections)),
        interleaved=family.interleaved,
    )


def _processor(folder: str, where: str) -> dict[str, Any]:
    """The image processor's settings. Raises ConfigError if the folder has none."""
    for name in PROCESSORS:
        path = Path(folder) / name
        if not path.is_file():
            continue
        held = read_object(path, where, WHOLE)
        found: dict[str, Any] = held.get("image_processor", held)
        sizes = found.get("size") or {}
        return {**{SIDES[key]: value for key, value in sizes.items() if key in SIDES}, **_given(found)}
    raise ConfigError(
        f"has no {PROCESSORS[0]}, which says how pictures are resized", where=where, remedy=WHOLE
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _three(processor: Mapping[str, Any], name: str, where: str) -> tuple[float, float, float]:
    value = processor.get(name)
    if not isinstance(value, list) or len(value) != 3:
        raise ConfigError(f"its processor has no {name} of three channels", where=where, remedy=WHOLE)
    return float(value[0]), float(value[1]), float(value[2])
