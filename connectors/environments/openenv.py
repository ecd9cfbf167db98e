"""Environments of OpenEnv: a server at a URL holds the episodes, one session per rollout.

After a restart an episode is replayed with its seed and arguments. If the server ignores the seed, it may show something else,
and generation continues from the first difference.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from millrace.connectors.environments.extras import number, package
from millrace.core.plain_text import json_text
from millrace.core.sessions.interface import Done, Observation, Task, Turn

SEEDS = 1 << 31
MESSAGE_TIMEOUT_S = 3600.0  # long, since rollout.session.timeout_s limits each step
SERVER_ONLY = ("done", "reward", "metadata")  # fields of an observation that the policy does not see


class OpenEnv:
    """One episode on a server."""

    recovery: Literal["restart"] = "restart"

    def __init__(
        self,
        url: str,
        action: str | None = None,
        show: str | None = None,
        reward: Literal["sum", "last"] = "sum",
        reset: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """url: of the server. Its environments must support several sessions at once.

        action: field of the server's action for the text of a turn; null: the turn is the action, as JSON.
        show: field of an observation to show as text; null: all of it, as JSON.
        reward: an episode's reward: the sum of its steps' rewards, or the last one.
        reset: arguments for the server's reset, besides the row's metadata `reset` and the seed.
        """
        generic = package("openenv.core.generic_client", "openenv").GenericEnvClient
        self._client = generic(
            base_url=url, message_timeout_s=MESSAGE_TIMEOUT_S, headers=dict(headers) if headers else None
        )
        self._action, self._show, self._last = action, show, reward == "last"
        self._reset = dict(reset or {})
        self._rewards: list[float] = []

    async def reset(self, task: Task) -> Observation | None:
        """Start an episode with the `seed` in the row's metadata, otherwise a hash of its prompt."""
        await self._client.connect()
        seed = number(task, "seed") % SEEDS
        arguments = {"seed": seed, **self._reset, **task.metadata.get("reset", {})}
        result = await self._client.reset(**arguments)
        self._rewards = []
        text = self._text(result.observation)
        return Observation(text) if text else None

    async def step(self, turn: Turn) -> Observation | Done:
        """Send the turn as an action. If the server refuses it, the policy sees the reason."""
        if self._action is not None:
            action: Any = {self._action: turn.content}
        else:
            try:
                action = json.loads(turn.content)
            except ValueError as error:
                return Observation(f"The action is not JSON: {error}")
            if not isinstance(action, dict):
                return Observation("The action is not a JSON object.")
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return Observation(f"The action is refused: {error}")
        self._rewards.append(float(result.reward or 0.0))
        if result.done:
            total = self._rewards[-1] if self._last else sum(self._rewards)
            return Done(total, {"steps": float(len(self._rewards))})
        return Observation(self._text(result.observation))

    async def close(self) -> None:
        """End the session on the server."""
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._show is not None:
            shown = observation.get(self._show, "")
            return shown if isinstance(shown, str) else json_text(shown)
        rest = {name: value for name, value in observation.items() if name not in SERVER_ONLY}
        return json_text(rest) if rest else ""
