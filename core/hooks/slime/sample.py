"""Objects that slime's hooks get: the sample, the group's verdict, the arguments, and the rollout's calls to the engine.

Owns the names and fields that hooks read and set. `names` says under which modules they are imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar

POST_TIMEOUT_S = 24 * 3600.0  # the rollout's own limits end a request earlier


class SlimeStatus(enum.Enum):
    """The status of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


ENDS = {"stop": SlimeStatus.COMPLETED, "length": SlimeStatus.TRUNCATED, "abort": SlimeStatus.ABORTED}


@dataclass
class SpecInfo:
    """Counts of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class PrefixCacheInfo:
    """Counts of the engine's prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclass
class Sample:
    """A sample. `prompt` is the model's input text, or messages if no chat template is applied."""

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None  # a number, or a mapping
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: Any = field(default_factory=SpecInfo)
    prefix_cache_info: Any = field(default_factory=PrefixCacheInfo)
    messages: list[Any] = field(default_factory=list)  # the whole dialogue, if a reward reads it

    def get_reward_value(self, args: Any) -> Any:
        """The reward; if it is a mapping, the value at args.reward_key."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens in the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens of the response: generated ones with log-probabilities, or observed ones without.

        Errors: ValueError for log-probabilities that do not fit the tokens.
        """
        new = [int(token) for token in tokens] if tokens is not None else []
        given = [float(value) for value in log_probs] if log_probs is not None else None
        if new and trainable and given is None:
            raise ValueError("generated tokens come with the engine's log-probabilities: give log_probs")
        if new and not trainable and given is not None:
            raise ValueError("observed tokens have no log-probabilities: leave log_probs out")
        if given is not None and len(given) != len(new):
            raise ValueError(f"{len(given)} log-probabilities for {len(new)} tokens")
        before = self.response_length
        self.response += text or ""
        if new:
            self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
            self.rollout_log_probs = self.rollout_log_probs or [0.0] * before
            self.response_length = before + len(new)
            # in place, since functions hold these lists under other names
            self.tokens += new
            self.loss_mask += [int(trainable)] * len(new)
            self.rollout_log_probs += given or [0.0] * len(new)
            for name in ("loss_mask", "rollout_log_probs"):
                if len(getattr(self, name)) != self.response_length:
                    raise ValueError(
                        f"{name} has {len(getattr(self, name))} values, the response {self.response_length} tokens"
                    )
        if update_terminal_info and meta_info and "finish_reason" in meta_info:
            self.status = ENDS.get(meta_info["finish_reason"]["type"], self.status)
            if "weight_version" in meta_info:
                self.weight_versions.append(meta_info["weight_version"])

    def to_dict(self) -> dict[str, Any]:
        """The sample as plain values."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """A sample from plain values; unknown keys become attributes."""
        known = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        made = cls(**{**known, "status": SlimeStatus(values.get("status", "pending"))})
        for key, kind in (("spec_info", SpecInfo), ("prefix_cache_info", PrefixCacheInfo)):
            if isinstance(known.get(key), Mapping):
                setattr(made, key, kind(**known[key]))
        for key in values.keys() - known.keys():
            setattr(made, key, values[key])
        return made


@dataclass
class DynamicFilterOutput:
    """The decision of slime's dynamic filters on a group."""

    keep: Any  # bool, or a tensor with one value
    reason: str | None = None
    keep_when_insufficient: bool = False


class Arguments(types.SimpleNamespace):
    """slime's args: the settings of this run under slime's names, and the function's options."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no {name} here: give it in the function's options")


class GenerateState:
    """The state that slime's generation shares: the tokenizer, and the sampling parameters."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = tokenizer(args.hf_checkpoint)
        self.processor = None
        self.sampling_params = dict(args.sampling_params)
        # rollout.session.max_rollouts bounds the rollouts at once
        self.semaphore = asyncio.Semaphore(1 << 20)
        self.aborted = False
        self.dp_rank = 0

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The engine's rank: one address stands for all engines here."""
        yield self.dp_rank


@cache
def tokenizer(folder: str) -> Any:
    """The model's tokenizer, loaded once a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """POST JSON and return the JSON answer. Raises RuntimeError with the server's answer, without a retry."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as client,
        client.post(url, json=payload, headers=headers) as answer,
    ):
        if answer.status >= 400:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        return await answer.json(content_type=None)


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """slime's own generation: continue from the sample's tokens, or from its prompt, until the engine ends the turn."""
    if not sample.tokens:
        sample.tokens = tokenizer(args.hf_checkpoint)(sample.prompt, add_special_tokens=False)["input_ids"]
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = SlimeStatus.TRUNCATED
        return sample
    asked = {"input_ids": sample.tokens, "sampling_params": {**sampling_params, "max_new_tokens": left}}
    answer = await post(model_url(args), {**asked, "return_logprob": True})
    pairs = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample


def model_url(args: Any, model_name: str = "default", endpoint: str = "/generate") -> str:
    """The URL of a model: the policy, or a model that the option sglang_model_routers names as (host, port).

    Errors: ValueError for a model that is not named there.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}
    if model_name in routers:
        host, port = routers[model_name]
        return f"http://{host}:{port}{endpoint}"
    if model_name not in ("default", "actor"):
        raise ValueError(
            f"a run serves its policy alone, and no model {model_name}: give its address in the function's options as "
            f"sglang_model_routers: {{{model_name}: [host, port]}}"
        )
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"
