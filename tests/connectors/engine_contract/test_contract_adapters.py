"""What a client promises of adapters by name: a request keeps its version through loads, and no request goes without a name."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.connectors.engines.client import EngineClient
from millrace.connectors.trainers.adapters import FlatPairs, merged, write_peft
from millrace.core.config.trainer import Lora
from millrace.core.errors import EngineError
from millrace.core.families.adapters import targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from tests.support.contract import LONG, PROMPT, Contract, Engine
from tests.support.echo_engine import ECHO
from tests.support.engine_process import CLOSE

LORA = Lora(rank=8, alpha=16.0)
PLENTY = {**LONG, "temperature": 0.0, "max_new_tokens": 600}


def adapters_of(model: Path, folder: Path, seed: int) -> Path:
    """Random adapters of a model as a PEFT folder, and beside them `merged`, the model to which they are added."""
    shape, draws = architecture(read_hf_config(str(model))), torch.Generator().manual_seed(seed)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draws) * 0.1

    found = targeted(shape, LORA.targets)
    pairs = {one.name: (some(LORA.rank, one.inputs), some(one.outputs, LORA.rank)) for one in found}
    shutil.copytree(model, folder / "merged")
    tensors = load_file(model / "model.safetensors")
    whole = {f"{name}.weight": merged(tensors[f"{name}.weight"], pair, 2.0) for name, pair in pairs.items()}
    save_file({**tensors, **whole}, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    write_peft(folder, FlatPairs.of(pairs), LORA, shape, str(model))
    return folder


@pytest.fixture(scope="module")
def folders(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("adapters")
    return [adapters_of(engine.model, place / str(seed), seed) for seed in range(4)]


def by_name(client: EngineClient, owner: str = "a", alone: bool = True) -> None:
    """Let a client name adapters."""
    try:
        client.weights.serve_by_name(owner, alone=alone)
    except EngineError as error:
        pytest.skip(str(error))


async def test_adapters_are_refused_if_the_engine_serves_none(on: Contract) -> None:
    if on.kind is not ECHO:
        pytest.skip("the other tests load some")
    with pytest.raises(EngineError, match=r"engine-0: .*adapters"):
        on.client.weights.serve_by_name("a", alone=True)
    with pytest.raises(EngineError, match=r"engine-0: .*adapters"):
        await on.client.weights.load_adapter("/nowhere", 1, 0)


async def test_a_request_keeps_the_version_that_it_started_with(on: Contract, folders: list[Path]) -> None:
    by_name(on.client)
    load = on.client.weights.load_adapter
    with pytest.raises(EngineError, match="the weights alone are not the policy"):
        await on.ask()
    await load(str(folders[0]), 0, 0)
    (long,) = await on.begun("long", **PLENTY)
    await load(str(folders[1]), 1, 0)
    assert await on.client.weight_version() == 1
    assert not long.done()
    new, old = await on.ask("new"), await on.ask("old", versions=range(1))
    await load(str(folders[2]), 2, 2)  # 1 goes; a request has 0
    assert not long.done()
    answers = [(old, 0), (new, 1), (await on.ask("newest"), 2), (await long, 0)]
    assert len(long.result().output_ids) == PLENTY["max_new_tokens"]
    for answer, version in answers:
        assert answer.weight_versions == [(0, version)]
        assert on.is_of(folders[version] / "merged", answer)
    assert not on.is_of(on.engine.model, new)
    with pytest.raises(EngineError, match="no adapter of the versions"):
        await on.ask(versions=range(1, 2))
    (scored,) = await on.client.weights.logprobs([PROMPT])
    assert scored == pytest.approx(
        on.engine.reference(folders[2] / "merged", PROMPT[:1], PROMPT[1:]), abs=CLOSE
    )
    await load(str(folders[3]), 3, 3)  # only now 0 and 2 may go
    assert on.is_of(folders[3] / "merged", await on.ask("last"))


async def test_a_version_that_is_loaded_again_is_another_adapter(on: Contract, folders: list[Path]) -> None:
    by_name(on.client)
    await on.client.weights.load_adapter(str(folders[0]), 7, 5)
    (long,) = await on.begun("long", **PLENTY)
    await on.client.weights.load_adapter(str(folders[1]), 7, 5)
    again = await on.ask("again")
    assert on.is_of(folders[1] / "merged", again)
    assert on.is_of(folders[0] / "merged", await long)
    await on.client.forget_version()
    assert await on.client.weight_version() is None
    with pytest.raises(EngineError, match="the weights alone are not the policy"):
        await on.ask()


async def test_what_a_dead_process_left_goes(on: Contract, folders: list[Path]) -> None:
    by_name(on.client)
    await on.client.weights.load_adapter(str(folders[0]), 7, 5)
    (left,) = await on.begun("left", **PLENTY)
    later = on.engine.connect(on.engine.url, "engine-0", on.engine.key)
    by_name(later)
    assert await later.weight_version() is None
    async with asyncio.timeout(60):
        await later.weights.load_adapter(str(folders[1]), 7, 5)
    assert (await left).finish == "abort"
    assert await later.weight_version() == 7
    assert await on.client.weight_version() is None  # its adapter is gone
    await later.close()


async def test_runs_that_share_an_engine_do_not_touch_each_others_adapters(
    on: Contract, folders: list[Path]
) -> None:
    by_name(on.client, "first", alone=False)
    other, again = (on.engine.connect(on.engine.url, "engine-0", on.engine.key) for _ in range(2))
    by_name(other, "second", alone=False)
    await on.client.weights.load_adapter(str(folders[0]), 4, 4)
    (long,) = await on.begun("long", **PLENTY)
    await other.weights.load_adapter(str(folders[1]), 9, 9)
    assert (await on.client.weight_version(), await other.weight_version()) == (4, 9)
    answer = await other.generate(on.request("other"))
    assert answer.weight_versions == [(0, 9)]
    assert on.is_of(folders[1] / "merged", answer)
    by_name(again, "second", alone=False)  # the second run's next process
    await again.weights.load_adapter(str(folders[2]), 10, 10)
    assert await other.weight_version() is None
    assert await on.client.weight_version() == 4
    assert on.is_of(folders[2] / "merged", await again.generate(on.request("again")))
    await again.forget_version()
    assert not long.done()
    assert on.is_of(folders[0] / "merged", await long)
    for client in (other, again):
        await client.close()


async def test_a_folder_without_adapters_is_refused_and_what_is_served_stays(
    on: Contract, folders: list[Path], tmp_path: Path
) -> None:
    by_name(on.client)
    await on.client.weights.load_adapter(str(folders[0]), 3, 3)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EngineError, match="engine-0"):
            await on.client.weights.load_adapter(str(folder), 4, 3)
    assert await on.client.weight_version() == 3
    assert on.is_of(folders[0] / "merged", await on.ask())
