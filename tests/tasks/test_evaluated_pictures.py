"""An evaluation of a set with pictures on a real engine: what is asked, stored, named and shown."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.huggingface.tiny_vision import build_tiny_vision, mark
from millrace.connectors.storage.images import StoredImages, opened
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.user_code.pool import Outcome
from millrace.core.config import RunConfig
from millrace.core.contracts.images import image_names
from millrace.core.contracts.sample import Scorable
from millrace.core.hooks.reward_selection import Selected
from millrace.core.rewards.scoring import score_sample
from millrace.tasks.context import IterationContext
from millrace.tasks.evaluate import evaluate_before
from millrace.tasks.generation.admission import places_of
from millrace.tasks.runtime.prompts import Prompts
from millrace.tasks.runtime.scoring import Scoring
from tests.support.engine_process import embedded_engine
from tests.support.noise import as_file, noise

SIDE = 28


def written(folder: Path) -> Path:
    """A set of four rows, of which one names a picture that is not there."""
    (folder / "drawn").mkdir()
    (folder / "drawn" / "a.png").write_bytes(as_file(noise(2 * SIDE, SIDE, 1)))
    url = "data:image/jpeg;base64," + base64.b64encode(as_file(noise(70, 90, 2), "JPEG")).decode()
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>?", "images": "drawn/a.png", "label": "1"},
        {"prompt": "a<image>b<image>", "images": ["drawn/a.png", url], "label": "2"},
        {"prompt": "<image>", "images": ["drawn/none.png"], "label": "3"},
        {"prompt": "2+3=", "label": "5"},
    ]
    path = folder / "seen.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_prompts_are_answered_with_their_pictures_which_are_stored_once(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    model = build_tiny_vision(tmp_path / "model", "qwen2_5_vl")
    held_out = {
        "name": "seen",
        "path": str(written(tmp_path)),
        "images_key": "images",
        "samples_per_prompt": 2,
        "sampling": {"max_new_tokens": 6},
    }
    config = make_config(
        evaluation={"sets": [held_out]}, model={"path": str(model)}, data={"max_prompt_tokens": 64}
    )
    folder = RunFolder(config.storage.root, config.run.name)
    scoring, prompts = Scoring(config), Prompts(config, folder)

    async def score(selected: Selected, sample: Scorable) -> Outcome:
        function = selected.function
        return Outcome("done", score_sample(function.function, function.options, sample, selected.field))

    with embedded_engine(model, "--weight-version", "0", log=tmp_path / "engine.log") as (url, _):
        client = SglangClient(url, "engine-0")
        asked: list[Any] = []
        generate = client.generate

        async def noted(request: Any) -> Any:
            asked.append(request)
            return await generate(request)

        client.generate = noted  # type: ignore[method-assign]

        async def lost(_: int) -> None:
            raise AssertionError("no engine is lost")

        engines = Dispatcher(
            lambda: [client], lost, lambda *_: None, version=0, attempts=1, progress_timeout_s=300
        )

        async def ready(_: Any) -> Dispatcher:
            return engines

        runtime: Any = SimpleNamespace(
            config=config,
            run_folder=folder,
            memory=SimpleNamespace(for_engines=ready),
            places=lambda share: places_of(config, share),
            scoring=SimpleNamespace(score=score, of_sets=scoring.of_sets, selected=scoring.selected),
            prompts=prompts,
        )
        record = await evaluate_before.fn(IterationContext(runtime, 0))
        await client.close()

    rows = folder.store.read_table("eval/seen/000000.parquet", "evaluations").to_pylist()
    assert [row["status"] == "failed" for row in rows] == [False] * 6
    names = {name for row in rows for name in image_names(json.loads(row["prompt"]))}
    assert len(names) == 2
    assert [entry["path"] for entry in record["images"]] == sorted(map(StoredImages.path, names))
    assert folder.store.list("images") == sorted(map(StoredImages.path, names))
    (small,) = [each for each in map(StoredImages(folder.store).read, names) if each.height == SIDE]
    assert opened(small.png).tolist() == np.asarray(noise(2 * SIDE, SIDE, 1)).tolist()
    # the engine was told of one place for each picture, and counted as many tokens as the run
    assert sorted(len(request.images.images) if request.images else 0 for request in asked) == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert all(request.input_ids.count(mark("<|image_pad|>")) >= 2 for request in asked if request.images)
    said = {token for row in rows for token in row["response"]}
    assert not said & {"<|image_pad|>", "<|vision_start|>"}
    assert all(request.sampling_params["logit_bias"] for request in asked)
