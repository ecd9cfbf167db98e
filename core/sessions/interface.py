"""What a rollout of your own is written against: `Session`, and the forms above it, `Environment` and tools.

Owns the signatures, frozen by a test. Knows nothing of engines, processes or files. One session is one rollout: a sample of a
group, or several where it branches. What is trained is what the engine generated, token for token: a prompt grows by what is
new, and nothing that was generated is ever made from text again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from millrace.core.hooks import Score

Message = Mapping[str, Any]  # of a chat: role, content, and what the template knows besides
Content = str | Message | Sequence[Message] | Sequence[int]
"""What a prompt grows by: text or the parts of a content (one message of a role), messages, or token ids as they are."""


@dataclass(frozen=True)
class Task:
    """The row of the data that a rollout works on."""

    prompt: str | Sequence[Message]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    index: int = 0  # of the rollout within its group
    evaluation: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the engine generated at once, and what can be read in it."""

    text: str  # all of it, for reading
    content: str  # without thinking and tool calls
    output_ids: Sequence[int]
    status: Literal["completed", "truncated"]
    thinking: str = ""
    tool_calls: Sequence[ToolCall] = ()
    problem: str | None = None  # why its tool calls cannot be read
    prompt_tokens: int = 0  # what it was generated after
    logprobs: Sequence[float] = ()  # of output_ids, if they were asked for

    @property
    def truncated(self) -> bool:
        """Whether it ended because there was no room for more tokens."""
        return self.status == "truncated"


class LimitReachedError(Exception):
    """A limit of the rollout is reached: turns, tokens or time. Uncaught, it ends the rollout as truncated."""


class TooLongError(LimitReachedError):
    """A message has more characters than the rollout's tokens can hold: it is not tokenised."""


class SessionError(Exception):
    """The rollout cannot go on: the chat template refuses a message, or no engine could generate. It fails with the reason."""


class ToolError(Exception):
    """A tool raised, does not take the arguments, or is not there. For the policy it is an answer."""


@runtime_checkable
class Session(Protocol):
    """One rollout, from its prompt to its reward."""

    @property
    def task(self) -> Task:
        """The row of the data."""
        ...

    @property
    def messages(self) -> Sequence[Message]:
        """The prompt as messages, the source's system message among them: what a client's history begins with."""
        ...

    @property
    def base_url(self) -> str:
        """Where a client of yours reaches this branch by OpenAI's chat completions: OpenAI(base_url=..., api_key=...).

        It sends whole histories. One that goes on from what was said so far is the next turn; any other begins a new branch.
        """
        ...

    @property
    def api_key(self) -> str:
        """The key of `base_url`. Each branch has its own, valid as long as the rollout lasts."""
        ...

    @property
    def rng(self) -> random.Random:
        """Random numbers that are the same whenever this rollout is made."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far."""
        ...

    async def generate(
        self,
        new: Content | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> Turn:
        """Let the policy go on, after what was observed and `new`, by default a message of the user.

        Raises LimitReachedError where the rollout has no room for another turn.
        """
        ...

    def observe(self, content: Content, role: str = "tool") -> None:
        """Add to the next prompt. Its tokens are not trained."""
        ...

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool and return its answer, or what went wrong, as text. The answer is recorded: no restart calls again."""
        ...

    def branch(self, name: str | None = None, prompt: Content | None = None) -> Session:
        """Another sample of the same rollout, which begins where this one stands, or at a `prompt` of its own.

        name: of a role, such as critic: rewards are compared among branches of a name. None: this one's.
        """
        ...

    def reward(self, value: float, **parts: float | str) -> None:
        """Give this branch its reward, and those without one that branched from it. A text named `answer` is the answer."""
        ...


@runtime_checkable
class RolloutFunction(Protocol):
    """Makes one rollout. What it returns, if anything, is the reward."""

    def __call__(self, session: Session, **options: Any) -> Awaitable[Score | None]: ...


@dataclass(frozen=True)
class Observation:
    """What an environment shows the policy next: text, a message, messages, or token ids."""

    content: Content
    role: str = "user"  # of text


@dataclass(frozen=True)
class Done:
    """The end of an episode, with its reward; None leaves scoring to reward.function."""

    reward: float | None = None
    parts: Mapping[str, float | str] = field(default_factory=dict)
    answer: str | None = None  # as in RewardResult


@runtime_checkable
class Environment(Protocol):
    """An episode. Each rollout makes one, with the options as keyword arguments.

    `recovery` says what a restart of the run does in the midst of an episode. "stateless": `step` follows from its turn and from
    what `reset` made; `reset` is called again, and the recorded steps are not. "snapshot": it has `snapshot`, which returns
    text, and `restore`, which takes it; nothing that was recorded is called again. "restart": `reset` and every `step` are
    called again, and generation goes on where what they show differs from what was recorded.
    """

    recovery: Literal["stateless", "snapshot", "restart"]

    async def reset(self, task: Task) -> Observation | None:
        """Begin. What it shows follows the prompt; None: the prompt says all."""
        ...

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer a turn of the policy."""
        ...

    async def close(self) -> None:
        """Let go of what it holds."""
        ...
