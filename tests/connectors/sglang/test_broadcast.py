"""Weights broadcast to real engines by gloo: served, repeated in one group, and engines lost on the way replaced."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.engines import weight_update
from millrace.connectors.engines.fleet import Fleet
from millrace.core.errors import EngineError, TrainerStalledError
from tests.support.fleets import checksums
from tests.support.local_handle import LocalHandle
from tests.support.sent_weights import Sending

MakeFleet = Callable[..., Fleet]


@pytest.fixture
def sending(other_model: Path) -> Iterator[Sending]:
    made = Sending(other_model)
    yield made
    if made.engines:
        made.engines.close()


def hurry(monkeypatch: pytest.MonkeyPatch, bucket_s: float, late_s: float) -> None:
    """Give broadcasts up soon."""
    monkeypatch.setattr(weight_update, "BUCKET_TIMEOUT_S", bucket_s)
    monkeypatch.setattr(weight_update, "LATE_S", late_s)


async def publish(fleet: Fleet, sending: Sending, version: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    await fleet.update_weights(weight_update.load_by_broadcast(sending.stream, sending, 1, seconds), version)
    return seconds


async def holding(fleet: Fleet, model: Path, version: int) -> list[Any]:
    """Checksums of engines that serve other weights, as the folder gives them."""
    await fleet.ensure(str(model))
    await fleet.update_weights(str(model), version)
    return await checksums(fleet)


async def test_engines_hold_what_was_broadcast_and_keep_their_group(
    make_fleet: MakeFleet, sending: Sending, tiny_model: Path, other_model: Path
) -> None:
    fleet = make_fleet()
    wanted = await holding(fleet, other_model, 30)
    await fleet.update_weights(str(tiny_model), 31)
    seconds = await publish(fleet, sending, 32)
    assert set(seconds) == {"group", "gather", "transfer"}
    assert fleet.unconfirmed(32) == []
    assert await checksums(fleet) == wanted
    await fleet.update_weights(str(tiny_model), 33)
    await publish(fleet, sending, 34)
    assert await checksums(fleet) == wanted
    assert len(sending.groups) == 1
    assert fleet.restarts == 0


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
async def test_an_engine_lost_amid_a_broadcast_is_replaced_and_all_hold_the_weights(
    make_fleet: MakeFleet,
    sending: Sending,
    handles: list[LocalHandle],
    tiny_model: Path,
    other_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    hurry(monkeypatch, 3.0, 2.0)
    fleet = make_fleet(rollout={"progress_timeout_s": 5.0})
    wanted = await holding(fleet, other_model, 40)
    await fleet.update_weights(str(tiny_model), 41)

    def once(bucket: int) -> None:
        if bucket == 1 and len(sending.groups) == 1:
            handles[0].signal(number)

    sending.disturb = once
    await publish(fleet, sending, 42)
    assert fleet.unconfirmed(42) == []
    assert await checksums(fleet) == wanted
    assert fleet.restarts >= 1
    assert len(sending.groups) >= 2


async def test_what_engines_refuse_is_told_and_they_go_on_generating(
    make_fleet: MakeFleet, sending: Sending, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, 3.0, 2.0)
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    sending.tensors = [("no.such.weight", torch.zeros(8)), *sending.tensors]
    with pytest.raises(EngineError, match="no.such.weight is no tensor of the model served"):
        await publish(fleet, sending, 43)
    assert fleet.unconfirmed(43) == [0, 1]
    for client in fleet._clients.values():
        assert not (await client.server_info())["paused"]


async def test_a_rank_that_does_not_return_is_reported_with_the_engines_reasons(
    make_fleet: MakeFleet, sending: Sending, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, 1.0, 0.5)
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    sending.tensors = [("no.such.weight", torch.zeros(8)), *sending.tensors]
    returned = threading.Event()

    async def stall(timeout_s: float) -> None:
        await asyncio.to_thread(returned.wait, 60)

    monkeypatch.setattr(sending, "broadcast_bucket", stall)
    try:
        with pytest.raises(TrainerStalledError, match="rank 0 does not return.*no.such.weight"):
            await publish(fleet, sending, 44)
    finally:
        returned.set()
