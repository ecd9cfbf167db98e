"""Rewards written for slime: `async def reward(args, sample, **kwargs)`, or with a list of samples for a group, or a class with
`compute_reward(prompts, responses)`, which is made once a process.

It gets slime's sample with the fields that rewards read, and the options as args. Imports nothing of slime's.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from millrace.core.hooks.protocols import RewardInput
from millrace.core.hooks.slime.arguments import OF_SCORING
from millrace.core.hooks.slime.sample import Arguments, Sample, SlimeStatus


def under_reward(answer: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping as `read_score` takes it: the value at `key` as `reward`, and its other numbers and texts.

    Errors: KeyError without the key.
    """
    parts = {
        name: value if isinstance(value, str) else float(value)
        for name, value in answer.items()
        if name not in (key, "reward") and isinstance(value, Real | str)
    }
    return {**parts, "reward": answer[key]}


BATCHED = "compute_reward"


class ReadSample(Sample):
    """A sample as rewards and filters may read it. They run without the tokenizer."""

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
        """Creates the object of a class. Errors: TypeError for a class without compute_reward; errors of its constructor."""
        self._args = Arguments(**{**OF_SCORING, **options})
        self._function = _object_of(function, options) if inspect.isclass(function) else function

    async def __call__(self, samples: RewardInput | Sequence[RewardInput]) -> Any:
        """The score of a sample, or the list of scores of a group."""
        one = isinstance(samples, RewardInput)
        inputs = [samples] if isinstance(samples, RewardInput) else samples
        given = [read_sample(each, index) for index, each in enumerate(inputs)]
        batched = getattr(self._function, BATCHED, None)
        if batched is None:
            answer = self._function(self._args, given[0] if one else given)
        else:
            answer = batched(*_columns(batched, given))
        if inspect.isawaitable(answer):
            answer = await answer
        if one and batched is None:
            return self._score(answer)
        listed = answer.tolist() if hasattr(answer, "tolist") else answer
        if not isinstance(listed, list | tuple) or len(listed) != len(given):
            raise TypeError(
                f"it returned {str(listed)[:60]} for {len(given)} samples: return a list with a score for each"
            )
        scores = [self._score(each) for each in listed]
        return scores[0] if one else scores

    def _score(self, answer: Any) -> Any:
        """A mapping's reward is at args.reward_key; its other numbers are parts."""
        key = self._args.reward_key
        if not isinstance(answer, Mapping) or key is None:
            return answer
        if key not in answer:
            raise KeyError(f"the answer has no {key}, which the option reward_key names")
        return under_reward(answer, key)


def _object_of(kind: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """An object of a class, created with args if it has that parameter, else with the options."""
    names = list(inspect.signature(kind).parameters)
    rest = {key: value for key, value in options.items() if key in names or key not in OF_SCORING}
    made = kind(Arguments(**{**OF_SCORING, **options})) if names == ["args"] else kind(**rest)
    if not callable(getattr(made, BATCHED, None)):
        raise TypeError(
            f"objects of the class {kind.__name__} have no method {BATCHED}(self, prompts, responses)"
        )
    return made


def _columns(batched: Callable[..., Any], samples: Sequence[Sample]) -> list[list[Any]]:
    """Prompts and responses, then labels and metadata if the method has parameters of these names."""
    columns = [[sample.prompt for sample in samples], [sample.response for sample in samples]]
    for name in list(inspect.signature(batched).parameters)[2:]:
        if name in ("labels", "label", "metadata"):
            columns.append(
                [getattr(sample, "metadata" if name == "metadata" else "label") for sample in samples]
            )
    return columns


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
