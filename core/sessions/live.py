"""A session in the process that runs the rollout function: it asks the run's driver, and keeps state for the function.

Owns the order of what is observed and asked, per branch. Knows nothing of pipes, engines or tokens: `ask` sends one request
and returns its answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from millrace.core.contracts.rows.messages import message_of
from millrace.core.sessions import pipe
from millrace.core.sessions.history import Again, Begin, History, HistoryMessage, TurnKey, compared
from millrace.core.sessions.interface import (
    Content,
    LimitReachedError,
    Message,
    SessionError,
    Task,
    ToolError,
    TooLongError,
    Turn,
)

Ask = Callable[[pipe.Request], Awaitable[pipe.Reply]]
"""Sends a request to the driver and returns its answer."""
Make = Callable[[str, Mapping[str, Any]], Awaitable[str]]
"""Makes a call of a tool in this process."""
Answer = asyncio.Future[Turn]


@dataclass
class Shared:
    """What the branches of one rollout share."""

    task: Task
    messages: Sequence[Message]  # messages of the prompt
    seed: int
    ask: Ask
    make_call: Make
    serve: Callable[[LiveSession], tuple[str, str]]  # opens an endpoint over HTTP; returns its URL and key
    timeout_s: float  # limit of a call
    sampling: Mapping[str, Any]  # the run's sampling parameters, with the row's own
    over: Callable[[], None]  # called after a tool timed out; ends the process if the tool is still running
    rewards: dict[int, dict[str, Any]] = field(default_factory=dict)  # rewards by branch
    left_out: dict[int, list[int]] = field(
        default_factory=dict
    )  # positions of tokens outside the loss, by branch
    cut: set[int] = field(default_factory=set)  # truncated branches
    rng: random.Random = field(init=False)
    sessions: list[LiveSession] = field(default_factory=list)  # sessions by number
    history: History = field(default_factory=History)
    answers: dict[TurnKey, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def all_rewards(self) -> dict[int, dict[str, Any]]:
        """Rewards by branch. A client's branch has the reward of the branch whose endpoint it uses."""
        endpoints = {each.number: each.endpoint for each in self.sessions if each.endpoint != each.number}
        return {
            **{
                number: self.rewards[endpoint]
                for number, endpoint in endpoints.items()
                if endpoint in self.rewards
            },
            **self.rewards,
        }


@dataclass(eq=False)
class ServedRollout:
    """One rollout that is served to clients over HTTP."""

    sampling: Mapping[str, Any]
    keys: list[str] = field(default_factory=list)
    limit: str | None = None  # set if the newest answer was that this limit is reached
    # answers SGLang's /generate
    native: Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]] | None = None
    created: dict[TurnKey, int] = field(default_factory=dict)
    working: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(frozen=True)
class Recorded:
    """A recorded answer."""

    text: str  # the answer, or the error
    failed: bool
    before: bool  # whether it was recorded before a restart


@dataclass(frozen=True)
class _Asked:
    """A turn that is asked for."""

    place: TurnKey
    request: pipe.Generate


class LiveSession:
    """One branch of a rollout. The first one is the rollout's session."""

    def __init__(
        self,
        shared: Shared,
        begin: pipe.BranchStart | None = None,
        turns: Sequence[Turn] = (),
        endpoint: int | None = None,
    ) -> None:
        """The second argument tells the driver how a branch starts. endpoint: the branch whose client made it; None: the function."""
        self.number = len(shared.sessions)
        self.endpoint = self.number if endpoint is None else endpoint
        self.name: str | None = begin.name if begin else None
        shared.sessions.append(self)
        self._shared = shared
        self._new: list[Any] = []  # observed since the last turn
        self._begin = begin  # None once the driver knows the branch
        self._made = 0  # turns generated in this process
        self._generating = False  # whether a turn for the rollout's function is running
        self._turns = list(turns)
        if begin is None:
            shared.history.begin(self.number, self.endpoint, compared(shared.messages))

    @property
    def task(self) -> Task:
        """The row of the data."""
        return self._shared.task

    @property
    def messages(self) -> Sequence[Message]:
        """The prompt as messages."""
        return [dict(message) for message in self._shared.messages]

    @property
    def rng(self) -> random.Random:
        """Random numbers that are the same whenever this rollout is made."""
        return self._shared.rng

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far, including turns before it branched."""
        return tuple(self._turns)

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters of this rollout's turns."""
        return self._shared.sampling

    @property
    def base_url(self) -> str:
        """The URL of this branch for your client."""
        return self._served[0]

    @property
    def api_key(self) -> str:
        """The client's key."""
        return self._served[1]

    @cached_property
    def _served(self) -> tuple[str, str]:
        return self._shared.serve(self)

    async def generate(
        self,
        new: Content | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> Turn:
        """Generate the policy's next turn, after the observations and `new`."""
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: a turn has a token at least")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if self._generating:
            raise SessionError(
                "a branch makes one turn after the other; for turns side by side use session.branch()"
            )
        if new is not None:
            self.observe(new, "user")
        self._generating = True
        try:
            return await self._made_turn(self._next(compared(self._new), max_new_tokens, stop, logprobs))
        finally:
            self._generating = False

    def turn_of(
        self,
        messages: Sequence[Message],
        max_new_tokens: int | None,
        stop: Sequence[str],
        spawn: Callable[[Coroutine[Any, Any, Turn]], asyncio.Task[Turn]],
    ) -> tuple[TurnKey, Answer]:
        """The turn that answers a whole history: an earlier, a running or a new one. spawn: runs the coroutine of a new one.

        The rollout's branches are updated before it returns, so that no other request can come between.
        """
        said, history = compared(messages), self._shared.history
        found = history.decide(self.number, said, _options(max_new_tokens, stop))
        if isinstance(found, Again):
            return found.place, self._shared.answers[found.place]
        if isinstance(found, Begin):
            session, known = self._begun(found.after, messages), found.known
            new = [] if found.after is None else messages[known:]
        else:
            session, known = self._shared.sessions[found.branch], found.known
            new = messages[known:]
        session._new += pieces(new, "user")
        asked = session._next(said[known:], max_new_tokens, stop)
        answer = self._shared.answers[asked.place]
        work = spawn(session._made_turn(asked))
        # the work may be cancelled before it has started
        work.add_done_callback(lambda _: answer.done() or answer.cancel())
        return asked.place, answer

    def _begun(self, after: TurnKey | None, messages: Sequence[Message]) -> LiveSession:
        """A new branch of this endpoint's client, after a turn or with its own messages."""
        if after is None:
            begin = replace(self._standing(), parent_turns=0, prompt=pieces(messages, "user"))
        else:
            begin = pipe.BranchStart(after.branch, after.index + 1)
        turns = [place.turn for place in after.path if place.turn] if after else []
        made = LiveSession(self._shared, replace(begin, name=self.name), turns, self.endpoint)
        self._shared.history.begin(made.number, made.endpoint, after=after)
        return made

    def _next(
        self,
        said: Sequence[HistoryMessage],
        max_new_tokens: int | None,
        stop: Sequence[str],
        logprobs: bool = False,
    ) -> _Asked:
        new, self._new = self._new, []
        place = self._shared.history.ask(self.number, said, _options(max_new_tokens, stop))
        self._shared.answers[place] = asyncio.get_running_loop().create_future()
        return _Asked(place, pipe.Generate(new, max_new_tokens, list(stop), logprobs))

    async def _made_turn(self, asked: _Asked) -> Turn:
        answer = self._shared.answers[asked.place]
        try:
            turn = await self._ask(asked.request)
            assert isinstance(turn, Turn), "Generate is answered by a turn"
        except Exception as error:
            answer.set_exception(error)
            # the error is raised here; a repeated request gets it too
            answer.exception()
            raise
        except asyncio.CancelledError:
            answer.cancel()
            raise
        self._turns.append(turn)
        self._made += 1
        self._shared.history.answered(asked.place, turn)
        if self._new:
            self._shared.history.touch(self.number)
        answer.set_result(turn)
        return turn

    def observe(self, content: Content, role: str = "tool") -> None:
        """Add to the next prompt."""
        self._new += pieces(content, role)
        self._shared.history.touch(self.number)

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool and return its answer, or its error, as text."""

        async def make() -> str:
            return await self._shared.make_call(tool, arguments)

        return (await self.recorded(tool, arguments, make)).text

    async def recorded(
        self, name: str, arguments: Mapping[str, Any], make: Callable[[], Awaitable[str]]
    ) -> Recorded:
        """The result of `make`, or its recorded result from before a restart. A ToolError and a timeout are recorded too."""
        known = await self._ask(pipe.CallTool(name, dict(arguments)))
        if isinstance(known, pipe.RecordedAnswer):
            return Recorded(known.text, known.failed, before=True)
        assert isinstance(known, pipe.MakeCall), "a call is recorded or made"
        over = False
        try:
            async with asyncio.timeout(self._shared.timeout_s):
                answer, failed = await make(), False
        except ToolError as error:
            answer, failed = str(error), True
        except TimeoutError:
            answer, failed, over = f"{name} gave no answer within {self._shared.timeout_s:g} s", True, True
        # several calls may run at once
        await self._ask(pipe.Called(known.event, answer, failed))
        if over:
            self._shared.over()
        return Recorded(answer, failed, before=False)

    def branch(self, name: str | None = None, prompt: Content | None = None) -> LiveSession:
        """Another sample of the same rollout."""
        begin = replace(self._standing(), name=self.name if name is None else name)
        history = self._shared.history
        if prompt is None:
            made = LiveSession(self._shared, begin, self._turns)
            history.fork(made.number, self.number)
            made._new = list(self._new)
            if made._new:
                history.touch(made.number)
        else:
            own = pieces(prompt, "user")
            made = LiveSession(self._shared, replace(begin, parent_turns=0, prompt=own))
            history.begin(made.number, made.number, compared(own))
        return made

    def _standing(self) -> pipe.BranchStart:
        """How a new branch starts from this one. If the driver does not know this branch yet, both start alike."""
        if self._begin is not None:
            return self._begin
        return pipe.BranchStart(self.number, self._made, self.name)

    async def _ask(self, request: pipe.Request) -> pipe.Reply:
        start, self._begin = self._begin, None
        reply = await self._shared.ask(replace(request, branch=self.number, start=start))
        if isinstance(reply, pipe.Refused):
            raise SessionError(reply.reason)
        if isinstance(reply, pipe.ReachedLimit):
            raise (TooLongError if reply.too_long else LimitReachedError)(reply.reason)
        return reply

    def reward(self, value: float, **parts: float | str) -> None:
        """Set the reward of this branch."""
        self._shared.rewards[self.number] = {"reward": value, **parts}

    def leave_out(self, places: Sequence[int]) -> None:
        """Keep tokens of this branch out of the loss, by their positions among all its tokens."""
        self._shared.left_out[self.number] = list(places)

    def cut(self) -> None:
        """Mark this branch as truncated."""
        self._shared.cut.add(self.number)


def pieces(content: Content, role: str) -> list[Any]:
    """Content in the form that is sent: messages, and lists of token ids. Raises TypeError for other values.

    Parts without a role are the content of one message. Raises SessionError for a part that is no text.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    items: list[Any] = [None]
    if isinstance(content, Mapping):
        items = [content]
    elif isinstance(content, Sequence):
        items = list(content)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [{"ids": items}] if items else []
    if all(isinstance(item, Mapping) for item in items):
        if all(item.keys().isdisjoint(("role", "ids")) for item in items):
            return [_message({"role": role, "content": items})]
        return [_message(item) for item in items]
    raise TypeError(
        f"a prompt grows by text, a message, messages or token ids, not by {type(content).__name__}"
    )


def _message(given: Any) -> dict[str, Any]:
    if "ids" in given:
        return dict(given)
    try:
        return message_of(given)
    except ValueError as error:
        raise SessionError(f"a message of the {given.get('role')} cannot be shown: {error}") from error


def _options(max_new_tokens: int | None, stop: Sequence[str]) -> str:
    return json.dumps([max_new_tokens, list(stop)])
