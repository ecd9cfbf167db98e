"""`millrace check`: resolve a configuration, check everything it names, and print the plan."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.core.contracts.progress import waiting
from millrace.flows.commands.terminal import ConfigArgument, Overrides, console, errors, guarded

if TYPE_CHECKING:
    from millrace.flows.preflight.check import Checked


log = logging.getLogger(__name__)


def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Resolve a configuration, check everything it names, and print the plan."""
    from millrace.core.config.plan import make_plan
    from millrace.flows.preflight.check import unchecked
    from millrace.flows.preflight.plan_table import plan_text

    found = checked_or_exit(config, overrides)
    width = console.width if console.is_terminal else None
    text = plan_text(make_plan(found.located), found, width)
    console.print(text, soft_wrap=True)
    for sentence in unchecked(found.config, found.model.whole):
        console.print(sentence, soft_wrap=True)


def checked_or_exit(path: Path, overrides: list[str] | None) -> Checked:
    """The configuration with the results of its checks. Ends the command with every problem, in the file or what it names."""
    from millrace.core.config.parts.problems import render_problems
    from millrace.core.config.reading.load import read_config
    from millrace.flows.preflight.check import checked

    reading = guarded(lambda: read_config(str(path), overrides or []))
    with waiting(log, "the check of model, data and reward"):
        found = checked(reading.config, reading.problems) if reading.config else None
    problems = found.problems if found else reading.problems
    if problems or found is None:
        errors.print(render_problems(problems), soft_wrap=True)
        raise SystemExit(2)
    found.file = path
    return found
