"""Rewards written for slime: `async def reward(args, sample, **kwargs)`, or with a list of samples for a group.

Owns the object that stands in for slime's Sample, with the fields that rewards read, and the one for its arguments. Imports
nothing of slime's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from types import SimpleNamespace
from typing import Any

from millrace.core.hooks import RewardInput

PREFIX = "slime:"


class SlimeStatus(Enum):
    """How a sample ended, with slime's names."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass
class Sample:
    """A sample with the names that slime gives its fields. Text is for reading: there are no token ids."""

    Status = SlimeStatus

    prompt: Any
    response: str
    label: Any
    metadata: dict[str, Any]
    response_length: int
    status: SlimeStatus
    index: int = 0
    reward: Any = None
    messages: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Refused: rewards run apart from the tokenizer."""
        raise AttributeError(
            "a reward sees no token ids here: read response, response_length, or metadata instead of tokens"
        )


class Arguments(SimpleNamespace):
    """slime's arguments: the reward's options, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no {name}: name it in the options of this reward")


class SlimeReward:
    """Calls a reward of slime's signature with a sample, or with the samples of a group."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._args = Arguments(**{"reward_key": None, **options})

    async def __call__(self, samples: RewardInput | Sequence[RewardInput]) -> Any:
        """Its score, or list of scores."""
        given: Any
        if isinstance(samples, RewardInput):
            given = _sample(samples, 0)
        else:
            given = [_sample(sample, index) for index, sample in enumerate(samples)]
        answer = self._function(self._args, given)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(samples, RewardInput):
            return self._score(answer)
        return [self._score(each) for each in answer]

    def _score(self, answer: Any) -> Any:
        """A mapping's reward is at args.reward_key; its other numbers are parts."""
        key = self._args.reward_key
        if not isinstance(answer, Mapping) or key is None:
            return answer
        if key not in answer:
            raise KeyError(f"the answer has no {key}, which the option reward_key names")
        parts = {name: value for name, value in answer.items() if name != key and isinstance(value, Real)}
        return {**{name: float(value) for name, value in parts.items()}, "reward": answer[key]}


def _sample(given: RewardInput, index: int) -> Sample:
    prompt = given.prompt if isinstance(given.prompt, str) else [dict(message) for message in given.prompt]
    return Sample(
        prompt=prompt,
        response=given.response,
        label=given.label,
        metadata=dict(given.metadata),
        response_length=given.response_length,
        status=SlimeStatus(given.status),
        index=index,
        messages=[dict(message) for message in given.messages],
    )
