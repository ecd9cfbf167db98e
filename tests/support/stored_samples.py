"""Drawn groups and generated samples of the second iteration, as tests store them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample

OF_GROUP = ("group_id", "prompt_id", "iteration", "source", "prompt", "label", "metadata")


def drawn_group(number: int, **changes: Any) -> DrawnGroup:
    """The group that is drawn as this one."""
    group = DrawnGroup(
        group_id=f"g{number}",
        prompt_id=f"p{number}",
        iteration=1,
        source="sums",
        row=number,
        epoch=0,
        ordinal=number,
        prompt='"1+1="',
        prompt_tokens=[1, 2],
        label='"2"',
        metadata=None,
    )
    return replace(group, **changes)


def sample_of(
    group: DrawnGroup, index: int, response: str, length: int = 1, **changes: Any
) -> GeneratedSample:
    """A sample of a group. length: of the response, in tokens."""
    sample = GeneratedSample(
        **{name: getattr(group, name) for name in OF_GROUP},
        sample_id=sample_id(group.group_id, index),
        index=index,
        tokens=[*group.prompt_tokens, *[3] * length],
        response_length=length,
        response=response,
        loss_mask=[1] * length,
        rollout_logprobs=[-0.5] * length,
        policy_versions=[{"first_token": 0, "version": 2 * group.iteration}],
        engine_id="engine-0",
        seed=index,
        turns=1,
        status="completed",
        reason=None,
        timings=[],
    )
    return replace(sample, **changes)
