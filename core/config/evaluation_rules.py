"""Rules of `evaluation`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.data.rules import file_problems, loss_problems, same_names, template_problems
from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Held-out sets that cannot be read, distinguished, or learned from."""
    yield from same_names("evaluation.sets", config.evaluation.sets)
    if config.evaluation.background and config.algorithm.supervised:
        yield Problem(
            "evaluation.background",
            True,
            "with algorithm.loss=sft held-out losses are computed by the trainer itself",
            "leave it out",
        )
    for held_out in config.evaluation.sets:
        yield from file_problems(f"evaluation.sets.{held_out.name}.path", held_out.path)
        yield from template_problems(f"evaluation.sets.{held_out.name}", held_out)
        yield from loss_problems(f"evaluation.sets.{held_out.name}", held_out, config.algorithm.supervised)
        if held_out.sampling.temperature == 0 and held_out.samples_per_prompt > 1:
            yield Problem(
                f"evaluation.sets.{held_out.name}.samples_per_prompt",
                held_out.samples_per_prompt,
                "greedy samples of one prompt are identical",
                "set it to 1, or the set's sampling.temperature above 0",
            )
