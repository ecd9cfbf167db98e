"""`millrace top`: a run as it works, in a terminal: its state, the open iterations, the newest figures and answers.

Reads the run's folder alone, so it works over SSH and for a run in an object store. Texts of a model act on no terminal.
"""

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import StorageError
from millrace.core.plain_text import printable
from millrace.flows.commands.show import SPEED
from millrace.flows.commands.terminal import RootOption, console, guarded
from millrace.flows.viewer.answers import OpenRun
from millrace.flows.viewer.overview import Overview, overview
from millrace.flows.viewer.samples import SampleView

CLEAR = "\x1b[H\x1b[2J"  # the terminal's own: no text that is stored is written with it
SHOWN = ("reward", "length", "loss", "grad_norm", "gap", "staleness", "tokens/s", *SPEED, "KV use", "queue")
ANSWERS = 3  # newest ones
LONGEST = 300  # characters of an answer


def top(
    run: str,
    root: RootOption = "runs",
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch a run in the terminal: its state, the open iterations, the newest figures and answers. Ctrl-C ends it."""
    opened = guarded(lambda: OpenRun.of(root, run))
    while True:
        lines = guarded(lambda: list(look(opened)))
        if console.is_terminal and not once:
            console.file.write(CLEAR)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if once:
            return
        try:
            time.sleep(every)
        except KeyboardInterrupt:
            return


def look(of: OpenRun) -> Iterator[str]:
    """The lines of one look, each printable."""
    of.run.refresh()
    view = overview(of.run)
    yield printable(
        f"{view.run}: {view.facts.get('state', 'unknown')}, {view.facts['iterations']} iterations"
    )
    yield from _figures(view)
    newest = None
    for line in view.iterations:
        if not line.committed:
            newest = line.iteration
            yield from _open(of, line.iteration)
    if newest is None and of.run.committed:
        newest = max(of.run.committed) + 1
    for problem in view.problems:
        yield printable(f"not shown: {problem.where}: {problem.what}")
    if newest is not None:
        yield from _answers(of, newest)


def _figures(view: Overview) -> Iterator[str]:
    done = [line for line in view.iterations if line.committed]
    for line in done[-3:]:
        figures = ", ".join(f"{name} {line.figures[name]:.4g}" for name in SHOWN if name in line.figures)
        phases = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in line.phases.items() if seconds >= 0.05
        )
        dropped = ", ".join(f"{count} by {name.replace('_', ' ')}" for name, count in line.dropped.items())
        yield f"iteration {iteration_number(line.iteration - 1)}: {figures}"
        yield f"  {phases or 'no times'}" + (f"; groups dropped: {dropped}" if dropped else "")


def _open(of: OpenRun, iteration: int) -> Iterator[str]:
    """An open iteration: what it waits for, as its files tell."""
    try:
        table = of.tables.of(iteration - 1, whole=True)
        (row,) = table.ask(
            "SELECT count(*) AS made, count(reward) AS scored, sum(length) AS tokens FROM samples"
        )
    except StorageError as error:
        yield printable(f"iteration {iteration_number(iteration - 1)}: {error}")
        return
    files = of.run.iteration(iteration - 1)
    drawn = sum(entry.rows or 0 for entry in files.of_kind("prompts"))
    wanted = (
        min(drawn, of.run.settings["rollout"]["prompts"]) * of.run.settings["rollout"]["samples_per_prompt"]
    )
    made, scored = int(str(row["made"])), int(str(row["scored"]))
    awaited = (
        "prompts"
        if not drawn
        else "answers"
        if made < wanted
        else "scores"
        if scored < made
        else "the trainer"
    )
    yield (
        f"iteration {iteration_number(iteration - 1)}: open, waits for {awaited}; {made} of {wanted} answers, {scored} scored, "
        f"{int(str(row['tokens'] or 0)):,} tokens"
    )


def _answers(of: OpenRun, iteration: int) -> Iterator[str]:
    rows = of.tables.of(iteration - 1).ask(
        f"SELECT sample_id FROM samples WHERE length > 0 ORDER BY ordinal DESC, sample_id DESC LIMIT {ANSWERS}"
    )
    for row in rows:
        try:
            sample: SampleView = of.samples.sample(iteration - 1, str(row["sample_id"]))
        except StorageError as error:
            yield printable(f"not shown: {error}")
            continue
        yield ""
        yield _shown(f"sample {sample.sample}, reward {_number(sample.figures.get('reward'))}")
        for message in sample.messages[-2:]:
            text = " ".join(part.text for part in message.parts)
            yield _shown(f"  {message.role}: {text}")


def _number(value: Any) -> str:
    return "none yet" if value is None else f"{value:.3g}"


def _shown(text: str) -> str:
    line = " ".join(printable(text).split("\n"))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
