"""Supervised batches and held-out losses of rows with pictures: which are stored, named and shown to the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.connectors.huggingface.tiny_vision import build_tiny_vision
from millrace.connectors.storage.images import StoredImages
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.config import RunConfig
from millrace.core.contracts.images import image_names
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.supervised.held_out_loss import held_out_loss
from millrace.tasks.supervised.sample_supervised import sample_supervised
from tests.support.asked_here import RanksHere
from tests.support.noise import as_file, noise

SIDE = 28


class Ranks(RanksHere):
    """Trainer ranks by which every loss is 1."""

    def __init__(self) -> None:
        self.asked: list[HeldOutSample] = []

    async def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        self.asked += samples
        return [1.0 for _ in samples]


def written(folder: Path) -> str:
    """Three rows, of which two have the same picture."""
    (folder / "a.png").write_bytes(as_file(noise(2 * SIDE, SIDE)))
    rows = [
        {"prompt": "<image>?", "images": "a.png", "label": "1"},
        {"prompt": "a<image>", "images": ["a.png"], "label": "2"},
        {"prompt": "2+3=", "label": "5"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


async def test_pictures_of_reference_answers_are_stored_and_named(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    rows = {"name": "seen", "path": written(tmp_path), "images_key": "images"}
    config = make_config(
        model={"path": str(build_tiny_vision(tmp_path / "model", "qwen2_5_vl"))},
        data={"sources": [rows]},
        trainer={"kind": "fsdp"},
        rollout={"prompts": 3, "samples_per_prompt": 1},
        algorithm={"loss": "sft"},
        evaluation={"sets": [rows]},
    )
    runtime, ranks = Runtime(config), Ranks()
    runtime.memory._trainer = ranks  # type: ignore[assignment]
    ctx = IterationContext(runtime, 0)
    record = await sample_supervised.fn(ctx)
    (image,) = record["images"]
    batch = ctx.folder.read_table("batch.parquet", "batch").to_pylist()
    named = [image_names(json.loads(row["prompt"])) for row in batch]
    (name,) = {each for names in named for each in names}
    assert sorted(map(len, named)) == [0, 1, 1]
    assert image["path"] == StoredImages.path(name)
    assert ctx.run_folder.store.list("images") == [image["path"]]

    measured = await held_out_loss.fn(ctx)
    assert measured["images"] == [image]
    assert sorted(sample.images for sample in ranks.asked) == [(), (name,), (name,)]
