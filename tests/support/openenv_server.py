"""An OpenEnv server of a counting game: `python -m tests.support.openenv_server PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A number."""

    number: int


class Answer(Observation):
    """Whether it is too low or too high."""

    hint: str = ""


class Numbers(Environment[Guess, Answer, State]):
    """Find the number that is the seed, up to ten."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._steps = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Answer:
        """Begin."""
        self._number, self._steps = (seed or 0) % 10, 0
        return Answer(hint="a number below ten", reward=None, done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Answer:
        """Compare."""
        self._steps += 1
        if action.number == self._number:
            return Answer(hint="right", reward=1.0, done=True)
        return Answer(
            hint="too low" if action.number < self._number else "too high", reward=-0.25, done=False
        )

    @property
    def state(self) -> State:
        """How many steps there were."""
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Answer, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
