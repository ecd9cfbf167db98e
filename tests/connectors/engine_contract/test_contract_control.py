"""What an engine's control endpoints promise: abort, pause, flush, weight updates, memory, information."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save

from tests.support.engine_process import CLOSE, EXACT, logprobs_of, reference_logprobs

PROMPT = [10, 20, 30, 40, 50]
LONG = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
SHORT = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture
async def restored(http: Any) -> AsyncIterator[None]:
    """The engine is idle, and serves its first weights again afterwards."""
    await idle(http)
    yield
    await http.post("/continue_generation")
    await http.post("/abort_request", {"abort_all": True})
    await idle(http)
    await load(http, http.model, http.version)


async def load(http: Any, model: Path, version: str, *, flush: bool = True) -> Any:
    """Serve a folder. SGLang 0.5.17 ends if it holds requests, or has only just answered, when it is to flush its cache."""
    body = {"model_path": str(model), "weight_version": version, "flush_cache": flush}
    return await http.post("/update_weights_from_disk", body)


async def idle(http: Any) -> None:
    """Waits until nothing runs: only then is the cache flushed."""
    async with asyncio.timeout(60):
        while True:
            async with http.session.post(http.url + "/flush_cache") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


def is_of(model: Path, answer: Any) -> bool:
    """Whether a model gives the log-probabilities of an answer to PROMPT."""
    expected = reference_logprobs(model, PROMPT, answer["output_ids"])
    return bool(logprobs_of(answer) == pytest.approx(expected, abs=CLOSE))


def versions_of(http: Any, answer: Any) -> set[str]:
    """Versions that an answer's tokens are of; SGLang 0.5.17 tells only that at its end."""
    meta = answer["meta_info"]
    if not http.own and "weight_versions" not in meta:
        return {meta["weight_version"]}
    return {span["version"] for span in meta["weight_versions"]}


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
    expected = reference_logprobs(http.model, PROMPT, answer["output_ids"])
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
    expected = reference_logprobs(http.model, PROMPT, answer["output_ids"])
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


async def test_a_request_sent_while_paused_waits(http: Any) -> None:
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
    http: Any, restored: None, other_model: Path
) -> None:
    before = await http.generate(PROMPT, **SHORT)
    await idle(http)
    await load(http, other_model, "17")
    after = await http.generate(PROMPT, **SHORT)
    assert before["meta_info"]["weight_version"] == http.version
    assert after["meta_info"]["weight_version"] == "17"
    assert (await http.get("/model_info"))["weight_version"] == "17"
    assert is_of(http.model, before)
    assert is_of(other_model, after)
    assert not is_of(other_model, before)


async def test_an_update_in_a_pause_shows_in_the_versions_of_a_request(
    http: Any, restored: None, other_model: Path
) -> None:
    told = (await http.generate(PROMPT, **SHORT))["meta_info"]
    if not http.own and "weight_versions" not in told:
        pytest.skip(
            "SGLang 0.5.17 tells no spans, and ends when it is to flush its cache while a request waits"
        )
    (running,) = await begun(http, "across", max_new_tokens=400)
    await http.post("/pause_generation", {"mode": "retract"})
    await load(http, other_model, "18")
    await http.post("/continue_generation")
    answer = await running
    first, second = answer["meta_info"]["weight_versions"]
    assert (first["version"], first["start"]) == (http.version, 0)
    assert (second["version"], second["start"], second["end"]) == ("18", first["end"], 400)
    values = logprobs_of(answer)
    for model, span in ((http.model, first), (other_model, second)):
        expected = reference_logprobs(model, PROMPT, answer["output_ids"])
        part = slice(span["start"], span["end"])
        assert values[part] == pytest.approx(expected[part], abs=CLOSE)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_goes_on_under_the_weights_loaded_in_a_pause(
    http: Any, restored: None, other_model: Path, mode: str
) -> None:
    (running,) = await begun(http, "onward", max_new_tokens=400)
    await http.post("/pause_generation", {"mode": mode})
    await load(http, other_model, "26", flush=False)
    await http.post("/continue_generation")
    answer = await running
    assert answer["meta_info"]["weight_version"] == "26"
    assert len(answer["output_ids"]) == 400
    expected = reference_logprobs(http.model, PROMPT, answer["output_ids"])
    close = [abs(a - b) <= CLOSE for a, b in zip(logprobs_of(answer), expected, strict=True)]
    assert close[0]
    assert not all(close)


async def test_an_update_without_a_pause_waits_for_what_runs(
    http: Any, restored: None, other_model: Path
) -> None:
    (running,) = await begun(http, "first", max_new_tokens=200)
    updating = asyncio.create_task(load(http, other_model, "19", flush=False))
    await asyncio.sleep(0.05)
    late = await http.generate(PROMPT, **SHORT)
    await updating
    answer = await running
    assert versions_of(http, answer) == {http.version}
    assert is_of(http.model, answer)
    assert late["meta_info"]["weight_version"] in (http.version, "19")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("missing", marks=pytest.mark.embedded_only("SGLang looks for it at Hugging Face")),
        "empty",
        pytest.param(
            "cut short",
            marks=pytest.mark.embedded_only(
                "SGLang's scheduler ends: it rolls back to the folder that failed"
            ),
        ),
    ],
)
async def test_a_folder_that_cannot_be_served_is_refused_and_the_old_weights_stay(
    http: Any, restored: None, tmp_path: Path, kind: str
) -> None:
    before = await http.generate(PROMPT, **SHORT)
    folder = tmp_path / "broken"
    if kind != "missing":
        folder.mkdir()
        shutil.copy(http.model / "config.json", folder)
    if kind == "cut short":
        (folder / "model.safetensors").write_bytes((http.model / "model.safetensors").read_bytes()[:-100])
    body = {"model_path": str(folder), "weight_version": "20"}
    answer = await http.post("/update_weights_from_disk", body, status=400)
    assert str(folder) in answer["message"]
    after = await http.generate(PROMPT, **SHORT)
    assert after["output_ids"] == before["output_ids"] or not EXACT
    assert is_of(http.model, after)
    assert after["meta_info"]["weight_version"] == http.version


async def test_weights_in_another_dtype_are_served_in_the_engines_own(
    http: Any, restored: None, tmp_path: Path, other_model: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(http.model / "config.json", half)
    tensors = {name: t.to(torch.float16) for name, t in load_file(other_model / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    (running,) = await begun(http, "widened", max_new_tokens=200)
    await http.post("/pause_generation", {"mode": "in_place"})
    await load(http, half, "21", flush=False)
    await http.post("/continue_generation")
    assert len((await running)["output_ids"]) == 200
    await idle(http)
    assert is_of(half, await http.generate(PROMPT, **SHORT))


@pytest.mark.embedded_only(
    "SGLang takes pickled handles of its GPU's memory, which tests/gpu/test_shared_memory.py hands it"
)
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
    assert answer["meta_info"]["weight_version"] == "22"
    assert is_of(other_model, answer)


@pytest.mark.embedded_only("SGLang unpickles them, and its scheduler ends with what is no pickle of its own")
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


@pytest.mark.embedded_only("SGLang's scheduler ends when it is told to release memory while requests run")
async def test_memory_is_not_released_while_requests_run(http: Any) -> None:
    (running,) = await begun(http, "holding")
    await http.post("/release_memory_occupation", {"tags": ["kv_cache"]}, status=400)
    await http.post("/abort_request", {"rid": "holding"})
    await running


@pytest.mark.embedded_only("SGLang would compute in memory that is gone")
async def test_a_request_sent_while_memory_is_released_waits(http: Any) -> None:
    before = await http.generate(PROMPT, **SHORT)
    await http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await http.post("/resume_memory_occupation", {"tags": ["weights"]})
    waiting = asyncio.create_task(http.generate(PROMPT, **SHORT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await http.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (await waiting)["output_ids"] == before["output_ids"]


async def test_serving_goes_on_after_memory_was_released_and_given_weights_again(
    http: Any, restored: None
) -> None:
    before = await http.generate(PROMPT, **SHORT)
    await idle(http)
    await http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await http.post("/resume_memory_occupation", {"tags": ["weights"]})
    await load(http, http.model, "27")
    await http.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    after = await http.generate(PROMPT, **SHORT)
    assert after["output_ids"] == before["output_ids"] or not EXACT
    assert is_of(http.model, after)
    assert after["meta_info"]["weight_version"] == "27"


async def test_checksums_tell_weights_apart(http: Any, restored: None, other_model: Path) -> None:
    checker = "/weights_checker"
    await http.post(checker, {"action": "snapshot"})
    same = await http.post(checker, {"action": "compare"}, status=200 if http.own else (200, 400))
    if not http.own and "not compiled with CUDA" in same["message"]:
        pytest.skip("SGLang compares and sums weights only on a GPU")
    assert same["success"]
    first = await http.post(checker, {"action": "checksum"})
    await load(http, other_model, "25")
    different = await http.post(checker, {"action": "compare"}, status=200 if http.own else 400)
    assert not different["success"]
    assert await http.post(checker, {"action": "checksum"}) != first
    await load(http, http.model, "28")
    assert await http.post(checker, {"action": "checksum"}) == first


async def test_health_and_information_are_served(http: Any) -> None:
    await http.get("/health")
    await http.get("/health_generate")
    assert (await http.get("/server_info"))["model_path"]
    info = await http.get("/model_info")
    assert info["model_path"]
    assert info["weight_version"]


async def test_a_client_that_leaves_takes_only_its_own_request_along(http: Any) -> None:
    stays = (
        "leaver-2" if http.own else "stayer"
    )  # SGLang ends all whose rid begins with that of the one that left
    (other,) = await begun(http, stays, max_new_tokens=600)
    (leaving,) = await begun(http, "leaver")
    plain = asyncio.create_task(http.generate(PROMPT, **LONG, top={"rid": "leave"}))
    await asyncio.sleep(0.1)
    leaving.cancel()
    plain.cancel()
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"
    if not http.own:  # it looks for a client that left every few seconds
        return await idle(http)
    for _ in range(20):
        if not (await http.get("/server_info"))["load"]["running"]:
            return None
        await asyncio.sleep(0.02)
    raise AssertionError("the requests of a client that left still run")
