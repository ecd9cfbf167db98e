"""One conversation with one model: token for token as a run's rollouts are, with tools that answer the model's calls.

Owns that generated tokens are kept unchanged and only new messages are rendered. A turn that fails or is cut off leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.user_code.mcp_tools import WorkerTools
from millrace.core.errors import ConfigError
from millrace.core.plain_text import json_text
from millrace.core.sessions.interface import Message, ToolCall, ToolError
from millrace.flows.chat.speaker import OnText, Said


class Answering(Protocol):
    """A model that answers (`speaker.Speaker`)."""

    async def answer(
        self, prompt: Sequence[int], params: SamplingParams, seed: int | None, on_text: OnText
    ) -> Said:
        """Generate one answer."""

    def close(self) -> None:
        """End it."""


class Shown(Protocol):
    """Where a conversation is shown. Texts are as the model or the tool wrote them."""

    def text(self, piece: str) -> None:
        """The next piece of an answer."""

    def event(self, line: str) -> None:
        """A line on what happens: a call, its answer, a limit that was reached."""


@dataclass(frozen=True)
class ChatTools:
    """The tools that a model may call. A call that takes longer than timeout_s fails."""

    tools: WorkerTools
    timeout_s: float
    max_turns: int  # of one answer


@dataclass
class Talk:
    """A conversation. chat: messages are written by the chat template; otherwise each is appended as it is typed."""

    speaker: Answering
    dialogues: Dialogues
    params: SamplingParams
    chat: bool
    system: str | None = None
    called: ChatTools | None = None
    seed: int | None = None
    ids: list[int] = field(default_factory=list)
    turns: int = 0

    def restart(self) -> None:
        """Forget what was said."""
        self.ids, self.turns = [], 0

    async def say(self, text: str, shown: Shown) -> None:
        """Ask, and show the answer as it comes. Raises ConfigError for a message that the template refuses or that does not fit."""
        ids, turns = list(self.ids), self.turns
        new: list[Message] = [{"role": "user", "content": text}]
        calls: Sequence[ToolCall] = ()
        while True:
            ids += self._rendered(new, ids, calls)
            seed = None if self.seed is None else self.seed + turns
            said = await self.speaker.answer(ids, self.params, seed, shown.text)
            turn = self.dialogues.turn(said.output_ids, said.text, said.truncated, ids)
            ids += said.output_ids
            turns += 1
            if said.truncated:
                shown.event(f"[cut off after {len(said.output_ids)} tokens; --max-new-tokens allows more]")
                break
            if not self.called or not (turn.tool_calls or turn.problem):
                break
            if turns - self.turns >= self.called.max_turns:
                shown.event(f"[no more calls: rollout.session.max_turns = {self.called.max_turns}]")
                break
            calls = turn.tool_calls
            new = [{"role": "user", "content": f"The call could not be read: {turn.problem}"}]
            if not turn.problem:
                new = [await self._answered(call, shown) for call in calls]
        self.ids, self.turns = ids, turns

    def _rendered(self, new: list[Message], ids: list[int], calls: Sequence[ToolCall]) -> list[int]:
        try:
            if ids:
                return self.dialogues.following(new, ids, self.chat, calls=calls)
            opening = [{"role": "system", "content": self.system}, *new] if self.system else new
            return self.dialogues.opening(opening, self.chat)
        except ValueError as error:
            raise ConfigError(
                str(error), where="chat", remedy="start another conversation by /new"
            ) from error

    async def _answered(self, call: ToolCall, shown: Shown) -> Message:
        assert self.called is not None, "only models with tools call"
        shown.event(f"[calls {call.name} {json_text(dict(call.arguments))}]")
        try:
            async with asyncio.timeout(self.called.timeout_s):
                answer = await self.called.tools.call(call.name, call.arguments)
        except ToolError as error:
            answer = str(error)
        except TimeoutError:
            answer = f"{call.name} failed: no answer after {self.called.timeout_s:g} s"
        shown.event(f"[answer: {answer}]")
        return {"role": "tool", "content": answer}
