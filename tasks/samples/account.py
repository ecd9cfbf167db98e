"""The account of an iteration, read from what it stored."""

from __future__ import annotations

from millrace.connectors.storage.iteration_files import IterationFiles, way_out
from millrace.connectors.storage.parts import read_parts
from millrace.core.account.account import Account
from millrace.core.account.count import COLUMNS, account_of
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import StorageError


def stored_account(files: IterationFiles) -> Account:
    """Of an iteration whose batch is fixed: from the files that its manifest or its records name, each checked."""
    return account_of(
        files.read_parts("rollouts", COLUMNS["rollouts"]),
        files.read_parts("turns", COLUMNS["turns"]),
        files.read_table("verdicts", COLUMNS["verdicts"]),
        files.read_table("batch", COLUMNS["batch"]),
    )


def open_account(files: IterationFiles) -> Account:
    """Of an iteration that is under way: from the parts that are there."""
    rollouts, turns = (
        read_parts(files.folder, kind, kind, columns=COLUMNS[kind]) for kind in ("rollouts", "turns")
    )
    return account_of(rollouts, turns)


def check_closes(account: Account, files: IterationFiles, run: str) -> None:
    """Raise StorageError if the account of an iteration does not close."""
    problems = account.problems()
    if problems:
        raise StorageError(
            f"the account of iteration {iteration_number(files.index)} does not close: {'; '.join(problems)}",
            where=files.folder.url,
            remedy=f"its files disagree: `millrace verify {run}` names them; restore them from a copy, or "
            f"{way_out(run, files.index)}",
        )
