"""What may be asked of parts that live in other processes: engine servers, the router's server, trainer rank 0 as a sender.

One Protocol a kind of part, with real methods; connectors/trainers/rank.py has what else may be asked of a rank. Proxies of Ray
actors implement those of servers (tasks/runtime/proxies.py), and so do other stand-ins for a server: an engine that is only
known by its address, a server in a test's own process.
"""

from collections.abc import Callable
from typing import Concatenate, NamedTuple, NotRequired, ParamSpec, Protocol, TypedDict, TypeVar

# This header says how many of a request's last input ids are output of the same answer, generated before. It is no field of the
# request because sglang-router drops unknown fields but passes headers with this prefix. SGLang does not read it: its noise
# depends on the position in the whole sequence.
CONTINUED = "x-request-id-continued"

T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class ServerState(TypedDict):
    """State of a server process, as its holder reports it."""

    alive: bool  # the process lives and has answered
    url: str | None  # None unless alive
    pid: int | None
    key: str | None  # the key that requests other than /health must send; None: no key
    starts: int  # number of starts
    log: str  # path of its log
    index: NotRequired[int]
    released: NotRequired[list[str]]  # tags of GPU memory that the engine has released
    address: NotRequired[str]  # address of its node


class ServerHandle(Protocol):
    """The process that holds one server process. Every call raises ActorLostError if the holder is gone."""

    async def state(self) -> ServerState:
        """Whether the process lives, and its URL."""
        ...

    async def kill(self) -> None:
        """End the process at once."""
        ...


class EngineHandle(ServerHandle, Protocol):
    """The holder of one engine's server."""

    async def start(self, model: str) -> ServerState:
        """Start the server on a model folder unless it lives. Raises EngineError with the end of its log if it fails."""
        ...

    async def note_released(self, tags: list[str]) -> None:
        """Remember which GPU memory the engine has released, for a later driver."""
        ...

    async def download(self, url: str) -> str:
        """Copy a folder from storage to the engine's node; returns its path there."""
        ...

    async def remove_download(self) -> None:
        """Remove the downloaded folder."""
        ...

    async def trace_folder(self) -> str:
        """An empty folder on the engine's node. Raises EngineError if there can be none."""
        ...

    async def store_trace(self, url: str) -> list[str]:
        """Move the folder's files to a folder in storage, each named by the engine; returns their names there."""
        ...


class EngineNodeHandle(ServerHandle, Protocol):
    """The holder of an engine's process on one of the nodes that the engine spans."""

    async def launch(self, model: str, meeting: str) -> None:
        """Start the process, which meets the engine's other ones at host:port, without a wait for them. An earlier one is killed."""
        ...

    async def ready(self) -> bool:
        """Whether what was launched answers. Raises EngineError if it ended or takes too long, PortTakenError for a port that was taken."""
        ...


class FirstNodeHandle(EngineHandle, EngineNodeHandle, Protocol):
    """The holder on the first node, whose process answers requests."""

    async def meeting(self) -> str:
        """host:port of this node, where the processes of all nodes can meet."""
        ...


class RouterHandle(ServerHandle, Protocol):
    """The holder of the router's server."""

    async def start(self) -> ServerState:
        """Start the router without engines, unless it lives."""
        ...


class BroadcastGroup(NamedTuple):
    """A group through which trainer rank 0 broadcasts weights to engines."""

    name: str
    members: list[str]  # URLs of its engines
    host: str
    port: int
    backend: str  # nccl or gloo


class BroadcastSource(Protocol):
    """Trainer rank 0 as the sender of broadcast buckets."""

    def broadcast_group(self) -> BroadcastGroup | None:
        """The group that is open, if any."""
        ...

    def open_broadcast(self, name: str, members: list[str], loopback: bool) -> BroadcastGroup:
        """Open a group that engines can join, and close any earlier one. loopback: all engines are on this host."""
        ...

    def enter_broadcast(self, size: int) -> None:
        """Join the group while the engines' `size` - 1 ranks do."""
        ...

    def broadcast_bucket(self, timeout_s: float) -> None:
        """Broadcast the bucket that rank 0 holds. Raises TrainerError if that does not end in time."""
        ...

    def close_broadcast(self) -> None:
        """Leave the group."""
        ...


class Asked(Protocol[T_co]):
    """A part in another process, asked by the methods of its Protocol: `await rank.call(BroadcastSource.close_broadcast)`.

    Raises ActorLostError if the part is gone, otherwise the method's error.
    """

    async def call(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The part's answer."""
        ...
