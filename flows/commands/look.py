"""Commands that show stored runs and change nothing: runs, show, ledger, sql, plan."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.flows.commands.tables import NEWEST, CsvOption, JsonOption, NewestOption, print_listing
from millrace.flows.commands.terminal import (
    ConfigArgument,
    Overrides,
    RootOption,
    errors,
    guarded,
    print_lines,
)


def runs(root: RootOption = "runs", json: JsonOption = False, csv: CsvOption = False) -> None:
    """List the runs under a storage root."""
    from millrace.flows.tools.browse import runs_listing

    print_listing(guarded(lambda: runs_listing(root)), json, csv)


def show(
    run: str,
    root: RootOption = "runs",
    columns: Annotated[
        list[str] | None,
        typer.Option(
            help="Metrics to show instead of the usual ones, or patterns: 'time/*'. May be repeated."
        ),
    ] = None,
    newest: NewestOption = NEWEST,
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Show a run: its folder and pages, and its iterations with the evaluations by set; 0 is before training."""
    from millrace.flows.tools.browse import run_listing

    print_listing(guarded(lambda: run_listing(root, run, columns or ())), json, csv, newest)


def ledger(
    run: str,
    at: Annotated[
        int | None, typer.Option(help="Show only this iteration, by cause and weight version.")
    ] = None,
    root: RootOption = "runs",
    newest: NewestOption = NEWEST,
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Account for every token that a run generated; exits with 1 if an iteration's account does not close."""
    from millrace.flows.tools.ledger import accounts_of_run

    accounts = guarded(lambda: accounts_of_run(root, run, at))
    print_listing(accounts.listing, json, csv, newest)
    for problem in accounts.problems:
        errors.print(problem, soft_wrap=True)
    raise SystemExit(1 if accounts.problems else 0)


def sql(
    run: str,
    query: str,
    root: RootOption = "runs",
    allow_files: Annotated[
        bool,
        typer.Option(
            "--allow-files",
            help="Let the query read and write other files, load extensions and open network addresses, with your rights.",
        ),
    ] = False,
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Ask DuckDB about a run: views prompts, samples, turns, rewards, verdicts, batches, steps, evaluations, metrics."""
    from millrace.flows.tools.sql import answer

    print_listing(guarded(lambda: answer(root, run, query, allow_files=allow_files)), json, csv)


def plan(
    config: ConfigArgument,
    run: Annotated[str, typer.Option("--from", help="Run whose recorded iterations are replayed.")],
    overrides: Overrides = None,
    root: RootOption = "runs",
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Predict an iteration's time on shared and on split GPUs, synchronous and asynchronous, from a run's recorded times."""
    from millrace.core.config.reading.load import load_config
    from millrace.flows.tools.plan import plan_from

    made = guarded(lambda: plan_from(load_config(str(config), overrides or []), root, run))
    print_listing(made.listing, json, csv)
    if not (json or csv):
        print_lines(made.verdicts)
