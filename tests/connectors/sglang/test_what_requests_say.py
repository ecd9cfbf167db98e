"""Whoever chooses the engine, a request says there what it was given: a field that a dispatcher drops has no effect, silently."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millrace.connectors.engines.client import GenerateRequest
from millrace.connectors.engines.external import ExternalEngine
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.sglang.client import SESSION, SglangClient
from millrace.core.contracts.handles import CONTINUED
from tests.support.engine_gates import Rooms, Seen, open_gates
from tests.support.engine_process import embedded_engine
from tests.support.fleets import PROMPT, SHORT, recovery
from tests.support.local_handle import LocalRouterHandle, fleet_config

PARTS = {"direct": ("null", "null"), "routed": ("null", "null"), "paired": ("prefill", "decode")}
ALONE = {
    "handoff": "of a pair",
    "check": "how the client waits",
    "progress_timeout_s": "how long it waits",
    "on_part": "with flush_tokens, tests of flushing hold it; refused with a router",
    "every": "as on_part",
    "versions": "chooses an adapter by name, tests of adapters hold it; refused with a router and with pairs",
    "images": "tests of sent pictures hold it; refused with a router and with pairs",
    "experts": "tests of routed experts hold it; refused with a router and with pairs",
}  # fields that are no part of what every dispatcher passes on
SAYS: dict[str, tuple[Any, Callable[[Seen], Any]]] = {
    "input_ids": ([*PROMPT, 7, 8], lambda seen: seen.body["input_ids"]),
    "sampling_params": (4, lambda seen: seen.body["sampling_params"]["max_new_tokens"]),
    "rid": ("said", lambda seen: seen.body["rid"].partition("~")[0]),
    "priority": (3, lambda seen: seen.body.get("priority")),
    "continued": ("2", lambda seen: seen.headers.get(CONTINUED)),
    "cache_key": (True, lambda seen: bool(seen.body.get("extra_key"))),
}
MakeFleet = Callable[[], tuple[Fleet, Rooms]]


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        logs = (folder / f"{index}.log" for index in range(2))
        yield [stack.enter_context(embedded_engine(tiny_model, log=log))[0] for log in logs]


@pytest_asyncio.fixture(params=PARTS)
async def opened(
    request: pytest.FixtureRequest, engines: list[str], tiny_model: Path
) -> AsyncIterator[tuple[str, Fleet, Rooms]]:
    """How requests reach engines, a fleet that sends them so, and what engines are asked."""
    way, rooms = request.param, Rooms()
    if way == "routed":
        pytest.importorskip("sglang_router")
    async with contextlib.AsyncExitStack() as stack:
        urls = await open_gates(stack, engines, PARTS[way], rooms)
        settings: dict[str, Any] = {"kind": "external", "addresses": urls}
        settings |= {"paired": {"prefill": 1}, "routed": {"router": {"policy": "manual"}}}.get(way, {})
        config = fleet_config(tiny_model, engines=settings, pipeline={"ahead": 1, "on_update": "keep"})
        handles: list[LocalRouterHandle] = []

        async def handle(index: int) -> ExternalEngine:
            return ExternalEngine(config, index)

        async def router() -> LocalRouterHandle:
            if not handles:
                handles.append(LocalRouterHandle(config))
                stack.callback(handles[0].close)
            return handles[0]

        fleet = Fleet(config, handle, router)
        stack.push_async_callback(fleet.close)
        yield way, fleet, rooms


async def test_every_field_of_a_request_reaches_the_engine(
    opened: tuple[str, Fleet, Rooms], tiny_model: Path
) -> None:
    way, fleet, rooms = opened
    recover = recovery(fleet, tiny_model)
    keys = []
    for version in (1, 2):
        await fleet.ensure(str(tiny_model))
        await fleet.update_weights(str(tiny_model), version, on_update="keep")
        dispatcher = fleet.dispatcher(version, recover)
        rooms.seen.clear()
        ids = SAYS["input_ids"][0]
        await dispatcher.generate(ids, SHORT, rid="said", session="s", continued=2, priority=3)
        asked = [seen for seen in rooms.seen if seen.body.get("rid", "").startswith("said")]
        assert [seen.part for seen in asked] == [
            part for part in ("null", "prefill", "decode") if part in PARTS[way]
        ]
        for name, (expected, read) in SAYS.items():
            for seen in asked:
                if not (name == "sampling_params" and seen.part == "prefill"):  # the gate asks for one token
                    assert read(seen) == expected, name
        keys.append({seen.body["extra_key"] for seen in asked})
        if way == "routed":
            assert asked[0].headers[SESSION] == "s"
    assert len(keys[0]) == len(keys[1]) == 1
    assert keys[0] != keys[1], "prefixes of other weights are not shared"


def test_every_field_of_a_request_has_a_row() -> None:
    assert {each.name for each in fields(GenerateRequest)} - {"session"} == SAYS.keys() | ALONE.keys()


def test_no_two_clients_have_the_same_weights_by_number() -> None:
    first, second = (SglangClient("http://127.0.0.1:1", "engine-0") for _ in range(2))
    before = first.refit
    first.note_refit()
    assert before < second.refit < first.refit
