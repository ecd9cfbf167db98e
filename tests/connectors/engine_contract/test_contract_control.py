"""What an engine's control endpoints promise: abort, pause, flush, weight updates, memory, information."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_process import CLOSE, EXACT, reference_logprobs
from safetensors.torch import load_file, save

PROMPT = [10, 20, 30, 40, 50]
LONG = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
SHORT = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture
async def restored(http: Any, tiny_model: Path, own_engine: None) -> AsyncIterator[None]:
    """The engine serves its first weights again afterwards."""
    yield
    await http.post("/continue_generation")
    await http.post("/abort_request", {"abort_all": True})
    await load(http, tiny_model, "0")


async def load(http: Any, model: Path, version: str) -> Any:
    return await http.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": version})


async def begun(http: Any, *rids: str, **params: Any) -> list[asyncio.Task[Any]]:
    """Requests that have given a first token."""
    started = []
    for rid in rids:
        ready: asyncio.Event = asyncio.Event()
        started.append((asyncio.create_task(_follow(http, rid, ready, {**LONG, **params})), ready))
    for task, ready in started:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert not task.done(), task.result()
    return [task for task, _ in started]


async def _follow(http: Any, rid: str, ready: asyncio.Event, params: dict[str, Any]) -> Any:
    import json

    body = {
        "input_ids": PROMPT,
        "sampling_params": params,
        "rid": rid,
        "return_logprob": True,
        "stream": True,
    }
    last: Any = None
    async with http.session.post(http.url + "/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            event = line.removeprefix(b"data:").strip()
            if event and event != b"[DONE]":
                last = json.loads(event)
                if last["output_ids"]:
                    ready.set()
    return last


async def test_an_aborted_request_answers_with_what_it_has(http: Any) -> None:
    mine, other = await begun(http, "abort-mine", "keep-other", max_new_tokens=400)
    await http.post("/abort_request", {"rid": "abort-mine"})
    answer = await mine
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 400
    pairs = answer["meta_info"]["output_token_logprobs"]
    expected = reference_logprobs(await http.model(), PROMPT, answer["output_ids"])
    assert [value for value, _, _ in pairs] == pytest.approx(expected, abs=CLOSE)
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"


async def test_abort_all_ends_every_request(http: Any) -> None:
    running = await begun(http, "one", "two", "three")
    await http.post("/abort_request", {"abort_all": True})
    answers = await asyncio.gather(*running)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}


async def test_an_abort_of_an_unknown_request_is_no_error(http: Any) -> None:
    await http.post("/abort_request", {"rid": "nobody"})


async def test_a_pause_that_retracts_goes_on_to_the_same_answer(http: Any) -> None:
    params = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    alone = await http.generate(PROMPT, **params)
    (running,) = await begun(http, "retracted", **params)
    await http.post("/pause_generation", {"mode": "retract"})
    await asyncio.sleep(0.2)
    assert not running.done()
    await http.post("/continue_generation")
    answer = await running
    pairs = answer["meta_info"]["output_token_logprobs"]
    expected = reference_logprobs(await http.model(), PROMPT, answer["output_ids"])
    assert [value for value, _, _ in pairs] == pytest.approx(expected, abs=CLOSE)
    assert answer["output_ids"] == alone["output_ids"] or not EXACT


async def test_a_pause_in_place_keeps_requests(http: Any) -> None:
    (running,) = await begun(http, "held", max_new_tokens=300)
    await http.post("/pause_generation", {"mode": "in_place"})
    await asyncio.sleep(0.2)
    assert not running.done()
    await http.post("/continue_generation")
    assert (await running)["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_pause_that_aborts_ends_requests(http: Any) -> None:
    (running,) = await begun(http, "ended")
    await http.post("/pause_generation", {"mode": "abort"})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_request_sent_while_paused_waits(http: Any, own_engine: None) -> None:
    await http.post("/pause_generation", {"mode": "retract"})
    waiting = asyncio.create_task(http.generate(PROMPT, **SHORT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await http.post("/continue_generation")
    assert len((await waiting)["output_ids"]) == 8


async def test_the_cache_is_flushed_only_while_nothing_runs(http: Any) -> None:
    (running,) = await begun(http, "busy")
    await http.post("/flush_cache", status=400)
    await http.post("/abort_request", {"rid": "busy"})
    await running
    await http.post("/flush_cache")


async def test_weights_from_disk_are_served_under_their_version(
    http: Any, restored: None, other_model: Path, tiny_model: Path
) -> None:
    before = await http.generate(PROMPT, **SHORT)
    await load(http, other_model, "17")
    after = await http.generate(PROMPT, **SHORT)
    assert before["meta_info"]["weight_version"] == "0"
    assert after["meta_info"]["weight_version"] == "17"
    assert (await http.get("/model_info"))["weight_version"] == "17"
    for model, answer in ((tiny_model, before), (other_model, after)):
        values = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert values == pytest.approx(reference_logprobs(model, PROMPT, answer["output_ids"]), abs=CLOSE)


async def test_an_update_in_a_pause_shows_in_the_versions_of_a_request(
    http: Any, restored: None, other_model: Path, tiny_model: Path
) -> None:
    (running,) = await begun(http, "across", max_new_tokens=400)
    await http.post("/pause_generation", {"mode": "retract"})
    await load(http, other_model, "18")
    await http.post("/continue_generation")
    answer = await running
    first, second = answer["meta_info"]["weight_versions"]
    assert (first["version"], first["start"]) == ("0", 0)
    assert (second["version"], second["start"], second["end"]) == ("18", first["end"], 400)
    values = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    for model, span in ((tiny_model, first), (other_model, second)):
        expected = reference_logprobs(model, PROMPT, answer["output_ids"])
        part = slice(span["start"], span["end"])
        assert values[part] == pytest.approx(expected[part], abs=CLOSE)


async def test_an_update_without_a_pause_waits_for_what_runs(
    http: Any, restored: None, other_model: Path
) -> None:
    (running,) = await begun(http, "first", max_new_tokens=200)
    updating = asyncio.create_task(load(http, other_model, "19"))
    await asyncio.sleep(0.05)
    late = await http.generate(PROMPT, **SHORT)
    await updating
    assert {span["version"] for span in (await running)["meta_info"]["weight_versions"]} == {"0"}
    assert late["meta_info"]["weight_version"] in ("0", "19")


async def test_a_folder_that_cannot_be_served_is_refused_and_the_old_weights_stay(
    http: Any, restored: None, tmp_path: Path, tiny_model: Path
) -> None:
    before = await http.generate(PROMPT, **SHORT)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:-100])
    for folder in (tmp_path / "nowhere", broken):
        body = {"model_path": str(folder), "weight_version": "20"}
        answer = await http.post("/update_weights_from_disk", body, status=400)
        assert str(folder) in answer["message"]
    after = await http.generate(PROMPT, **SHORT)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "0"


async def test_weights_in_another_dtype_are_served_in_the_engines_own(
    http: Any, restored: None, tmp_path: Path, tiny_model: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(tiny_model / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    (running,) = await begun(http, "widened", max_new_tokens=200)
    await http.post("/pause_generation", {"mode": "in_place"})
    await load(http, half, "21")
    await http.post("/continue_generation")
    assert len((await running)["output_ids"]) == 200


async def test_weights_from_tensors_are_served_under_their_version(
    http: Any, restored: None, other_model: Path
) -> None:
    tensors = load_file(other_model / "model.safetensors")
    names = sorted(tensors)
    halves = [{n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}]
    parts = [base64.b64encode(save(half)).decode() for half in halves]
    body = {"serialized_named_tensors": parts, "weight_version": "22"}
    await http.post("/begin_weight_update")
    await http.post("/update_weights_from_tensor", body)
    await http.post("/end_weight_update")
    answer = await http.generate(PROMPT, **SHORT)
    values = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert answer["meta_info"]["weight_version"] == "22"
    assert values == pytest.approx(reference_logprobs(other_model, PROMPT, answer["output_ids"]), abs=CLOSE)


async def test_tensors_that_do_not_fit_or_are_pickled_are_refused(http: Any, restored: None) -> None:
    import pickle

    import torch

    payloads = {
        "no tensor of the model": save({"unknown.weight": torch.zeros(2)}),
        "has shape": save({"model.norm.weight": torch.zeros(2)}),
        "pickled": pickle.dumps({"model.norm.weight": [0.0]}),
        "not safetensors": b"\xff" * 32,
    }
    for message, data in payloads.items():
        body = {"serialized_named_tensors": [base64.b64encode(data).decode()], "weight_version": "23"}
        assert message in (await http.post("/update_weights_from_tensor", body, status=400))["message"]
    assert (await http.generate(PROMPT, **SHORT))["meta_info"]["weight_version"] == "0"


async def test_the_weight_version_can_be_renamed(http: Any, restored: None) -> None:
    await http.post("/update_weight_version", {"new_version": "24"})
    assert (await http.generate(PROMPT, **SHORT))["meta_info"]["weight_version"] == "24"


async def test_memory_is_released_only_while_idle_and_serving_goes_on_after_resume(
    http: Any, own_engine: None
) -> None:
    (running,) = await begun(http, "holding")
    await http.post("/release_memory_occupation", {"tags": ["kv_cache"]}, status=400)
    await http.post("/abort_request", {"rid": "holding"})
    await running
    before = await http.generate(PROMPT, **SHORT)
    await http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await http.post("/resume_memory_occupation", {"tags": ["weights"]})
    waiting = asyncio.create_task(http.generate(PROMPT, **SHORT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await http.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (await waiting)["output_ids"] == before["output_ids"]


async def test_checksums_tell_weights_apart(http: Any, restored: None, other_model: Path) -> None:
    first = await http.post("/weights_checker", {"action": "checksum"})
    await http.post("/weights_checker", {"action": "snapshot"})
    assert (await http.post("/weights_checker", {"action": "compare"}))["success"]
    await load(http, other_model, "25")
    assert not (await http.post("/weights_checker", {"action": "compare"}))["success"]
    assert (await http.post("/weights_checker", {"action": "checksum"})) != first


async def test_health_and_information_are_served(http: Any) -> None:
    await http.get("/health")
    await http.get("/health_generate")
    assert (await http.get("/server_info"))["model_path"]
    info = await http.get("/model_info")
    assert info["model_path"]
    assert info["weight_version"]


async def test_a_client_that_leaves_takes_only_its_own_request_along(http: Any, own_engine: None) -> None:
    (other,) = await begun(http, "leaver-2", max_new_tokens=600)
    (leaving,) = await begun(http, "leaver")
    plain = asyncio.create_task(http.generate(PROMPT, **LONG, top={"rid": "leave"}))
    await asyncio.sleep(0.1)
    leaving.cancel()
    plain.cancel()
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"
    for _ in range(20):
        if not (await http.get("/server_info"))["load"]["running"]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the requests of a client that left still run")
