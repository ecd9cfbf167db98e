"""Rules of `rollout` and of the samplings of `evaluation`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Sampling parameters that would yield nothing, here and in evaluation sets."""
    for place, sampling in config.samplings:
        if "" in sampling.stop:
            yield Problem(
                f"{place}.stop",
                sampling.stop,
                "an empty string ends every response at once",
                "remove it from the list",
            )
        if any(token < 0 for token in sampling.stop_token_ids):
            yield Problem(
                f"{place}.stop_token_ids",
                sampling.stop_token_ids,
                "no token has a negative id",
                "remove it",
            )
        if sampling.top_k == 0:
            yield Problem(
                f"{place}.top_k",
                0,
                "no token would be left to sample",
                "set it to -1 for the whole vocabulary",
            )
    if config.algorithm.supervised and config.rollout.samples_per_prompt != 1:
        yield Problem(
            "rollout.samples_per_prompt",
            config.rollout.samples_per_prompt,
            "algorithm.loss=sft learns the one reference answer of a prompt",
            "set it to 1",
        )
