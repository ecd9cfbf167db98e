"""The example with pictures: its questions have the answers that its pictures show, and a tiny model learns them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.geometry.geometry import CELL, COLOURS, GPU_SHAPE, HEIGHTS, HELD_OUT, chart, draw, shapes
from millrace.connectors.huggingface.tiny_vision import build_tiny_vision
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.flows.preflight.check import check
from millrace.flows.quickstart import held_out_accuracy
from tests.examples.test_pages import blocks
from tests.support.flow_runs import Workplace, output_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "geometry"
RISE = 0.2  # of the share of right answers to held-out questions, over the warmed-up model's
PATIENCE_S = 1800


def test_the_page_of_geometry_shows_its_module_and_its_configurations() -> None:
    page = EXAMPLE / "README.md"
    assert blocks(page, "python") == [(EXAMPLE / "geometry.py").read_text()]
    files = ("geometry_vlm.yaml", "geometry_vlm_one_gpu.yaml")
    assert blocks(page, "yaml") == [(EXAMPLE / name).read_text() for name in files]


def test_answers_are_what_the_pictures_show() -> None:
    rng = random.Random(0)
    asked = set()
    for _ in range(200):
        image, colour, answer = shapes(rng)
        there = (np.asarray(image) == COLOURS[colour]).all(-1)
        quarters = [there[y : y + CELL, x : x + CELL].any() for x in (0, CELL) for y in (0, CELL)]
        assert int(answer) == sum(quarters)
        image, which, answer = chart(rng)
        blue = (np.asarray(image) == COLOURS["blue"]).all(-1)
        heights = blue.sum(0).reshape(len(HEIGHTS), -1).max(1)
        assert len(set(heights)) == len(HEIGHTS)
        assert int(answer) == 1 + (heights.argmax() if which == "highest" else heights.argmin())
        asked |= {colour, which}
    assert asked == {*COLOURS, "highest", "lowest"}


def drawn(folder: Path, seed: int = 0) -> RunConfig:
    config = load_config(
        str(EXAMPLE / "geometry_vlm.yaml"),
        [f"run.seed={seed}", f"data.sources.0.path={folder / 'train.jsonl'}"],
    )
    draw(config)
    return config


def pictures(folder: Path, file: str) -> list[tuple[str, str, bytes]]:
    """Question, answer and pixels of each row."""
    rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [(row["prompt"], row["label"], Image.open(folder / row["images"]).tobytes()) for row in rows]


def test_no_held_out_picture_is_trained_on_and_a_seed_draws_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.geometry.geometry.TRAINING", 700)
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        drawn(tmp_path / folder, seed)
    held_out, training = (pictures(tmp_path / "a", file) for file in ("held_out.jsonl", "train.jsonl"))
    assert (len(held_out), len(training)) == (HELD_OUT, 700)
    assert len({pixels for _, _, pixels in [*held_out, *training]}) == HELD_OUT + 700
    assert pictures(tmp_path / "b", "train.jsonl") == training
    assert pictures(tmp_path / "c", "train.jsonl") != training


def test_the_recipe_for_one_gpu_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own model of random weights."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(tmp_path / "packages"))
    (tmp_path / "packages" / "sglang").mkdir(parents=True)
    monkeypatch.setattr("examples.geometry.geometry.TRAINING", 300)
    drawn(tmp_path)
    build_tiny_vision(tmp_path / "model", "qwen2_5_vl", **GPU_SHAPE)
    paths = [f"model.path={tmp_path / 'model'}", f"storage.root={tmp_path / 'runs'}"]
    paths += [f"data.sources.0.path={tmp_path / 'train.jsonl'}"]
    paths += [f"evaluation.sets.0.path={tmp_path / 'held_out.jsonl'}"]
    monkeypatch.chdir(EXAMPLE)
    assert check(load_config("geometry_vlm_one_gpu.yaml", paths)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_tiny_model_learns_to_read_pictures(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    shutil.copy(EXAMPLE / "geometry.py", tmp_path)
    config = EXAMPLE / "geometry_vlm.yaml"
    try:
        process = place.start("train", str(config), "storage.root=runs", "run.name=a")
        out = output_of(process, PATIENCE_S)
        assert process.returncode == 0, out
    finally:
        place.call("server", "stop")
    points = held_out_accuracy(RunFolder(str(tmp_path / "runs"), "a"))
    assert points[load_config(str(config)).run.iterations] > points[0] + RISE, points
