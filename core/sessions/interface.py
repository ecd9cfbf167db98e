"""The interface for your rollouts: `Session`, and the forms above it, `Environment` and tools.

Owns the signatures, frozen by a test. Knows nothing of engines, processes or files. One session is one rollout: a sample of a
group, or several if it branches. Training uses exactly the generated tokens: a prompt grows by new tokens only, and generated
text is never tokenised again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from millrace.core.hooks.protocols import Score

Message = Mapping[str, Any]  # of a chat: role, content, and other keys that the template knows
Content = str | Message | Sequence[Message] | Sequence[int]
"""An addition to a prompt: text or content parts (one message of a role), messages, or token ids, which are kept unchanged."""


@dataclass(frozen=True)
class Task:
    """The row of the data that a rollout works on."""

    prompt: str | Sequence[Message]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    index: int = 0  # number of the rollout within its group
    evaluation: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy asks for."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""  # as the policy wrote it, or as its chat template needs it


@dataclass(frozen=True)
class Turn:
    """One generation of the engine, and its parsed content."""

    text: str  # the whole text, for reading
    content: str  # without thinking and tool calls
    output_ids: Sequence[int]
    status: Literal["completed", "truncated"]
    thinking: str = ""
    tool_calls: Sequence[ToolCall] = ()
    problem: str | None = None  # why its tool calls cannot be read
    prompt_tokens: int = 0  # tokens that it was generated after
    logprobs: Sequence[float] = ()  # log-probabilities of output_ids, if they were asked for

    @property
    def truncated(self) -> bool:
        """Whether it ended because there was no room for more tokens."""
        return self.status == "truncated"


class LimitReachedError(Exception):
    """A limit of the rollout is reached: turns, tokens or time. Uncaught, it ends the rollout as truncated."""


class TooLongError(LimitReachedError):
    """A message has more characters than the rollout's tokens can hold: it is not tokenised."""


class SessionError(Exception):
    """The rollout cannot continue: the chat template refuses a message, or no engine could generate. It fails with the reason."""


class ToolError(Exception):
    """A tool raised, refuses the arguments, or does not exist. The policy gets it as an answer."""


@runtime_checkable
class Session(Protocol):
    """One rollout, from its prompt to its reward."""

    @property
    def task(self) -> Task:
        """The row of the data."""
        ...

    @property
    def messages(self) -> Sequence[Message]:
        """The prompt as messages, including the source's system message: the start of a client's history."""
        ...

    @property
    def base_url(self) -> str:
        """The URL of this branch for your client of OpenAI's chat completions: OpenAI(base_url=..., api_key=...).

        Clients send whole histories. A history that continues the messages so far is the next turn; any other starts a new
        branch.
        """
        ...

    @property
    def api_key(self) -> str:
        """The key of `base_url`. Each branch has its own, valid as long as the rollout lasts."""
        ...

    @property
    def rng(self) -> random.Random:
        """Random numbers that are the same each time this rollout is made."""
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
        """Generate the policy's next turn, after the observations and `new`, by default a message of the user.

        Raises LimitReachedError if the rollout has no room for another turn.
        """
        ...

    def observe(self, content: Content, role: str = "tool") -> None:
        """Add to the next prompt. Its tokens are not trained."""
        ...

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool and return its answer, or its error, as text. The answer is recorded: no restart repeats the call."""
        ...

    def branch(self, name: str | None = None, prompt: Content | None = None) -> Session:
        """Another sample of the same rollout, which starts from this one's state, or with its own `prompt`.

        name: a role, such as critic; rewards are compared among branches of one name. None: this branch's name.
        """
        ...

    def reward(self, value: float, **parts: float | str) -> None:
        """Set the reward of this branch, and of its branches without one. A text named `answer` is the answer."""
        ...


@runtime_checkable
class RolloutFunction(Protocol):
    """Makes one rollout. Its return value, if any, is the reward."""

    def __call__(self, session: Session, **options: Any) -> Awaitable[Score | None]: ...


@dataclass(frozen=True)
class Observation:
    """An environment's next addition to the prompt: text, a message, messages, or token ids."""

    content: Content
    role: str = "user"  # role of a text


@dataclass(frozen=True)
class Done:
    """The end of an episode, with its reward; None leaves scoring to reward.function."""

    reward: float | None = None
    parts: Mapping[str, float | str] = field(default_factory=dict)
    answer: str | None = None  # as in RewardResult


@runtime_checkable
class Environment(Protocol):
    """An episode. Each rollout makes one, with the options as keyword arguments.

    `recovery` says what a restart of the run does within an episode. "stateless": `step` depends only on its turn and on
    `reset`; `reset` is called again, and the recorded steps are not. "snapshot": it has `snapshot`, which returns
    text, and `restore`, which takes it; nothing that was recorded is called again. "restart": `reset` and every `step` are
    called again, and generation continues from the first step that differs from the record.
    """

    recovery: Literal["stateless", "snapshot", "restart"]

    async def reset(self, task: Task) -> Observation | None:
        """Start the episode. The observation follows the prompt; None adds nothing."""
        ...

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer a turn of the policy."""
        ...

    async def close(self) -> None:
        """Release resources."""
        ...
