"""One episode of an environment in a process of rollouts, with a driver that answers from a list."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config.rollout import SessionSection
from millrace.core.sessions.pipe import End
from tests.support.session_driver import Driver, start

Play = Callable[..., Awaitable[tuple[End, list[str]]]]


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    """Plays an episode: how the rollout ended, and what was shown before each turn."""
    made: list[SessionPool] = []

    async def make(
        function: str, options: dict[str, Any], texts: list[str], *, wired: str = "environment", **task: Any
    ) -> tuple[End, list[str]]:
        settings = {wired: {"function": function, "options": options}, "timeout_s": 60}
        pool = SessionPool(SessionSection.model_validate(settings))
        made.append(pool)
        driver = Driver(texts)
        end = await pool.run(start(**task), driver.handle)
        return end, ["\n".join(piece["content"] for piece in new) for new in driver.shown]

    yield make
    for pool in made:
        pool.close()
