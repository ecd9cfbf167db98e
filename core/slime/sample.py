"""What slime's hooks are handed, with the fields that their users read and set, and the modules that they import.

Owns the names alone. Where slime itself is not installed, `provide` lets `slime.utils.types`, `slime.utils.http_utils`,
`slime.rollout.sglang_rollout` and `slime.rollout.filter_hub.base_types` be imported with what a hook takes from them.
"""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar

SLIME = "slime"  # the package; in a function's path also what stands before the colon
POST_TIMEOUT_S = 24 * 3600.0  # the rollout's own limits end it before


class SlimeStatus(enum.Enum):
    """How a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """A sample. `prompt` is the text that the model is shown, or messages where no chat template is applied."""

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None  # a number, or a mapping
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False
    train_metadata: dict[str, Any] | None = None
    rollout_id: int | None = None
    session_id: str | None = None
    messages: list[Any] = field(default_factory=list)  # the whole dialogue, where a reward reads it
    non_generation_time: float = 0.0

    def get_reward_value(self, args: Any) -> Any:
        """Its reward: of a mapping the value at args.reward_key."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """From plain values; those that are no field become attributes."""
        known = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        made = cls(**{**known, "status": SlimeStatus(values.get("status", "pending"))})
        for key in values.keys() - known.keys():
            setattr(made, key, values[key])
        return made


@dataclass
class DynamicFilterOutput:
    """What slime's dynamic filters decide on a group."""

    keep: Any  # bool, or a tensor of one
    reason: str | None = None
    keep_when_insufficient: bool = False


class Arguments(types.SimpleNamespace):
    """What slime calls args: the figures of this run under slime's names, and the function's options."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no {name} here: give it in the function's options")


class GenerateState:
    """What slime's generation shares: the tokenizer, and how it samples."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = tokenizer(args.hf_checkpoint)
        self.processor = None
        self.sampling_params = dict(args.sampling_params)
        self.semaphore = asyncio.Semaphore(1 << 20)  # rollout.session.max_rollouts bounds what is under way
        self.aborted = False


@cache
def tokenizer(folder: str) -> Any:
    """The model's tokenizer, loaded once a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """POST JSON and return the JSON answer. Raises RuntimeError with what the server says; it is not asked again then."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as client,
        client.post(url, json=payload, headers=headers) as answer,
    ):
        if answer.status >= 400:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        return await answer.json(content_type=None)


def provide() -> None:
    """Let hooks import what they take from slime, where it is not installed."""
    if SLIME in sys.modules or importlib.util.find_spec(SLIME) is not None:
        return
    given: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.http_utils": {"post": post},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
        "slime.rollout.filter_hub": {},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
    }
    for name, names in given.items():
        module = types.ModuleType(name, "Names that hooks written for slime import.")
        module.__path__ = []
        vars(module).update(names)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
