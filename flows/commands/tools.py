"""Commands that work on a stored run: verify, replay, branch, discard, stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from millrace.core.contracts.ids import iteration_number
from millrace.flows.commands.terminal import RootOption, console, guarded, named_first

SHOWN = 20  # number of shown files


def verify(run: str, root: RootOption = "runs") -> None:
    """Check every hash, the ledger and the lineage of a run again; exits with 1 if anything is wrong."""
    from millrace.flows.tools.verify import verify_run

    verdict = guarded(lambda: verify_run(root, run))
    opened = [str(iteration_number(index)) for index in verdict.open_iterations]
    console.print(
        f"{run}: {verdict.iterations} iterations, {verdict.files} files, {verdict.trained_samples} trained samples, "
        f"{verdict.checkpoints} checkpoints looked at" + (f"; open: {', '.join(opened)}" if opened else "")
    )
    for problem in verdict.problems:
        console.print(f"  {problem}", soft_wrap=True)
    if verdict.strangers:
        console.print(f"{len(verdict.strangers)} files that no manifest names; nothing reads them:")
        for path in verdict.strangers[:SHOWN]:
            console.print(f"  {path}", soft_wrap=True)
        if len(verdict.strangers) > SHOWN:
            console.print(f"  and {len(verdict.strangers) - SHOWN} more")
    console.print("nothing is wrong" if not verdict.problems else f"{len(verdict.problems)} problems")
    raise SystemExit(1 if verdict.problems else 0)


def replay(
    run: str,
    first: Annotated[int, typer.Option("--from", help="Replay starts after this many iterations.")],
    last: Annotated[int, typer.Option("--to", help="Replay ends after this many iterations.")],
    root: RootOption = "runs",
    config: Annotated[
        Path | None, typer.Option(help="YAML file that replaces the run's own configuration.")
    ] = None,
) -> None:
    """Repeat stored steps from stored batches and compare metrics and weights; exits with 1 if they differ."""
    from millrace.flows.tools.evaluate import own_configuration
    from millrace.flows.tools.replay import replay_run

    own = guarded(lambda: own_configuration(config, []))
    result = guarded(lambda: replay_run(root, run, first, last, own, named_first(run)))
    table = Table("step", "loss stored", "loss again", "grad norm stored", "grad norm again")
    for step in result.steps:
        table.add_row(
            str(step["version"]), *(f"{x:.9g}" for name in ("loss", "grad_norm") for x in step[name])
        )
    console.print(f"from {result.started_from}:", table, result.weights)
    raise SystemExit(0 if result.equal else 1)


def branch(
    run: str,
    new: str,
    at: Annotated[int, typer.Option(help="Iterations of the run that the branch starts with.")],
    root: RootOption = "runs",
) -> None:
    """Start a new run from any checkpointed iteration of another."""
    from millrace.flows.tools.branch import branch_run

    console.print(guarded(lambda: branch_run(root, run, new, at)), soft_wrap=True)


def discard(
    run: str,
    iteration: Annotated[
        int | None, typer.Option(help="Number of the iteration to discard, as messages show it.")
    ] = None,
    first: Annotated[
        int | None, typer.Option("--from", help="Discard this iteration and every later one.")
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason; stored with the moved files.")] = "",
    root: RootOption = "runs",
) -> None:
    """Discard an iteration that is not committed: its groups are drawn again, and its files are moved aside."""
    from millrace.flows.tools.discard import discard_iterations

    number = iteration if first is None else first
    if number is None or number < 1 or (iteration is None) == (first is None):
        raise typer.BadParameter("give --iteration or --from, with a number from 1 on")
    console.print(
        guarded(lambda: discard_iterations(root, run, number - 1, later=first is not None, reason=reason)),
        soft_wrap=True,
    )


def stop(
    run: Annotated[
        str | None, typer.Argument(help="Run to end; without one, processes that killed drivers left.")
    ] = None,
    root: RootOption = "runs",
) -> None:
    """End a run on this host, as Ctrl-C does, or the processes that a killed run left. Files stay; train resumes it."""
    from millrace.flows.tools.stop import stop_left, stop_run

    console.print(guarded(lambda: stop_left() if run is None else stop_run(root, run)), soft_wrap=True)
