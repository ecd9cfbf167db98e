"""The two forms over a session that need no rollout function: a policy with tools, and an environment.

Both are rollout functions, written against `Session` alone.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from millrace.core.hooks.protocols import RewardResult
from millrace.core.sessions.interface import Done, Environment, Observation, Session, SessionError, Turn
from millrace.core.sessions.live import LiveSession


async def use_tools(session: Session) -> None:
    """Generate, answer the calls of tools, and so on until a turn calls none. reward.function scores the rollout."""
    turn = await session.generate()
    while (turn.tool_calls or turn.problem) and not turn.truncated:
        if turn.problem:
            session.observe(f"The call could not be read: {turn.problem}")
        for call in turn.tool_calls:
            session.observe(await session.call(call.name, **call.arguments))
        turn = await session.generate()


async def act_in(
    session: LiveSession, make: Callable[..., Environment], **options: Any
) -> RewardResult | None:
    """One episode of an environment. Recorded steps are not made again, unless its recovery is "restart"."""
    environment = make(**options)
    check_environment(environment)
    episode = _Episode(session, environment)
    try:
        seen = await episode.reset()
        while not isinstance(seen, Done):
            if seen is not None:
                session.observe(seen.content, seen.role)
            turn = await session.generate()
            seen = await episode.step(turn)
            if turn.truncated:
                break
    finally:
        closing: Any = environment.close()
        if inspect.isawaitable(closing):
            await closing
    if not isinstance(seen, Done) or seen.reward is None:
        return None
    return RewardResult(seen.reward, seen.parts, seen.answer)


RECOVERIES = ("stateless", "snapshot", "restart")


def check_environment(environment: object) -> None:
    """Raises TypeError naming the methods that an environment lacks."""
    recovery = getattr(environment, "recovery", None)
    if recovery not in RECOVERIES:
        said = "says no recovery" if recovery is None else f"says recovery = {recovery!r}"
        raise TypeError(f"{type(environment).__name__} {said}: it is one of {', '.join(RECOVERIES)}")
    wanted = ["reset", "step", "close", *(["snapshot", "restore"] if recovery == "snapshot" else [])]
    missing = [name for name in wanted if not callable(getattr(environment, name, None))]
    if missing:
        raise TypeError(
            f"{type(environment).__name__} lacks {', '.join(missing)}, which recovery = {recovery!r} needs"
        )


class _Episode:
    """The events of an episode: made, or taken from the record."""

    def __init__(self, session: LiveSession, environment: Environment) -> None:
        self._session = session
        self._environment = environment
        self._state: str | None = None  # state of the newest recorded event

    async def reset(self) -> Observation | Done | None:
        """Start the episode."""
        if self._environment.recovery == "snapshot":
            return await self._event("reset", lambda: self._environment.reset(self._session.task))
        return await made(lambda: self._environment.reset(self._session.task))

    async def step(self, turn: Turn) -> Observation | Done | None:
        """Answer a turn."""
        if self._environment.recovery == "restart":
            return await made(lambda: self._environment.step(turn))
        return await self._event("step", lambda: self._environment.step(turn))

    async def _event(self, name: str, make: Callable[[], Any]) -> Observation | Done | None:
        async def to_record() -> str:
            if self._state is not None:
                self._environment.restore(self._state)  # type: ignore[attr-defined]
                self._state = None
            outcome = await made(make)
            snapshot = self._environment.recovery == "snapshot"
            state = self._environment.snapshot() if snapshot else None  # type: ignore[attr-defined]
            if snapshot and not isinstance(state, str):
                raise TypeError(f"snapshot returns text, not {type(state).__name__}")
            return json.dumps({**_plain(outcome), "state": state})

        found = await self._session.recorded(f"environment.{name}", {}, to_record)
        # the policy does not see a failure of an environment: its rollout ends with it
        if found.failed:
            raise SessionError(found.text)
        if found.before:
            self._state = json.loads(found.text)["state"]
        return from_record(found.text)


async def made(make: Callable[[], Any]) -> Observation | Done | None:
    """Call an environment's function. Raises TypeError if it returns no outcome."""
    outcome = make()
    outcome = await outcome if inspect.isawaitable(outcome) else outcome
    if isinstance(outcome, str):
        return Observation(outcome)
    if outcome is not None and not isinstance(outcome, Observation | Done):
        raise TypeError(f"an environment returns an Observation, text or Done, not {type(outcome).__name__}")
    return outcome


def _plain(outcome: Observation | Done | None) -> dict[str, Any]:
    if outcome is None:
        return {"kind": "nothing"}
    if isinstance(outcome, Done):
        parts = dict(outcome.parts)
        return {"kind": "done", "reward": outcome.reward, "parts": parts, "answer": outcome.answer}
    return {"kind": "observation", "content": outcome.content, "role": outcome.role}


def from_record(text: str) -> Observation | Done | None:
    """An outcome as `_plain` wrote it."""
    found: Mapping[str, Any] = json.loads(text)
    if found["kind"] == "nothing":
        return None
    if found["kind"] == "done":
        return Done(found["reward"], found["parts"], found["answer"])
    return Observation(found["content"], found["role"])
