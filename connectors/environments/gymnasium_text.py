"""Gymnasium's environments as text: observations are shown as text, and the action is parsed from the policy's turn.

After a restart an episode is replayed from its seed, so the same seed must give the same episode.
"""

import contextlib
import importlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from millrace.connectors.environments.extras import number, package
from millrace.core.errors import ConfigError
from millrace.core.sessions.interface import Done, Observation, Task, Turn

FIELD = "rollout.session.environment.options"
SEEDS = 1 << 31


class GymnasiumText:
    """One episode. Its reward is the sum of its steps' rewards."""

    recovery: Literal["restart"] = "restart"

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        register: str = "",
        show: Literal["observation", "render"] = "observation",
        action: str = r"(?:.*\n)*\s*(.+?)\s*$",
        actions: Mapping[str, Any] | None = None,
        instructions: str = "",
    ) -> None:
        """The environment with this id in Gymnasium's registry, created with the arguments `make`.

        register: module that registers it. show: show the observations, or the environment's rendering as text.
        action: pattern for the action: the first group of its last match in a turn; by default the last line.
        actions: the action for each text; by default the text, or a number if the environment takes numbers.
        instructions: text shown before the first observation.
        """
        gymnasium = package("gymnasium", "gymnasium")
        if register:
            importlib.import_module(register)
        arguments = {**({"render_mode": "ansi"} if show == "render" else {}), **(make or {})}
        try:
            self._environment = gymnasium.make(id, **arguments)
        except gymnasium.error.Error as error:
            raise ConfigError(
                str(error), where=f"{FIELD}.id = {id}", remedy="correct it, or register"
            ) from error
        self._by_number = isinstance(self._environment.action_space, gymnasium.spaces.Discrete)
        self._show, self._pattern = show, re.compile(action)
        self._actions, self._instructions = actions, instructions
        self._sum = 0.0
        self._steps = 0

    async def reset(self, task: Task) -> Observation:
        """Start the episode with the `seed` in the row's metadata, otherwise a hash of its prompt."""
        observation, _ = self._environment.reset(seed=number(task, "seed") % SEEDS)
        self._sum, self._steps = 0.0, 0
        return Observation("\n\n".join(filter(None, (self._instructions, self._seen(observation)))))

    async def step(self, turn: Turn) -> Observation | Done:
        """Take the turn's action. If it cannot be parsed, nothing changes, and the answer says how to write an action."""
        action, problem = self._read(turn.content)
        if problem:
            return Observation(problem)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self._sum += float(reward)
        self._steps += 1
        if terminated or truncated:
            return Done(self._sum, {"steps": float(self._steps), "in_time": float(terminated)})
        return Observation(self._seen(observation))

    async def close(self) -> None:
        """Close the environment."""
        with contextlib.suppress(AttributeError):  # some environments have no close
            self._environment.close()

    def _seen(self, observation: Any) -> str:
        return str(self._environment.render() if self._show == "render" else observation)

    def _read(self, text: str) -> tuple[Any, str]:
        """The action in a text and ""; or None and the message for the policy."""
        matches = list(self._pattern.finditer(text))
        written = (matches[-1][1] if self._pattern.groups else matches[-1][0]).strip() if matches else ""
        if self._actions is not None:
            if written in self._actions:
                return self._actions[written], ""
            return None, f"There is no action {written!r}; choose {' or '.join(map(str, self._actions))}."
        space = self._environment.action_space
        action: Any = written
        if self._by_number:
            action = int(written) if re.fullmatch(r"-?\d{1,9}", written) else written
        if not space.contains(action):
            return None, f"{written!r} is no action; an action is one of {space}."
        return action, ""
