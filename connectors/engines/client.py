"""The Protocol of an engine's client: what fleet, dispatchers, weight updates and checks ask of one engine.

Owns the types of requests and answers. Knows no kind of engine and no wire format. A client names its engine in every error. An
engine that lacks something (millrace.core.config.engine_kinds) refuses it with EngineError.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from millrace.core.admission import EngineLoad
from millrace.core.contracts.images import SentImages
from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket
from millrace.core.errors import EngineLostError
from millrace.core.families.routed_experts import RoutedRows, RoutingFormat

WEIGHTS, CACHE = "weights", "kv_cache"  # tags of the GPU memory that an engine can release
ProgressCheck = Callable[[float, float], Awaitable[None]]
"""Gets the time when a request was sent and a timeout. Raises EngineLostError if no token was generated for that long."""
OnPart = Callable[["Generation"], bool]
"""Gets a request's answer so far, with each token's version. Returns whether to continue."""


@dataclass(frozen=True, eq=False)
class OutputTokens:
    """N generated tokens and their log-probabilities; NaN for a missing one."""

    ids: npt.NDArray[np.int32]  # [N]
    logprobs: npt.NDArray[np.float64]  # [N]


NO_TOKENS = OutputTokens(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Generation:
    """An engine's answer to one prompt: N tokens."""

    output_ids: npt.NDArray[np.int32]  # [N]
    logprobs: npt.NDArray[np.float64]  # [N]
    text: str
    finish: Literal["stop", "length", "abort"]
    weight_versions: list[tuple[int, int]]  # first output token, weight version
    engine_id: str
    cached_tokens: int
    pieces: int = 1  # requests that made it; with several, `text` may differ from the text of all tokens
    cuts: tuple[int, ...] = ()  # the first token of each request but the first
    # if they were asked for: experts of all tokens from the named one to the one before the last; None without output tokens
    routed: RoutedRows | None = None
    retractions: int = 0  # times that the engine dropped its keys and values, and computed them again


@dataclass(frozen=True)
class Handoff:
    """The address at which the decoding engine meets the prefilling one, and their number for a request."""

    host: str
    port: int
    room: int


@dataclass(frozen=True)
class AskedExperts:
    """Asks which experts the engine's routers choose, for all tokens that it is fed from `first` on."""

    form: RoutingFormat
    first: int


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerateRequest:
    """One request for one answer."""

    input_ids: Sequence[int]
    sampling_params: Mapping[str, Any]  # by SGLang's names; None stands for the engine's default
    rid: str  # its name, for `abort`
    progress_timeout_s: (
        float  # the request is lost after so many seconds in which the engine generates nothing
    )
    session: str | None = None  # requests that a router may keep on one engine
    continued: int = 0  # the number of last input ids that are earlier output of the same answer
    priority: int | None = None  # waiting requests with the smallest number come first
    cache_key: str | None = None  # shares prefixes only with requests of the same key
    handoff: Handoff | None = None  # for an engine that only prefills and the engine that decodes
    check: ProgressCheck | None = None  # replaces the check of this engine's progress
    on_part: OnPart | None = None  # called after every `every` tokens
    every: int = 1
    versions: range | None = None  # that may answer it, if the engine serves adapters by name; None: any
    experts: AskedExperts | None = None  # not with `on_part`: engines know them when the request ends
    images: SentImages | None = None  # pictures of the prompt, whose tokens are all among `input_ids`


class EngineWeights(Protocol):
    """The weights of one engine and the GPU memory that they take. An update that fails raises EngineError."""

    flushes: bool  # whether an update clears the prefix cache; True at first

    async def update_from_disk(self, path: str, version: int) -> None:
        """Load a Hugging Face folder as a weight version. The engine keeps its weights if it refuses the folder."""

    async def update_from_memory(self, copies: Sequence[WeightBucket], version: int | None) -> None:
        """Load one bucket: one copy for each GPU of the engine, which shares that GPU with the rank that made the copy.

        The last bucket carries the version. When this returns, the engine has copied the tensors.
        """

    async def join_group(self, host: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Let the engine's GPUs, from `rank` on, join a group of `size` that meets at an address."""

    async def update_from_broadcast(
        self, entries: Sequence[TensorEntry], group: str, version: int | None
    ) -> None:
        """Load one bucket that rank 0 of a group broadcasts at the same time; the last carries the version."""

    def serve_by_name(self, owner: str, *, alone: bool) -> None:
        """From now on each request names an adapter: the newest version that it may take, all tokens of which are of that version.

        owner: starts the names of this run's adapters, others are left alone. alone: no other run uses the engine, so that requests
        which it still has when a run begins are a dead process's. Raises EngineError if the engine serves no adapters.
        """

    async def load_adapter(self, folder: str, version: int, oldest: int) -> None:
        """Load a PEFT folder as a version, while requests go on; unload versions before `oldest` that no request has."""

    async def bracket_update(self, what: Literal["begin", "end"]) -> None:
        """Mark the start or end of an update from buckets."""

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release GPU memory; the engine must be idle."""

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take GPU memory again. Weights must be loaded anew before the engine serves."""

    async def checksum(self) -> dict[str, Any]:
        """Checksums of the tensors that the engine holds; equal for equal weights."""

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of each prompt's tokens except the first, at temperature 1; NaN for a missing number. Nats."""


class EngineClient(Protocol):
    """One engine: its requests, its state, and what this process remembers of it.

    Every call raises EngineLostError if the engine cannot be reached or fails, EngineError if it refuses.
    """

    url: str
    engine_id: str  # its name in errors and answers
    key: str | None  # what the engine asks for from those who call it
    in_flight: int  # requests of this client under way
    refit: int  # grows with each weight update, and is never reused
    refits_amid_requests: int  # updates during which it kept its requests
    part: str  # prefill, decode, or null for both; known after the first weight_version()
    bootstrap_port: int  # at which decoding engines meet it

    @property
    def weights(self) -> EngineWeights:
        """Its weights and memory."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one answer. Cancelling aborts the request at the engine.

        If the weights change during the request, each token keeps the version that made it. With `on_part`, the request ends early
        as "abort" when a part is refused, and when the engine knows only at the end which version made which token.
        Raises EngineLostError also if the engine makes no progress: EngineStalledError unless it is paused.
        """

    async def abort(self, rid: str | None = None) -> None:
        """End requests whose rid starts with `rid`, or all of them: they answer with their tokens so far as "abort"."""

    async def pause(self, mode: Literal["retract", "in_place"] = "retract") -> None:
        """Stop generating. Running requests are kept, in place with their keys and values. New requests wait."""

    async def resume(self) -> None:
        """Continue to generate."""

    async def flush(self) -> None:
        """Forget cached prompts. Raises EngineError unless the engine is idle."""

    async def health(self, timeout_s: float = 5.0, generating: bool = False) -> bool:
        """Whether the engine answers; with `generating`, whether it still generates tokens."""

    async def weight_version(self) -> int | None:
        """The weight version that the engine reports; None if the version is not the trainer's, or the engine is paused."""

    async def load(self) -> EngineLoad:
        """How full it is now."""

    async def start_trace(self, folder: str, steps: int) -> None:
        """Trace its next steps, and write the trace to a folder of its host when they are done. Raises EngineError if it cannot."""

    async def stop_trace(self) -> None:
        """Write the trace now, if its steps are not done yet."""

    async def forget_version(self) -> None:
        """Let the engine report no version of the trainer's until its next update; it must be idle."""

    async def check_holds_adapters(self, slots: int) -> None:
        """Raise EngineError if the engine does not hold so many adapters at once."""

    async def check_keeps_requests(self) -> None:
        """Raise EngineError if the engine cannot keep requests during a weight update and report each token's version."""

    async def last_moved(self, since: float, timeout_s: float) -> tuple[float, bool]:
        """The time when the engine was last seen to progress, at least `since`, and whether it is paused. Monotonic seconds.

        Raises EngineLostError if the engine has not answered for timeout_s.
        """

    def no_progress(self, timeout_s: float, paused: bool) -> EngineLostError:
        """The error for an engine that makes no progress."""

    def note_refit(self) -> None:
        """Record that the engine is about to get new weights."""

    async def close(self) -> None:
        """Close the connection; requests in flight are lost."""


Connect = Callable[[str, str, str | None], EngineClient]
"""Makes a client from an engine's URL, its name in errors, and its key."""
