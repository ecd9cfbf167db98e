"""What the driver may ask of parts that live in other processes: trainer ranks, engine servers, the router's server.

One Protocol a kind of part, with real methods. Proxies of Ray actors implement them (tasks/runtime/proxies.py), and so do other
stand-ins for such a part: an engine that is only known by its address, a server in a test's own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, NotRequired, Protocol, TypedDict

from millrace.core.contracts.step_request import StepRequest
from millrace.core.contracts.task_records import FileRecord, StepMetrics
from millrace.core.contracts.weight_bucket import WeightBucket
from millrace.core.families.served_files import ALONE, Served

# This header says how many of a request's last input ids are output of the same answer, generated before. It is no field of the
# request because sglang-router drops unknown fields but passes headers with this prefix. SGLang does not read it: its noise
# depends on the position in the whole sequence.
CONTINUED = "x-request-id-continued"


class HeldOutSample(NamedTuple):
    """A row of a held-out set whose loss is asked for."""

    tokens: list[int]  # prompt and response
    mask: list[int]  # for each response token, 1 if it has a loss


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

    async def group(self) -> BroadcastGroup | None:
        """The group that is open, if any."""
        ...

    async def open(self, name: str, members: list[str], loopback: bool) -> BroadcastGroup:
        """Open a group that engines can join, and close any earlier one."""
        ...

    async def enter(self, size: int) -> None:
        """Join the group while the engines' `size` - 1 ranks do."""
        ...

    async def send(self, timeout_s: float) -> None:
        """Broadcast the bucket that rank 0 holds. Raises TrainerError if that does not end in time."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class SaveState(TypedDict):
    """A checkpoint that is written while training continues."""

    url: str
    version: int
    state: Literal["writing", "written", "failed"]
    reason: str | None  # the reason of its failure


class BackgroundSaves(Protocol):
    """Checkpoints that the trainer's ranks write while they continue to train, one at a time.

    Raises ActorLostError if a rank is gone, else what the rank raises.
    """

    async def begin(self, url: str) -> None:
        """Copy a checkpoint to host memory and start writing it under a URL. An earlier uncommitted checkpoint is dropped."""
        ...

    async def state(self) -> SaveState | None:
        """State of the newest uncommitted checkpoint; it is written once all ranks have written their parts. Does not wait."""
        ...

    async def commit(self) -> float:
        """Wait until the checkpoint is written, and write its complete.json; returns the seconds that writing took.

        Raises StorageError if a rank or storage fails to write it; then it can be called again.
        """
        ...

    async def drop(self) -> None:
        """Drop the uncommitted checkpoint."""
        ...


class TrainerHandle(Protocol):
    """All ranks of the trainer: every call goes to each of them.

    Raises ActorLostError if a rank is gone, else what the rank raises.
    """

    @property
    def broadcast(self) -> BroadcastSource:
        """Rank 0 as the sender of broadcast buckets."""
        ...

    @property
    def saves(self) -> BackgroundSaves:
        """Checkpoints that the ranks write while they continue to train."""
        ...

    async def versions(self) -> set[int | None]:
        """Weight versions that the ranks hold; {None} if a rank is gone. Does not wait for calls under way."""
        ...

    async def prepare(self) -> None:
        """Load the libraries; takes no GPU memory."""
        ...

    async def setup(self) -> None:
        """Join the process group and build the model at version 0."""
        ...

    async def load(self, url: str) -> int:
        """Load a checkpoint; returns the version it holds."""
        ...

    async def train(self, step: StepRequest) -> StepMetrics:
        """Make a step; returns its figures."""
        ...

    async def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        """Make the passes of a chunk of the step to `version`; returns the number of chunks that the ranks then hold."""
        ...

    async def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        """Loss of each sample under weight version `version`, which the ranks hold: a sum over its tokens with a loss, nats."""
        ...

    async def save(self, url: str) -> None:
        """Save a checkpoint under a URL; complete.json last."""
        ...

    async def export(self, directory: str, version: int) -> None:
        """Write the weights as a Hugging Face folder that all ranks see."""
        ...

    async def upload(self, url: str, version: int, served: Served = ALONE) -> list[FileRecord]:
        """Write the weights as a Hugging Face folder in any storage; returns its files, relative to it. served: see Served."""
        ...

    async def bucket(self, version: int, number: int, size: int, share: bool) -> Sequence[WeightBucket]:
        """Each rank's copy of bucket `number` of the weights; 0 starts a new pass."""
        ...

    async def end_buckets(self) -> None:
        """Free the last bucket."""
        ...

    async def offload(self) -> int:
        """Free GPU memory for engines: all but the weights goes to the host. Returns the bytes that rank 0 freed."""
        ...
