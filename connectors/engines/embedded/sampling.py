"""From logits to a token: each request's parameters and random numbers, and exact log-probabilities.

A token depends on the request's seed, its position and its logits, never on other requests in the batch. The reported
log-probability is log_softmax(logits / temperature), before top-k, top-p and min-p; greedy uses raw logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GRAMMAR = ("json_schema", "regex", "ebnf", "structural_tag")
GREEDY_BELOW = 1e-6  # temperatures below this are 0, as in SGLang
LARGEST = 2**31 - 1  # bound of whole numbers without another one
HOTTEST = 1e6
HEAVIEST = 1e30  # float32 can hold a logit with such a bias at every temperature
MOST_OF_A_PROMPT = 1024  # answers to one prompt
DIGITS = 18  # most digits of a token id in text


class RequestError(ValueError):
    """A request that cannot be served; the message names the field."""


@dataclass
class SamplingParams:
    """SGLang's sampling_params, with its defaults."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    stop_regex: list[str] = field(default_factory=list)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] = field(default_factory=dict)
    sampling_seed: int | None = None
    stream_interval: int = 1  # tokens per event of a stream, which also has one at the end

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> SamplingParams:
        """Parse a request's parameters. Raises RequestError naming an unknown, ill-typed or impossible field."""
        if given is not None and not isinstance(given, Mapping):
            raise RequestError(f"sampling_params: {type(given).__name__} given, an object is wanted")
        values = {name: value for name, value in (given or {}).items() if value is not None}
        unknown = sorted(set(values) - {*cls.__dataclass_fields__, *GRAMMAR})
        if unknown:
            raise RequestError(f"sampling_params.{unknown[0]}: not supported by this engine")
        grammar = next((name for name in GRAMMAR if name in values), None)
        if grammar is not None:
            raise RequestError(
                f"sampling_params.{grammar}: this engine has no grammar backend; serve the model by SGLang to use it"
            )
        for name in ("stop", "stop_token_ids", "stop_regex"):
            if isinstance(values.get(name), str | int):
                values[name] = [values[name]]
        for name, value in values.items():
            _check_type(name, value)
        params = cls(**values)
        params._check()
        if params.temperature < GREEDY_BELOW:
            params.temperature = 0.0
        return params

    def _check(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "between 0 and max_new_tokens",
            ),
            ("temperature", 0 <= self.temperature <= HOTTEST, f"in [0, {HOTTEST:g}]"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or 1 <= self.top_k <= LARGEST, f"-1, or from 1 to {LARGEST}"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "in (0, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("n", 1 <= self.n <= MOST_OF_A_PROMPT, f"from 1 to {MOST_OF_A_PROMPT}"),
            ("sampling_seed", -(2**63) <= (self.sampling_seed or 0) < 2**63, "within 64 bits"),
            ("stream_interval", 1 <= self.stream_interval <= LARGEST, f"from 1 to {LARGEST}"),
            ("stop", all(self.stop), "without empty strings"),
        )
        for name, good, wanted in rules:
            if not good:
                raise RequestError(f"sampling_params.{name} = {getattr(self, name)}: must be {wanted}")

    @property
    def penalised(self) -> bool:
        """Whether penalties or a bias change the logits."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
        )

    @property
    def filtered(self) -> bool:
        """Whether part of the distribution is cut off."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed", "stream_interval"), (int,)
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        (int, float),
    ),
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), (bool,)
    ),
    "stop": (list,),
    "stop_token_ids": (list,),
    "stop_regex": (list,),
    "logit_bias": (dict,),
}


def whole(field_name: str, value: Any, least: int, most: int) -> int:
    """Check that a request's value is a whole number from `least` to `most`. Raises RequestError."""
    if type(value) is not int or not least <= value <= most:
        raise RequestError(f"{field_name}: a whole number from {least} to {most} is wanted")
    return value


def _check_type(name: str, value: Any) -> None:
    kinds = KINDS[name]
    fits = isinstance(value, kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RequestError(f"sampling_params.{name}: {type(value).__name__} given, {wanted} wanted")
    inner = {"stop": str, "stop_token_ids": int, "stop_regex": str}.get(name)
    if inner and not all(type(item) is inner for item in value):
        raise RequestError(f"sampling_params.{name}: every item must be {inner.__name__}")
    if name == "stop_regex":
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise RequestError(f"sampling_params.stop_regex: {pattern!r}: {error}") from error
    if name == "logit_bias" and not all(
        token.isdecimal() and len(token) <= DIGITS and type(bias) in (int, float) and abs(bias) <= HEAVIEST
        for token, bias in value.items()
    ):
        raise RequestError(
            f"sampling_params.logit_bias: token ids as text are wanted, each with a number from -{HEAVIEST:g} to {HEAVIEST:g}"
        )


def uniform(seed: int, position: int) -> float:
    """A pseudo-random number in (0, 1), computed from seed and position (splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
    return ((z >> 11) + 0.5) / (1 << 53)


def penalise(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """Logits [V] of one request after its penalties and bias."""
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *generated}))
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if generated and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(list(generated)).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[int(token)] += bias
    return logits


def sample(
    logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> tuple[list[int], Tensor]:
    """Tokens of M requests from fp32 logits [M, V] and one uniform draw each; also log-probabilities [M, V]."""
    temperatures = torch.tensor([p.temperature or 1.0 for p in params])
    logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    probabilities = logprobs.exp().double()
    for row, p in enumerate(params):
        if p.filtered and p.temperature > 0:
            probabilities[row] = _filter(probabilities[row], p)
    cumulative = probabilities.cumsum(-1)
    points = torch.tensor(draws, dtype=torch.float64) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, points[:, None])[:, 0].clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([p.temperature == 0 for p in params])
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen: list[int] = tokens.tolist()
    return chosen, logprobs


def likeliest(logprobs: Tensor, count: int) -> list[tuple[float, int]]:
    """The `count` likeliest tokens with their log-probabilities, likeliest first. logprobs: [vocabulary]."""
    values, ids = logprobs.topk(count)
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def _filter(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """The distribution after top-k, top-p and min-p, in that order. Tokens that they cut off are 0."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1:
        kept = torch.where(keep, ordered, torch.zeros_like(ordered))
        kept = kept / kept.sum()
        keep &= (kept.cumsum(-1) - kept) <= params.top_p
    if params.min_p > 0:
        keep &= ordered >= params.min_p * ordered[0]
    keep[0] = True
    out = torch.zeros_like(probabilities)
    out[order[keep]] = ordered[keep]
    return out
