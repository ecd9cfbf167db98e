"""Numbers of a request to the embedded engine: one beyond its bounds is refused with 400, and the engine goes on serving.

A number that is not looked at takes the memory of the host (`n`), or ends the thread of the engine, which serves everybody.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from millrace.connectors.engines.embedded import (
    adapter_routes,
    chat,
    engine,
    sampling,
    server,
    weight_routes,
)
from millrace.connectors.engines.embedded.access import Access
from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.sampling import KINDS, SamplingParams
from millrace.connectors.engines.embedded.server import Server
from millrace.core.contracts.handles import CONTINUED

Client = TestClient[Any, Any]
HUGE = 10**400  # beyond every number of a machine; JSON has no largest one
EVER = (
    -HUGE,
    HUGE,
    float("inf"),
    float("-inf"),
    float("nan"),
    "1",
    [[1]],
)  # no number of a request is one of these

# the largest and smallest that are refused, beside EVER
OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (-1, 10**6),
    "min_new_tokens": (-1, 129),
    "temperature": (-0.1, 1.1e6, 1e300),
    "top_p": (0, 1.1),
    "top_k": (-2, 0, 2**31),
    "min_p": (-0.1, 1.1),
    "frequency_penalty": (-2.1, 2.1),
    "presence_penalty": (-2.1, 2.1),
    "repetition_penalty": (0, 2.1),
    "n": (0, 1025, 10_000_000),
    "sampling_seed": (-(2**63) - 1, 2**63),
    "stream_interval": (0, 2**31),
    "stop_token_ids": ([-1], [10**6], [HUGE]),
    "logit_bias": ({"1": 1e31}, {"1": -1e31}, {"1": HUGE}, {"1": float("inf")}, {"9" * 5000: 1}, {"1": True}),
}
OF_GENERATE: dict[str, tuple[Any, ...]] = {
    "input_ids": ([-1], [10**6], [HUGE], [True]),
    "priority": (-(2**31) - 1, 2**31),
    "logprob_start_len": (-2, 2**31),
    "top_logprobs_num": (-1, 257),
    "routed_experts_start_len": (-1, 3),
}
OF_CHAT: dict[str, tuple[Any, ...]] = {
    "max_tokens": OF_SAMPLING["max_new_tokens"],
    "max_completion_tokens": OF_SAMPLING["max_new_tokens"],
    "seed": OF_SAMPLING["sampling_seed"],
    "n": (0, 2, HUGE),
    **{name: OF_SAMPLING[name] for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")},
}
GROUP = {"backend": "gloo", "group_name": "g", "master_address": "127.0.0.1"} | {
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
}
OF_GROUP: dict[str, tuple[Any, ...]] = {
    "master_port": (0, 65536),
    "rank_offset": (0, 2),
    "world_size": (1, 4097),
}
BUCKET = {"load_format": "flattened_bucket", "names": ["model.norm.weight"], "dtypes": ["float32"]}
OF_BUCKET: dict[str, tuple[Any, ...]] = {"shapes": ([[-1]], [[HUGE]], [[2**62, 2**62]], [[2**40]], [["1"]])}
PROFILE = {"output_dir": "traces", "num_steps": 1}
OF_PROFILE: dict[str, tuple[Any, ...]] = {"num_steps": (0, -1, 2**31, True)}
OF_ADAPTER: dict[str, tuple[Any, ...]] = {
    "lora_name": ("", "a" * 513, ["a"], {}, True),
    "lora_path": (
        "",
        "\0",
        "\ud800",
        "a" * 5000,
        "/dev/zero",
        "/dev",
        "/proc/self/mem",
        "..",
        ["a"],
        {},
        True,
    ),
}
OF_HEADER = {CONTINUED: ("-1", "1", "9" * 5000, "a", "", "1.5")}
# what is no number
OTHERS = """model messages stream user stop text rid sampling_params return_logprob return_routed_experts return_text_in_logprobs abort_all mode tags
model_path weight_version serialized_named_tensors group_name master_address backend new_version action names dtypes load_format
image_data output_dir"""


@pytest.fixture(scope="module")
def engine_of_tests(tiny_model: Path) -> Iterator[Engine]:
    made = Engine(str(tiny_model), max_running=4, max_total_tokens=1024, weight_version="0", seed=0)
    made.start()
    yield made
    made.stop()


@pytest.fixture
async def client(engine_of_tests: Engine) -> AsyncIterator[Client]:
    app = Server(engine_of_tests, {"model_path": str(engine_of_tests.folder)}, Access(None)).app()
    async with TestClient(TestServer(app)) as found:
        yield found


async def refused(
    client: Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> str:
    """The message of a refusal; the engine serves others afterwards."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    async with client.post(path, data=json.dumps(body), headers=sent) as answer:
        assert answer.status == 400, f"{path} answered {answer.status} to {str(body)[:300]}"
        message = str((await answer.json())["error"]["message"])
    good = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    async with client.post("/generate", json=good) as answer:
        assert answer.status == 200, f"after {str(body)[:300]}: {await answer.text()}"
    return message


@pytest.mark.parametrize("field", OF_SAMPLING)
async def test_a_number_of_sampling_params_has_bounds(client: Client, field: str) -> None:
    for value in (*OF_SAMPLING[field], *EVER):
        body = {"input_ids": [1], "sampling_params": {field: value}}
        assert field in await refused(client, "/generate", body) or field == "max_new_tokens"


@pytest.mark.parametrize("field", OF_GENERATE)
async def test_a_number_of_a_request_to_generate_has_bounds(client: Client, field: str) -> None:
    for value in (*OF_GENERATE[field], *EVER[:6]):
        body = {"input_ids": [1, 2], "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
        assert field in await refused(client, "/generate", {**body, field: value})


@pytest.mark.parametrize("field", OF_CHAT)
async def test_a_number_of_a_chat_completion_has_bounds(client: Client, field: str) -> None:
    for value in (*OF_CHAT[field], *EVER):
        body = {"messages": [{"role": "user", "content": "1+1="}], field: value}
        assert await refused(client, "/v1/chat/completions", body)


@pytest.mark.parametrize("field", OF_GROUP)
async def test_a_number_of_a_group_of_trainer_and_engines_has_bounds(client: Client, field: str) -> None:
    for value in (*OF_GROUP[field], *EVER, None):
        assert field in await refused(client, "/init_weights_update_group", {**GROUP, field: value})


@pytest.mark.parametrize("field", OF_BUCKET)
async def test_a_number_of_a_bucket_of_weights_has_bounds(client: Client, field: str) -> None:
    for value in (*OF_BUCKET[field], *EVER, None):
        assert await refused(client, "/update_weights_from_distributed", {**BUCKET, field: value})


@pytest.mark.parametrize("field", OF_PROFILE)
async def test_a_number_of_a_trace_has_bounds(client: Client, field: str) -> None:
    for value in (*OF_PROFILE[field], *EVER, None):
        assert field in await refused(client, "/start_profile", {**PROFILE, field: value})


@pytest.mark.parametrize("field", OF_ADAPTER)
async def test_the_name_and_the_folder_of_an_adapter_have_bounds(client: Client, field: str) -> None:
    numbers = [value for value in EVER if not isinstance(value, str)]
    for value in (*OF_ADAPTER[field], *numbers, None):
        good = {"lora_name": "a", "lora_path": "adapters"}
        assert field in await refused(client, "/load_lora_adapter", {**good, field: value})
        if field == "lora_name":
            assert field in await refused(client, "/unload_lora_adapter", {field: value})
        elif value is not None:
            assert field in await refused(client, "/generate", {"input_ids": [1], field: value})


def _waits_for_ever(path: Path) -> None:
    os.mkfifo(path)


def _never_ends(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _holds_no_object(path: Path) -> None:
    path.write_text("[" * 100_000)


def _is_a_folder(path: Path) -> None:
    path.mkdir()


def _fills_the_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _names_a_header_without_end(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + b"{}")


HOSTILE = [
    *(_waits_for_ever, _never_ends, _holds_no_object, _is_a_folder, _fills_the_memory),
    _names_a_header_without_end,
]


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("make", HOSTILE)
async def test_a_hostile_folder_of_adapters_is_refused(
    client: Client, tmp_path: Path, make: Callable[[Path], None], file: str
) -> None:
    if file != "adapter_config.json":
        described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
        (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    make(tmp_path / file)
    asked = {"lora_name": "a", "lora_path": str(tmp_path)}
    async with asyncio.timeout(60):
        assert f"{file} cannot be read" in await refused(client, "/load_lora_adapter", asked)


async def test_a_tensor_is_named_once_in_a_bucket(client: Client) -> None:
    twice = {**BUCKET, "names": ["model.norm.weight"] * 2, "dtypes": ["float32"] * 2, "shapes": [[32]] * 2}
    assert "names" in await refused(client, "/update_weights_from_distributed", twice)


@pytest.mark.parametrize("name", OF_HEADER)
async def test_a_number_of_a_header_has_bounds(client: Client, name: str) -> None:
    for value in OF_HEADER[name]:
        assert name in await refused(client, "/generate", {"input_ids": [1]}, {name: value})


async def test_answers_of_one_request_are_counted_over_its_prompts(client: Client) -> None:
    body = {"input_ids": [[1]] * 5, "sampling_params": {"n": 1024, "max_new_tokens": 0}}
    assert "sampling_params.n" in await refused(client, "/generate", body)
    goes_on = {"input_ids": [1, 2], "sampling_params": {"n": 2}}
    assert CONTINUED in await refused(client, "/generate", goes_on, {CONTINUED: "1"})


async def test_the_largest_numbers_are_served(client: Client) -> None:
    params = {"n": 1024, "max_new_tokens": 0, "top_k": 2**31 - 1, "sampling_seed": 2**63 - 1}
    params |= {"temperature": 1e6, "logit_bias": {"1": 1e30}, "stream_interval": 2**31 - 1}
    async with client.post("/generate", json={"input_ids": [1], "sampling_params": params}) as answer:
        assert (answer.status, len(await answer.json())) == (200, 1024)
    params |= {"n": 1, "max_new_tokens": 2, "temperature": 1e-6}
    body = {"input_ids": [1], "priority": 2**31 - 1, "return_logprob": True, "top_logprobs_num": 3}
    async with client.post("/generate", json={**body, "sampling_params": params}) as answer:
        assert answer.status == 200, await answer.text()
    prompts = {"input_ids": [[1]] * 5000, "sampling_params": {"max_new_tokens": 0}}
    async with client.post("/generate", json=prompts) as answer:
        assert (answer.status, len(await answer.json())) == (200, 5000)


def test_every_number_has_a_row() -> None:
    types = typing.get_type_hints(SamplingParams)
    numbers = {name for name, kind in types.items() if kind not in (bool, list[str])}
    assert numbers == set(OF_SAMPLING)
    assert set(types) == set(KINDS)
    assert {*chat.READ} - set(OTHERS.split()) == set(OF_CHAT)
    read = {*chat.READ}
    for module in (adapter_routes, chat, engine, sampling, server, weight_routes):
        assert module.__file__
        read |= set(_read_of_bodies(ast.parse(Path(module.__file__).read_text())))
    rows = {*OF_GENERATE, *OF_CHAT, *OF_GROUP, *OF_BUCKET, *OF_PROFILE, *OF_ADAPTER}
    assert read == rows | set(OTHERS.split())


def _read_of_bodies(tree: ast.AST) -> Iterator[str]:
    """Names of the fields that a module reads of a request's body: `body.get("x")`, or of each of a tuple of names."""
    loops = {
        each.target.id: each.iter
        for each in ast.walk(tree)
        if isinstance(each, ast.comprehension) and isinstance(each.target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        ):
            continue
        if "body" not in ast.unparse(node.func.value) and "read_json" not in ast.unparse(node.func.value):
            continue
        name: ast.expr = node.args[0]
        if isinstance(name, ast.Name):
            name = loops[name.id]
        yield from (item.value for item in ast.walk(name) if isinstance(item, ast.Constant))


@pytest.mark.parametrize("depth", [900, 20_000])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/pause_generation", "/abort_request"])
async def test_deep_json_is_refused(client: Client, path: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for body in (deep, f'{{"text": {deep}, "messages": {deep}, "mode": {deep}, "rid": {deep}}}'):
        async with client.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400, f"{path} answered {answer.status}"


@pytest.mark.parametrize("rid", [["a"], {"a": 1}, 1, 1.5, True])
async def test_a_request_to_end_is_named_by_a_text(client: Client, rid: Any) -> None:
    assert "rid" in await refused(client, "/abort_request", {"rid": rid})
