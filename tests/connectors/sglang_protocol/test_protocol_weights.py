"""What an engine's endpoints for weights promise: from disk, from tensors, versions, checksums."""

from __future__ import annotations

import asyncio
import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save

from tests.support.engine_control import PROMPT, SHORT, begun, idle, is_of, load, versions_of
from tests.support.engine_process import CLOSE, EXACT, logprobs_of, reference_logprobs


async def test_an_update_in_a_pause_shows_in_the_versions_of_a_request(
    http: Any, restored: None, other_model: Path
) -> None:
    meta = (await http.generate(PROMPT, **SHORT))["meta_info"]
    if not http.own and "weight_versions" not in meta:
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
    # SGLang aborts the name of a streamed request two seconds after its end, and with it who has the name by then
    (running,) = await begun(http, f"onward-{mode}", max_new_tokens=400)
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
