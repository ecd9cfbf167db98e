"""What the driver may ask of parts that live in other processes: trainer ranks, engine servers, the router's server.

One Protocol a kind of part, with real methods. Proxies of Ray actors implement them (tasks/runtime/proxies.py), and whatever
else stands for such a part: an engine that is only known by its address, a server in a test's own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, NotRequired, Protocol, TypedDict

from millrace.core.contracts.task_records import FileRecord, StepMetrics
from millrace.core.contracts.weight_bucket import WeightBucket
from millrace.core.logprob_gap import LogprobGuard
from millrace.core.model_folder.served_files import ALONE, Served

# The header that says how many of a request's last input ids are output of the same answer, made before. sglang-router drops
# fields that it does not know, and passes headers that begin so; SGLang, whose noise goes by the place in the whole, reads none.
CONTINUED = "x-request-id-continued"


class HeldOutSample(NamedTuple):
    """A row of a held-out set whose loss is asked for."""

    tokens: list[int]  # prompt and response
    mask: list[int]  # of the response; 1: has a loss


class ServerState(TypedDict):
    """What the holder of a server process reports of it."""

    alive: bool  # the process lives and has answered
    url: str | None  # None unless alive
    pid: int | None
    key: str | None  # what it asks of every request but /health; None: nothing
    starts: int  # how often it was started
    log: str  # where its log is
    index: NotRequired[int]
    released: NotRequired[list[str]]  # tags of GPU memory that the engine has given back
    address: NotRequired[str]  # of its node


class ServerHandle(Protocol):
    """The holder of one server process. Every call raises ActorLostError if the holder is gone."""

    async def state(self) -> ServerState:
        """Whether the process lives, and where it answers."""
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
        """Remember which GPU memory the engine has given back, for a driver that comes later."""
        ...

    async def download(self, url: str) -> str:
        """Copy a folder from storage to the engine's node; returns its path there."""
        ...

    async def remove_download(self) -> None:
        """Remove what was downloaded."""
        ...


class RouterHandle(ServerHandle, Protocol):
    """The holder of the router's server."""

    async def start(self) -> ServerState:
        """Start the router, which knows no engine yet, unless it lives."""
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
        """Open a group that engines can join, in place of any before."""
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
    """A checkpoint that is written while training goes on."""

    url: str
    version: int
    state: Literal["writing", "written", "failed"]
    reason: str | None  # why it failed


class BackgroundSaves(Protocol):
    """Checkpoints that the trainer's ranks write while they go on, one at a time.

    Raises ActorLostError if a rank is gone, else what the rank raises.
    """

    async def begin(self, url: str) -> None:
        """Copy a checkpoint to host memory and have it written under a URL. One that was begun before and not committed is dropped."""
        ...

    async def state(self) -> SaveState | None:
        """The one that was begun last and not committed: written when every rank has written its part. Answers while they work."""
        ...

    async def commit(self) -> float:
        """Wait until it is written, and write its complete.json; seconds that writing took.

        Raises StorageError if a rank could not write, or storage does not take it: then it can be called again.
        """
        ...

    async def drop(self) -> None:
        """Forget it."""
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
        """Checkpoints that the ranks write while they go on."""
        ...

    async def versions(self) -> set[int | None]:
        """Weight versions that the ranks hold; {None} if a rank is gone. Answers while they work."""
        ...

    async def prepare(self) -> None:
        """Load the libraries; takes no GPU memory."""
        ...

    async def setup(self) -> None:
        """Meet, build the model and hold version 0."""
        ...

    async def load(self, url: str) -> int:
        """Load a checkpoint; returns the version it holds."""
        ...

    async def train(
        self,
        version: int,
        batch_url: str,
        guard: LogprobGuard | None,
        recorded: StepMetrics | None = None,
        batch_sha256: str | None = None,
        chunks: Sequence[int] | None = None,
        stores: bool = False,
    ) -> StepMetrics:
        """Make weight version `version` of the one before, or again as it is `recorded`; returns the step's figures.

        guard: for an iteration's first step. batch_sha256: the hash of the batch in the record or manifest that committed it.
        chunks: rows of each chunk, where passes are made chunk by chunk. stores: whether the trainer's log-probabilities are
        written beside the batch, for an iteration's first step.
        """
        ...

    async def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        """Make the passes of a chunk of the step to `version`; returns how many chunks the ranks hold then."""
        ...

    async def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        """Loss of each sample under weight version `version`, which the ranks hold: a sum over its tokens that have one, nats."""
        ...

    async def save(self, url: str) -> None:
        """Save a checkpoint under a URL; complete.json last."""
        ...

    async def export(self, directory: str, version: int) -> None:
        """Write the weights as a Hugging Face folder that all ranks see."""
        ...

    async def upload(self, url: str, version: int, served: Served = ALONE) -> list[FileRecord]:
        """Write the weights as a Hugging Face folder in any storage; returns its files, relative to it. served: how the run asked
        its engines."""
        ...

    async def bucket(self, version: int, number: int, size: int, share: bool) -> Sequence[WeightBucket]:
        """Each rank's copy of bucket `number` of the weights; 0 begins a new pass."""
        ...

    async def end_buckets(self) -> None:
        """Let go of the last bucket."""
        ...

    async def offload(self) -> int:
        """Leave GPU memory to engines: all but the weights goes to the host. Returns the bytes that rank 0 freed."""
        ...
