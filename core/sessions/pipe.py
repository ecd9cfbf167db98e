"""What crosses the pipe between the driver and a process that runs rollouts: a frozen dataclass a message, a line of JSON each.

Owns the messages and their form. The process runs code of users and models, so the driver makes of its lines only the classes
of `FromProcess`, with fields of their types, and nothing is unpickled. Knows nothing of sockets or processes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from millrace.core.sessions.interface import Message, Task, ToolCall, Turn
from millrace.core.sessions.tree import BranchReward

Body = TypeVar("Body")


@dataclass(frozen=True)
class BranchStart:
    """How a branch starts from another one."""

    parent: int
    parent_turns: int
    name: str | None = None
    prompt: list[Any] | None = None  # None: it continues the parent's tokens


@dataclass(frozen=True, kw_only=True)
class _OfBranch:
    branch: int = 0
    start: BranchStart | None = None  # in the first request of a branch


@dataclass(frozen=True)
class Generate(_OfBranch):
    """Asks for a turn. The reply is a Turn."""

    new: list[Any]  # messages and token ids since the last turn
    max_new_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False


@dataclass(frozen=True)
class CallTool(_OfBranch):
    """Asks whether to make a call. The reply is its recorded answer, or MakeCall."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Called(_OfBranch):
    """The answer of a call that was made. The reply is Noted."""

    event: int
    answer: str
    failed: bool


@dataclass(frozen=True)
class RecordedAnswer:
    """A call's answer from before a restart."""

    text: str
    failed: bool


@dataclass(frozen=True)
class MakeCall:
    """The call is not recorded: make it."""

    event: int


@dataclass(frozen=True)
class Noted:
    """The answer of a call is recorded."""


@dataclass(frozen=True)
class ReachedLimit:
    """A limit of the rollout is reached."""

    reason: str
    too_long: bool = False  # the messages have more characters than the rollout's tokens can hold


@dataclass(frozen=True)
class Refused:
    """The request cannot be answered: the rollout cannot continue."""

    reason: str


@dataclass(frozen=True)
class SlimeStart:
    """What a function written for slime gets."""

    arguments: Mapping[str, Any]
    prompt_ids: Sequence[int]


@dataclass(frozen=True)
class Start:
    """Starts a session."""

    task: Task
    messages: Sequence[Message]
    seed: int
    sampling: Mapping[str, Any]  # the run's parameters, with the row's own
    slime: SlimeStart | None = None


@dataclass(frozen=True)
class Cancel:
    """Ends a session."""


@dataclass(frozen=True)
class Ping:
    """Asks whether the process's loop runs."""


@dataclass(frozen=True)
class Pong:
    """The loop runs."""


@dataclass(frozen=True)
class Ready:
    """The process accepts sessions."""


@dataclass(frozen=True)
class CallStuck:
    """A call that timed out still runs in a thread, which only the end of the process ends."""


@dataclass(frozen=True)
class End:
    """How a session ended."""

    status: Literal["completed", "truncated", "failed"]
    reason: str | None = None
    rewards: Mapping[int, BranchReward] = field(default_factory=dict)  # by branch
    # positions of tokens outside the loss, by branch
    left_out: Mapping[int, Sequence[int]] = field(default_factory=dict)
    cut: Sequence[int] = ()  # truncated branches


Request = Generate | CallTool | Called
Reply = Turn | RecordedAnswer | MakeCall | Noted | ReachedLimit | Refused
ToProcess = Start | Cancel | Ping | Reply
FromProcess = Ready | Pong | CallStuck | End | Request
INNER = (BranchReward, BranchStart, SlimeStart, Task, ToolCall)  # classes inside messages


@dataclass(frozen=True)
class Envelope(Generic[Body]):
    """A message, and the session that it belongs to."""

    body: Body
    session: int = 0
    request: int = 0  # number of a request, for its reply

    def line(self) -> bytes:
        """The message as a line of JSON. Raises TypeError for a value that JSON does not have."""
        name, fields = type(self.body).__name__, vars(self.body)
        return json.dumps([self.session, self.request, name, fields], default=_fields).encode() + b"\n"


class Direction(Generic[Body]):
    """The messages that one side sends and the other reads."""

    def __init__(self, bodies: Sequence[type[Any]]) -> None:
        self._bodies = {body.__name__: TypeAdapter[Any](body) for body in bodies}

    def read(self, line: bytes) -> Envelope[Body]:
        """A message from its line. Errors: ValueError for any other line."""
        try:
            session, request, name, fields = _outer.validate_python(json.loads(line))
            if name not in self._bodies:
                raise ValueError(f"there is no message {name[:40]}")
            return Envelope(self._bodies[name].validate_python(fields), session, request)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))[:80]
            raise ValueError(f"{error.title}, {field}: {first['msg']}") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


TO_PROCESS: Direction[ToProcess] = Direction(get_args(ToProcess))
FROM_PROCESS: Direction[FromProcess] = Direction(get_args(FromProcess))
_outer = TypeAdapter(tuple[int, int, str, dict[str, Any]])


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, INNER):
        return vars(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
