"""A driver whose lease another process has taken starts no task and ends no actor, which are its successor's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.connectors.engines.process import EngineServer
from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.errors import LeaseHeldError
from millrace.tasks.context import IterationContext
from millrace.tasks.rollout import rollout
from millrace.tasks.run_recorded import may_help, run_recorded
from millrace.tasks.runtime.runtime import Runtime


@pytest.fixture
def stale(make_config: Callable[..., RunConfig]) -> Runtime:
    """The runtime of a driver that another one has replaced."""
    runtime = Runtime(make_config())
    lease = Lease.take(runtime.run_folder.store)
    runtime.drive_under(lease, "1")
    lease.release()
    Lease.take(Store(runtime.run_folder.store.url))
    return runtime


async def test_it_starts_no_task(stale: Runtime) -> None:
    with pytest.raises(LeaseHeldError, match="taken over by process"):
        await run_recorded(rollout, IterationContext(stale, 0))


async def test_it_ends_no_actor(stale: Runtime) -> None:
    cluster = stale._cluster
    for ending in (
        lambda: cluster.end_role("trainer"),
        lambda: cluster.find_alive("engine", 0, EngineServer),
    ):
        with pytest.raises(LeaseHeldError):
            await ending()


def test_no_retry_helps() -> None:
    assert not may_help(None, None, type("State", (), {"data": LeaseHeldError("lost")}))
