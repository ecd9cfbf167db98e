"""A session in the process that runs the rollout function: it asks the run's driver, and keeps what the function may look at.

Owns the order of what is observed and asked, per branch. Knows nothing of pipes, engines or tokens: `ask` sends one request
and returns its answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.sessions.interface import (
    Content,
    LimitReachedError,
    SessionError,
    Task,
    ToolCall,
    ToolError,
    Turn,
)

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a request to the driver and returns its answer."""
Make = Callable[[str, Mapping[str, Any]], Awaitable[str]]
"""Makes a call of a tool in this process."""


@dataclass
class Shared:
    """What the branches of one rollout share."""

    task: Task
    seed: int
    ask: Ask
    make_call: Make
    timeout_s: float  # of a call
    over: Callable[
        [], None
    ]  # says that nobody waits for a call any more; where it goes on all the same, its process ends
    rewards: dict[int, dict[str, Any]] = field(default_factory=dict)  # by branch
    rng: random.Random = field(init=False)
    branches: int = 1

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)


class LiveSession:
    """One branch of a rollout. The first one is the rollout's session."""

    def __init__(self, shared: Shared, number: int = 0, turns: Sequence[Turn] = ()) -> None:
        self._shared = shared
        self._number = number
        self._new: list[Any] = []  # observed since the last turn
        self._begin: dict[str, Any] | None = None  # how it began, until the driver knows
        self._made = 0  # turns that were generated here
        self._turns = list(turns)

    @property
    def task(self) -> Task:
        """The row of the data."""
        return self._shared.task

    @property
    def rng(self) -> random.Random:
        """Random numbers that are the same whenever this rollout is made."""
        return self._shared.rng

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far, those before it branched among them."""
        return tuple(self._turns)

    async def generate(
        self, new: Content | None = None, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """Let the policy go on, after what was observed and `new`."""
        if new is not None:
            self.observe(new, "user")
        new_pieces, self._new = self._new, []
        turn = _turn(
            await self._ask(
                {"do": "generate", "new": new_pieces, "max_new_tokens": max_new_tokens, "stop": list(stop)}
            )
        )
        self._turns.append(turn)
        self._made += 1
        return turn

    def observe(self, content: Content, role: str = "tool") -> None:
        """Add to the next prompt."""
        self._new += pieces(content, role)

    async def call(self, tool: str, **arguments: Any) -> str:
        """Call a tool and return its answer, or what went wrong, as text."""

        async def make() -> str:
            return await self._shared.make_call(tool, arguments)

        return (await self.recorded(tool, arguments, make))[0]

    async def recorded(
        self, name: str, arguments: Mapping[str, Any], make: Callable[[], Awaitable[str]]
    ) -> tuple[str, bool]:
        """The text that `make` gives, or that it gave before a restart; and whether it did.

        A ToolError of it is recorded as text too.
        """
        place = {"tool": name, "arguments": dict(arguments)}
        known = await self._ask({"do": "call", **place})
        if "answer" in known:
            return str(known["answer"]), True
        over = False
        try:
            async with asyncio.timeout(self._shared.timeout_s):
                answer, failed = await make(), False
        except ToolError as error:
            answer, failed = str(error), True
        except TimeoutError:
            answer, failed, over = f"{name} gave no answer within {self._shared.timeout_s:g} s", True, True
        await self._ask({"do": "called", **place, "answer": answer, "failed": failed})
        if over:
            self._shared.over()
        return answer, False

    def branch(self, name: str | None = None, prompt: Content | None = None) -> LiveSession:
        """Another sample of the same rollout."""
        number = self._shared.branches
        self._shared.branches += 1
        made = LiveSession(self._shared, number, self._turns if prompt is None else ())
        made._begin = {
            "parent": self._number,
            "parent_turns": self._made if prompt is None else 0,
            "name": name,
            "prompt": None if prompt is None else pieces(prompt, "user"),
        }
        made._new = list(self._new) if prompt is None else []
        return made

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        begin, self._begin = self._begin, None
        answer = await self._shared.ask({**request, "branch": self._number, "begin": begin})
        if "refused" in answer:
            raise SessionError(answer["refused"])
        if "limit" in answer:
            raise LimitReachedError(answer["limit"])
        return answer

    def reward(self, value: float, **parts: float) -> None:
        """Give this branch its reward."""
        self._shared.rewards[self._number] = {"reward": value, **parts}


def pieces(content: Content, role: str) -> list[Any]:
    """Content as it is sent: messages, and lists of token ids. Raises TypeError for what is neither, nor text."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if isinstance(content, Mapping):
        return [dict(content)]
    if isinstance(content, Sequence):
        items = list(content)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return [{"ids": items}] if items else []
        messages = [dict(item) for item in items if isinstance(item, Mapping)]
        if len(messages) == len(items):
            return messages
    raise TypeError(
        f"a prompt grows by text, a message, messages or token ids, not by {type(content).__name__}"
    )


def _turn(answer: Mapping[str, Any]) -> Turn:
    calls = [ToolCall(item["name"], item["arguments"]) for item in answer["tool_calls"]]
    return Turn(**{**answer, "tool_calls": calls})
