"""How a model sees pictures: sizes, patches and positions as transformers has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from millrace.connectors.huggingface.tiny_vision import KINDS, build_tiny_vision
from millrace.core.errors import ConfigError
from millrace.core.families.images import SEEING, ImageRules, ImageSizeError, image_rules, sees_images
from tests.support.noise import noise

SIZES = [(28, 28), (133, 90), (30, 500), (1, 1), (640, 480), (57, 57), (2000, 20)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def rules(folder: Path) -> ImageRules:
    return image_rules(str(folder))


def test_every_kind_that_sees_is_tried() -> None:
    assert set(SEEING) == set(KINDS)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_the_processor_and_stay_when_fitted_again(
    rules: ImageRules, size: tuple[int, int]
) -> None:
    width, height = size
    most = rules.max_pixels // rules.side**2
    high, wide = smart_resize(height, width, rules.side, rules.min_pixels, rules.max_pixels)
    if high * wide > rules.max_pixels:
        # the processor lets a long strip have more than its limit
        with pytest.raises(ImageSizeError, match="allowed"):
            rules.fitted(width, height, most)
        return
    assert rules.fitted(width, height, most) == (wide, high)
    assert rules.fitted(wide, high, most) == (wide, high)


def test_a_picture_takes_at_most_the_tokens_that_it_may(rules: ImageRules) -> None:
    assert rules.tokens(*rules.fitted(640, 480, 4)) <= 4
    with pytest.raises(ImageSizeError, match="more than 200 times"):
        rules.fitted(1000, 4, 16)
    with pytest.raises(ImageSizeError, match="allowed"):
        rules.fitted(rules.side * 40, rules.side, 4)


def test_patches_are_the_processors(folder: Path, rules: ImageRules) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    image = noise(4 * rules.side, 3 * rules.side)
    found = processor([image], return_tensors="np")
    assert np.abs(rules.patches(np.asarray(image)) - found["pixel_values"]).max() < 1e-6
    assert [rules.grid(*image.size)] == [tuple(grid) for grid in found["image_grid_thw"].tolist()]


def test_positions_are_those_of_the_model_and_of_plain_text(folder: Path, rules: ImageRules) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).model
    grids = [rules.grid(4 * rules.side, 3 * rules.side), rules.grid(rules.side, 2 * rules.side)]
    start, end = rules.marks[2], rules.marks[3]
    ids = [5, 6, start, *[rules.token] * 12, end, 7, start, *[rules.token] * 2, end, 8, 9]
    tokens = torch.tensor([ids])
    wanted, _ = model.get_rope_index(tokens, (tokens == rules.token).int(), torch.tensor(grids))
    assert rules.positions(ids, grids).tolist() == wanted[:, 0].tolist()
    assert rules.positions([5, 6, 7], []).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("preprocessor_config.json", None, "has no preprocessor_config.json"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize = False"),
        ("preprocessor_config.json", {"patch_size": 9}, "patch_size = 9"),
        ("preprocessor_config.json", {"image_mean": [1]}, "no image_mean of three channels"),
        ("config.json", {"image_token_id": None}, "no image_token_id"),
        ("config.json", {"vision_config": None}, "no pictures are shown to"),
        ("config.json", {"model_type": "glm4v_moe"}, "no pictures are shown to model_type 'glm4v_moe'"),
    ],
)
def test_a_folder_that_says_it_otherwise_is_refused(
    folder: Path, tmp_path: Path, file: str, change: dict[str, Any] | None, said: str
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    if change is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(json.dumps({**json.loads((tmp_path / file).read_text()), **change}))
    with pytest.raises(ConfigError, match=said) as raised:
        image_rules(str(tmp_path))
    assert raised.value.remedy


def test_newer_and_older_files_of_processors_say_the_same(
    folder: Path, tmp_path: Path, rules: ImageRules
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    held = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": held}))
    assert image_rules(str(tmp_path)) == rules
    sizes = held.pop("size")
    older = {"min_pixels": sizes["shortest_edge"], "max_pixels": sizes["longest_edge"] // 4}
    (tmp_path / "processor_config.json").write_text(json.dumps({**held, **older}))
    assert image_rules(str(tmp_path)) == replace(rules, max_pixels=rules.max_pixels // 4)


def test_a_model_of_text_sees_none(folder: Path, tmp_path: Path) -> None:
    assert sees_images(str(folder))
    assert not sees_images(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert not sees_images(str(tmp_path))
    with pytest.raises(ConfigError, match="no pictures are shown to model_type 'qwen3'"):
        image_rules(str(tmp_path))
