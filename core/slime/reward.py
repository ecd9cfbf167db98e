"""Rewards written for slime: `async def reward(args, sample, **kwargs)`, or with a list of samples for a group.

It gets slime's sample with what rewards read of it, and the options as args. Imports nothing of slime's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.core.hooks import RewardInput
from millrace.core.rewards.reward_key import under_reward
from millrace.core.slime.sample import Arguments, Sample, SlimeStatus


class ReadSample(Sample):
    """A sample as a reward or a filter may read it. They run apart from the tokenizer."""

    def __getattribute__(self, name: str) -> Any:
        """Refuses token ids."""
        if name in ("tokens", "loss_mask", "rollout_log_probs"):
            raise AttributeError(
                f"rewards and filters see no token ids here: read response, response_length or metadata instead of {name}"
            )
        return super().__getattribute__(name)


class SlimeReward:
    """Calls a reward of slime's signature with a sample, or with the samples of a group."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._args = Arguments(**{"reward_key": None, **options})

    async def __call__(self, samples: RewardInput | Sequence[RewardInput]) -> Any:
        """Its score, or list of scores."""
        given: Any
        if isinstance(samples, RewardInput):
            given = read_sample(samples, 0)
        else:
            given = [read_sample(sample, index) for index, sample in enumerate(samples)]
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
        return under_reward(answer, key)


def read_sample(given: RewardInput, index: int) -> ReadSample:
    """The sample at this place of its group, under slime's names."""
    prompt = given.prompt if isinstance(given.prompt, str) else [dict(message) for message in given.prompt]
    made = ReadSample(
        prompt=prompt,
        response=given.response,
        label=given.label,
        metadata=dict(given.metadata),
        response_length=given.response_length,
        status=SlimeStatus(given.status),
        index=index,
    )
    made.messages = [dict(message) for message in given.messages]
    return made
