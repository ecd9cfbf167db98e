"""Adapters that an engine serves by name: each request has the one that it named, beside others in one batch and through loads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from millrace.connectors.engines.embedded.adapters import Adapter, read_adapter
from millrace.connectors.engines.embedded.model import Decoder, Weights, read_shape, read_tensors
from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.connectors.engines.embedded.slots import Request, Slots
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.trainers.adapters import FlatPairs, write_peft
from millrace.core.config.trainer import Lora
from millrace.core.errors import EngineError
from millrace.core.families.adapters import targeted
from tests.support.engine_process import embedded_engine, peaked_model
from tests.support.plain_lora import add_pairs
from tests.support.tiny_models import save_tiny_model

VOCABULARY = 37
LORA = Lora(rank=3, alpha=6.0)
PROMPT = [10, 20, 30, 40, 50]


ALL = r".*\.(self_attn\.(q|k|v|o)|mlp\.(.*\.)?(gate|up|gate_up|down))_proj"
FEED_FORWARD = r".*\.mlp\.(.*\.)?(gate|up|down)_proj"
TARGETS = {  # of families; of others the usual ones
    "qwen3_moe": ALL,
    "qwen2_moe": ALL,
    "glm4_moe": ALL,
    "deepseek_v3": FEED_FORWARD,
    "qwen3_next": FEED_FORWARD,
}


def adapters(folder: Path, model: Path, seed: int, targets: str = LORA.targets) -> Path:
    """A PEFT folder of pairs that change the model's answers."""
    lora = LORA.model_copy(update={"targets": targets})
    shape = read_shape(model)
    draws = torch.Generator().manual_seed(seed)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draws) * 0.3

    found = targeted(shape, targets)
    pairs = {one.name: (some(LORA.rank, one.inputs), some(one.outputs, LORA.rank)) for one in found}
    folder.mkdir()
    write_peft(folder, FlatPairs.of(pairs), lora, shape, str(model))
    return folder


def plain(model: Path, folder: Path | None) -> Any:
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if folder is not None:
        add_pairs(made, folder)
    return made


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "glm4", "gpt_oss", *TARGETS])
def test_rows_of_one_batch_have_the_logits_of_their_own_adapters(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path / family, family, VOCABULARY)
    shape = read_shape(model)
    targets = TARGETS.get(family, LORA.targets)
    folders = [None, *(adapters(tmp_path / str(seed), model, seed, targets) for seed in (1, 2))]
    held: list[Adapter | None] = [
        None if folder is None else read_adapter(folder.name, folder, shape, torch.float32)
        for folder in folders
    ]
    torch.manual_seed(3)
    text = torch.randint(VOCABULARY, (20,))

    def decoded(which: list[int]) -> torch.Tensor:
        """Logits after each of the last tokens [steps, requests, V], each request with one of the adapters."""
        weights = Weights(shape, read_tensors(model, shape, None))
        slots = Slots(Decoder(weights), max_running=16, max_total_tokens=4096)
        requests = [
            Request(
                str(at),
                text[:11].tolist(),
                SamplingParams(max_new_tokens=20),
                0,
                lambda _: None,
                adapter=held[at],
            )
            for at in which
        ]
        found = [slots.admit(requests)]
        for step in range(5):
            for request in requests:
                request.output.append(int(text[11 + step]))
            found.append(slots.step())
        return torch.stack(found)

    together = decoded([0, 1, 2])
    with torch.no_grad():
        for at, folder in enumerate(folders):
            expected = plain(model, folder)(text[None]).logits[0, 10:16]
            assert float((together[:, at] - expected).abs().max()) < 2e-5
    assert float((together[:, 1] - together[:, 2]).abs().max()) > 1e-3
    for at in range(3):
        assert torch.equal(decoded([at])[:, 0], together[:, at])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peaked_model(tmp_path_factory.mktemp("peaked") / "model", seed=5)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("adapters")
    return [adapters(place / str(seed), model, seed) for seed in range(4)]


@pytest_asyncio.fixture
async def client(model: Path, tmp_path: Path) -> AsyncIterator[SglangClient]:
    with embedded_engine(model, "--max-loaded-loras", "3", log=tmp_path / "engine.log") as (url, _):
        made = SglangClient(url, "engine-0")
        made.weights.serve_by_name("a", alone=True)
        yield made
        await made.close()


async def names(client: SglangClient) -> list[str]:
    answer = await client.get("/v1/models", 10)
    return [each["id"] for each in answer["data"] if each["parent"]]


@pytest.mark.asyncio
async def test_what_does_not_fit_is_refused_and_nothing_changes(
    client: SglangClient, folders: list[Path], tmp_path: Path
) -> None:
    await client.weights.load_adapter(str(folders[0]), 0, 0)
    kept = await names(client)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((folders[1] / "adapter_config.json").read_text())
    stored = load_file(folders[1] / "adapter_model.safetensors")
    name = next(iter(stored))
    for tensors, reason in (
        (
            {**stored, "base_model.model.model.layers.0.mlp.experts.lora_A.weight": stored[name]},
            "is of no matrix",
        ),
        ({**stored, name: stored[name][:, :-1]}, r"has shape .* is wanted"),
        ({each: tensor for each, tensor in stored.items() if each != name}, "is missing"),
    ):
        save_file(
            {each: tensor.clone() for each, tensor in tensors.items()},
            broken / "adapter_model.safetensors",
        )
        with pytest.raises(EngineError, match=reason):
            await client.weights.load_adapter(str(broken), 1, 0)
    with pytest.raises(EngineError, match="adapter_config.json cannot be read"):
        await client.weights.load_adapter(str(tmp_path), 1, 0)
    for body, reason in (
        ({"lora_name": kept[0], "lora_path": str(folders[1])}, "a name stands for one adapter"),
        ({"lora_name": 3, "lora_path": str(folders[1])}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
    ):
        with pytest.raises(EngineError, match=reason):
            await client.post("/load_lora_adapter", body)
    with pytest.raises(EngineError, match="other is not loaded"):
        await client.post("/unload_lora_adapter", {"lora_name": "other"})
    with pytest.raises(EngineError, match="other is not loaded"):
        await client.post("/generate", {"input_ids": PROMPT, "lora_path": "other"})
    assert await names(client) == kept
    for at in (1, 2):
        await client.weights.load_adapter(str(folders[at]), at, 0)
    with pytest.raises(EngineError, match="--max-loaded-loras allows no more"):
        await client.weights.load_adapter(str(folders[3]), 3, 0)


@pytest.mark.asyncio
async def test_an_engine_of_somebody_else_must_have_room_for_the_versions_of_a_run(
    client: SglangClient, model: Path, tmp_path: Path
) -> None:
    await client.check_holds_adapters(3)
    with pytest.raises(EngineError, match="holds 3 adapters, and the run has 4 at once") as refused:
        await client.check_holds_adapters(4)
    assert "--max-loaded-loras is given with at least 4" in str(refused.value)
    with embedded_engine(model, log=tmp_path / "plain.log") as (url, _):
        plain = SglangClient(url, "engine-1")
        with pytest.raises(EngineError, match="takes no adapters"):
            await plain.check_holds_adapters(2)
        await plain.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_written_as_safetensors_writes_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("millrace.connectors.trainers.adapters.CHUNK", 1000)  # several pieces at once
    shape, pairs, named = read_shape(model), {}, {}
    for one in targeted(shape, LORA.targets):
        pairs[one.name] = (
            torch.randn(LORA.rank, one.inputs, dtype=dtype),
            torch.randn(one.outputs, LORA.rank, dtype=dtype),
        )
        for side, tensor in zip("AB", pairs[one.name], strict=True):
            named[f"base_model.model.{one.name}.lora_{side}.weight"] = tensor
    write_peft(tmp_path, FlatPairs.of(pairs), LORA, shape, str(model))
    save_file(named, tmp_path / "expected", metadata={"format": "pt"})
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
