"""`millrace check`: resolve a configuration, check everything it names, and print the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.core.contracts.progress import waiting
from millrace.flows.commands.terminal import ConfigArgument, Overrides, console, errors, guarded

if TYPE_CHECKING:
    from millrace.flows.preflight.check import Checked


log = logging.getLogger(__name__)


GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus", min=1, help="GPUs that layouts of the trainer are proposed for; without it this host's."
    ),
]
MemoryOption = Annotated[
    float | None,
    typer.Option("--gpu-memory", min=1, help="Memory of each, in GiB; without it this host's, or 80 GB."),
]


def check(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: GpusOption = None,
    gpu_memory: MemoryOption = None,
) -> None:
    """Resolve a configuration, check everything it names, and print the plan."""
    from millrace.core.config.plan import make_plan
    from millrace.flows.preflight.check import unchecked
    from millrace.flows.preflight.plan_table import plan_text

    found = checked_or_exit(config, overrides, lambda checked: _propose(checked, gpus, gpu_memory))
    width = console.width if console.is_terminal else None
    text = plan_text(make_plan(found.located), found, width)
    console.print(text, soft_wrap=True)
    _propose(found, gpus, gpu_memory)
    for sentence in unchecked(found.config, found.model.whole):
        console.print(sentence, soft_wrap=True)


def _propose(found: Checked, gpus: int | None, memory_gib: float | None) -> None:
    """Print layouts of megatron-core's trainer for so many GPUs, or for this host's, if it has any."""
    from millrace.core.config.plan import visible_gpus
    from millrace.flows.preflight.layout_table import proposed

    count = gpus or (visible_gpus() if found.config.trainer.device != "cpu" else 0)
    if count:
        for line in proposed(found, count, memory_gib):
            console.print(line, soft_wrap=True)


def checked_or_exit(
    path: Path, overrides: list[str] | None, beside: Callable[[Checked], None] = lambda _: None
) -> Checked:
    """The configuration with the results of its checks. Ends the command with every problem, in the file or what it names.

    beside: what to do with the results before the command ends so.
    """
    from millrace.core.config.parts.problems import render_problems
    from millrace.core.config.reading.load import read_config
    from millrace.flows.preflight.check import checked

    reading = guarded(lambda: read_config(str(path), overrides or []))
    with waiting(log, "the check of model, data and reward"):
        found = checked(reading.config, reading.problems) if reading.config else None
    problems = found.problems if found else reading.problems
    if problems or found is None:
        if found is not None:
            beside(found)
        errors.print(render_problems(problems), soft_wrap=True)
        raise SystemExit(2)
    found.file = path
    return found
