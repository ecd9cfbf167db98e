"""Commands that show what runs hold, and change nothing: runs, show, sql."""

from __future__ import annotations

from millrace.flows.cli.terminal import RootOption, console, guarded


def runs(root: RootOption = "runs") -> None:
    """List the runs under a storage root."""
    from millrace.flows.tools.browse import runs_table

    guarded(lambda: console.print(runs_table(root)))


def show(run: str, root: RootOption = "runs") -> None:
    """Show a run: its iterations, curves and files."""
    from millrace.flows.tools.browse import run_tables

    console.print(*guarded(lambda: run_tables(root, run)), sep="\n")


def sql(run: str, query: str, root: RootOption = "runs") -> None:
    """Ask DuckDB about a run: views prompts, samples, rewards, verdicts, batches, steps, evaluations."""
    from millrace.flows.tools.sql import query_table

    console.print(guarded(lambda: query_table(root, run, query)))
