"""Models that see, in a whole run on one GPU that FSDP's trainer and SGLang share: log-probabilities of samples with pictures, and syncs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from millrace.connectors.huggingface.tiny_vision import KINDS, build_tiny_vision
from millrace.core.contracts.images import image_names
from tests.support import family_runs
from tests.support.flow_runs import Workplace, output_of
from tests.support.noise import noise

pytestmark = pytest.mark.timeout(900)
SIDE, DRAWN = 32, 12  # pixels of a token's side at most, and pictures
SHAPE = {"hidden": 512, "head_dim": 64, "layers": 4, "deep": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = Workplace(tmp_path_factory.mktemp("pictures"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


def furnish(folder: Path, kind: str, **changes: dict[str, Any]) -> None:
    """Model, pictures, prompts of which two thirds have one or two, and run.yaml."""
    build_tiny_vision(folder / "model", kind, **SHAPE)
    for number in range(DRAWN):
        width, height = SIDE * (1 + number % 4), SIDE * (1 + number % 3)
        noise(width, height, number).save(folder / f"{number}.png")
    rows = [
        {
            "prompt": "<image>" * (number % 3) + f"{number}+1=",
            "images": [f"{(number + at) % DRAWN}.png" for at in range(number % 3)],
            "label": str(number % 10),
        }
        for number in range(240)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "seen", "path": str(folder / "train.jsonl"), "images_key": "images"}
    own: dict[str, dict[str, Any]] = {
        "data": {"max_prompt_tokens": 64, "sources": [source]},
        "trainer": {
            "kind": "fsdp",
            "device": "cuda",
            "deterministic": False,
            "max_pack_tokens": 16384,
            "global_batch": family_runs.PROMPTS * family_runs.GROUP // 2,
            "optimizer": {"lr": 1e-3},
        },
        "engines": {"sglang": {**family_runs.SGLANG, "mm_attention_backend": "triton_attn"}},
    }
    values = family_runs.configuration(folder, kind, **{**own, **changes})
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_with_pictures(place: Workplace, kind: str) -> None:
    folder = place.folder / kind
    folder.mkdir()
    furnish(folder, kind)
    process = place.start("train", str(folder / "run.yaml"))
    out = output_of(process, family_runs.PATIENCE_S)
    run = folder / "runs" / kind.replace("_", "-")
    log = run / "logs" / "engine-0.log"
    told = "\n".join(log.read_text(errors="replace").splitlines()[-60:]) if log.exists() else "no log"
    assert process.returncode == 0, f"{out[-6000:]}\n--- {log}\n{told}"
    seen = family_runs.check(run)
    assert max(seen.prompt_gaps) < family_runs.PROMPT_GAP
    prompts = pq.read_table(run / "iterations" / "000001" / "batch.parquet", columns=["prompt"])["prompt"]
    assert sum(bool(image_names(json.loads(prompt))) for prompt in prompts.to_pylist()) > len(prompts) / 3
