"""A mixture of experts as transformers writes it: served, and replaced in each way by names of single experts.

In memory transformers fuses the experts of a layer into two tensors; files and updates name each expert.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from millrace.connectors.trainers.weights.engine_group import EngineGroup
from tests.support.engine_process import embedded_engine, logprobs_of, peaked_model, reference_logprobs

PROMPT = [10, 20, 30, 40, 50]
BUCKETS = 3


class Engine:
    """The server of the first model."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def generate(self) -> Any:
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", input_ids=PROMPT, sampling_params=sampling, return_logprob=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("experts")
    return [peaked_model(folder / str(seed), seed, experts=4) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with embedded_engine(models[0], "--dtype", "float32", log=log) as (url, _):
        yield Engine(url)


def by_disk(engine: Engine, model: Path) -> None:
    engine.post("/update_weights_from_disk", model_path=str(model))


def by_tensors(engine: Engine, model: Path) -> None:
    for part in buckets(model):
        sent = base64.b64encode(save(part)).decode()
        engine.post("/update_weights_from_tensor", serialized_named_tensors=[sent])


def by_broadcast(engine: Engine, model: Path) -> None:
    group = EngineGroup("experts", [engine.url], loopback=True, gpu=False)
    address = {"master_address": group.host, "master_port": group.port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(group.enter, 2)
        engine.post("/init_weights_update_group", group_name="experts", backend="gloo", **address)
        entering.result()
        for part in buckets(model):
            sending = pool.submit(
                group.send, torch.cat([t.flatten().view(torch.uint8) for t in part.values()]), 60
            )
            engine.post(
                "/update_weights_from_distributed",
                names=list(part),
                shapes=[list(tensor.shape) for tensor in part.values()],
                dtypes=["float32"] * len(part),
                group_name="experts",
                load_format="flattened_bucket",
            )
            sending.result()
    engine.post("/destroy_weights_update_group", group_name="experts")
    group.close()


def buckets(model: Path) -> list[dict[str, torch.Tensor]]:
    tensors = sorted(load_file(model / "model.safetensors").items())
    return [dict(tensors[number::BUCKETS]) for number in range(BUCKETS)]


def check(engine: Engine, model: Path) -> None:
    answer = engine.generate()
    expected = reference_logprobs(model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-5)


def test_the_folder_is_served_as_transformers_reads_it(engine: Engine, models: list[Path]) -> None:
    """Its config.json names the experts num_local_experts, and it was taken for a dense model."""
    assert "num_experts" not in json.loads((models[0] / "config.json").read_text())
    check(engine, models[0])


@pytest.mark.parametrize("way", [by_disk, by_tensors, by_broadcast])
def test_updates_reach_every_expert(
    engine: Engine, models: list[Path], way: Callable[[Engine, Path], None]
) -> None:
    way(engine, models[1])
    check(engine, models[1])
    by_disk(engine, models[0])
    check(engine, models[0])
