"""Commands that work on a stored run: verify, replay, branch, stop."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from millrace.core.contracts.ids import iteration_number
from millrace.flows.cli.terminal import RootOption, console, guarded


def verify(run: str, root: RootOption = "runs") -> None:
    """Check every hash, the ledger and the lineage of a run again; exits with 1 if anything is wrong."""
    from millrace.flows.tools.verify import verify_run

    verdict = guarded(lambda: verify_run(root, run))
    opened = verdict.open_iteration
    console.print(
        f"{run}: {verdict.iterations} iterations, {verdict.files} files, {verdict.trained_samples} trained samples, "
        f"{verdict.checkpoints} checkpoints looked at"
        + (f"; iteration {iteration_number(opened)} is open" if opened is not None else "")
    )
    for problem in verdict.problems:
        console.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)
    console.print("nothing is wrong" if not verdict.problems else f"{len(verdict.problems)} problems")
    raise SystemExit(1 if verdict.problems else 0)


def replay(
    run: str,
    first: Annotated[int, typer.Option("--from", help="Replay begins after this many iterations.")],
    last: Annotated[int, typer.Option("--to", help="Replay ends after this many iterations.")],
    root: RootOption = "runs",
) -> None:
    """Make stored steps again from stored batches and compare figures and weights; exits with 1 if they differ."""
    from millrace.flows.tools.replay import replay_run

    result = guarded(lambda: replay_run(root, run, first, last))
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
    at: Annotated[int, typer.Option(help="Iterations of the run that the branch begins with.")],
    root: RootOption = "runs",
) -> None:
    """Start a new run from any checkpointed iteration of another."""
    from millrace.flows.tools.branch import branch_run

    console.print(guarded(lambda: branch_run(root, run, new, at)), soft_wrap=True)


def stop(
    run: Annotated[str, typer.Argument(help="Run whose left-over actors are to end.")],
    root: RootOption = "runs",
) -> None:
    """End what a killed driver left behind of a run: trainer ranks and engines. Files stay."""
    from millrace.flows.tools.stop import stop_run

    console.print(guarded(lambda: stop_run(root, run)))
