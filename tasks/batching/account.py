"""The account of an iteration, read from what it stored."""

from __future__ import annotations

import pyarrow as pa

from millrace.connectors.storage.iteration_files import IterationFiles, way_out
from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.account import Account
from millrace.core.accounts.token_counts import COLUMNS, account_of
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import StorageError, of_run


def carried_to(files: IterationFiles) -> pa.Table | None:
    """Generated samples that the previous iteration deferred to this one; None without any."""
    return files.before.read_deferred(COLUMNS["rollouts"]) if files.index else None


def stored_account(files: IterationFiles) -> Account:
    """The account of an iteration whose batch is fixed, from the files that its manifest or records name, each checked."""
    return account_of(
        files.read_parts("rollouts", COLUMNS["rollouts"]),
        files.read_parts("turns", COLUMNS["turns"]),
        files.read_table("verdicts", COLUMNS["verdicts"]),
        files.read_table("batch", COLUMNS["batch"]),
        cut=files.read_deferred(COLUMNS["rollouts"]),
        carried=carried_to(files),
    )


def open_account(files: IterationFiles) -> Account:
    """The account of an unfinished iteration, from its parts so far."""
    rollouts, turns = (
        read_parts(files.folder, kind, kind, columns=COLUMNS[kind]) for kind in ("rollouts", "turns")
    )
    cut = files.read_deferred(COLUMNS["rollouts"])
    return account_of(rollouts, turns, cut=cut, carried=carried_to(files))


def check_closes(account: Account, files: IterationFiles, run: RunFolder) -> None:
    """Raise StorageError if the account of an iteration does not close."""
    problems = account.problems()
    if problems:
        raise StorageError(
            f"the account of iteration {iteration_number(files.index)} does not close: {'; '.join(problems)}",
            where=files.folder.url,
            remedy=f"its files disagree: `millrace verify {of_run(run.name, run.store.url)}` names them; restore them from a copy, or "
            f"{way_out(run, files.index)}",
        )
