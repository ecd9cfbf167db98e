"""Dynamic filters written for slime: `def check(args, samples, **kwargs)`, which returns a bool or a DynamicFilterOutput.

It gets slime's samples of a group with what filters read of them, and the options as args. Imports nothing of slime's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.core.hooks.protocols import GroupSample
from millrace.core.hooks.slime.reward import ReadSample, read_sample
from millrace.core.hooks.slime.sample import Arguments, DynamicFilterOutput


def slime_verdict(
    function: Callable[..., Any], options: Mapping[str, Any], samples: Sequence[GroupSample]
) -> DynamicFilterOutput:
    """The filter's verdict on the scored samples of a group; `keep` is a bool.

    With the option reward_key each reward is a mapping: the reward under that key, and its parts.
    Errors: TypeError for another answer than a bool or a DynamicFilterOutput; and errors of the filter.
    """
    args = Arguments(**{"reward_key": None, **options})
    scored = [sample for sample in samples if sample.reward is not None]
    answer = function(args, [_sample(sample, args.reward_key, index) for index, sample in enumerate(scored)])
    keep = getattr(answer, "keep", answer)
    try:
        # a tensor of one value, or a number of numpy's
        kept = keep.item() if hasattr(keep, "item") else keep
    except (ValueError, RuntimeError) as error:
        raise TypeError(f"it returned several values: {error}; return one bool") from None
    if not isinstance(kept, bool):
        raise TypeError(f"it returned a {type(kept).__name__}; return a bool or a DynamicFilterOutput")
    reason = getattr(answer, "reason", None) or "the filter refused it"
    return DynamicFilterOutput(kept, str(reason), bool(getattr(answer, "keep_when_insufficient", False)))


def _sample(given: GroupSample, reward_key: str | None, index: int) -> ReadSample:
    made = read_sample(given.input, index)
    made.reward = {**given.parts, reward_key: given.reward} if reward_key else given.reward
    made.response_length = given.response_length
    return made
