"""A run that is interrupted makes no new actors, whatever of it is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millrace.core.config import RunConfig
from millrace.tasks.runtime.cluster import Cluster


async def test_once_its_actors_were_killed_a_run_joins_no_cluster(
    make_config: Callable[..., RunConfig],
) -> None:
    cluster = Cluster(make_config())
    cluster.kill_actors()
    with pytest.raises(asyncio.CancelledError):
        await cluster.join()
