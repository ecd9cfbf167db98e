"""Commands that show what runs hold, and change nothing: runs, show, sql."""

from __future__ import annotations

from millrace.flows.cli.tables import CsvOption, JsonOption, print_listing
from millrace.flows.cli.terminal import RootOption, guarded


def runs(root: RootOption = "runs", json: JsonOption = False, csv: CsvOption = False) -> None:
    """List the runs under a storage root."""
    from millrace.flows.tools.browse import runs_listing

    print_listing(guarded(lambda: runs_listing(root)), json, csv)


def show(run: str, root: RootOption = "runs", json: JsonOption = False, csv: CsvOption = False) -> None:
    """Show a run: where it is, and its iterations with the evaluations by set; 0 is before training."""
    from millrace.flows.tools.browse import run_listing

    print_listing(guarded(lambda: run_listing(root, run)), json, csv)


def sql(
    run: str, query: str, root: RootOption = "runs", json: JsonOption = False, csv: CsvOption = False
) -> None:
    """Ask DuckDB about a run: views prompts, samples, rewards, verdicts, batches, steps, evaluations."""
    from millrace.flows.tools.sql import answer

    print_listing(guarded(lambda: answer(root, run, query)), json, csv)
