"""`millrace discard`: give up an iteration that is not committed. Its groups are drawn again.

The ledger counts groups of committed iterations only, so an iteration that is moved away has drawn none. Its files are kept
aside, with the reason.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from millrace.connectors.storage.files import move_file
from millrace.connectors.storage.iteration_files import way_out
from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.run_folder import COMPLETE, RunFolder
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import StorageError, of_run
from millrace.flows.commands.stop import end_actors
from millrace.flows.commands.terminal import RootOption, console, guarded
from millrace.flows.driver.stored_run import run_record

SET_ASIDE = "discarded"
REASON = "reason.json"


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
    number = iteration if first is None else first
    if number is None or number < 1 or (iteration is None) == (first is None):
        raise typer.BadParameter("give --iteration or --from, with a number from 1 on")
    console.print(
        guarded(lambda: discard_iterations(root, run, number - 1, later=first is not None, reason=reason)),
        soft_wrap=True,
    )


def discard_iterations(root: str, run: str, index: int, *, later: bool = False, reason: str = "") -> str:
    """Move iteration `index` aside, and with `later` all later ones. Returns a line that names its new place.

    Raises StorageError if it is committed or was not started, or if others follow it; LeaseHeldError while a driver lives.
    """
    run_record(root, run)  # raises unless there is such a run
    folder = RunFolder(root, run)
    _check_may_go(folder, index, later)
    lease = Lease.take(folder.store)
    try:
        # ranks and engines may hold weights that the iteration made
        end_actors(root, run)
        moved = f"{SET_ASIDE}/{iteration_number(index):06d}-{time.time_ns() // 1_000_000}"
        discarded = {
            "iteration": iteration_number(index),
            "at": datetime.now(UTC).isoformat(),
            "reason": reason,
            "folder": moved,
        }
        folder.store.write_sealed(f"{moved}/{REASON}", discarded)
        groups = _groups(folder, index)
        for path in list(_paths(folder, index)):
            move_file(folder.store, path, f"{moved}/{path}")
        record = run_record(root, run)
        record["discarded"] = [*record.get("discarded", []), discarded]
        record.pop("completed", None)
        folder.store.write_sealed("run.json", record)
    finally:
        lease.release()
    return f"iteration {iteration_number(index)} of {run} is given up: {groups} groups are in the ledger again, and its files are in {folder.store.url_of(moved)}; go on with the same command"


def _check_may_go(folder: RunFolder, index: int, later: bool) -> None:
    committed = folder.first_open_iteration(strict=False)
    if index < committed or any(folder.manifest(other) for other in _begun(folder) if other > index):
        what = "" if index < committed else "an iteration after "
        newest = max((done for done in folder.complete_checkpoints() if done <= index), default=0)
        raise StorageError(
            f"{what}iteration {iteration_number(index)} is committed, and a committed iteration is final",
            where=folder.store.url,
            remedy=f"continue without it in a branch: `millrace branch {of_run(folder.name, folder.store.url, 'NEW', f'--at {newest}')}`",
        )
    if not folder.iteration(index).list():
        raise StorageError(
            f"iteration {iteration_number(index)} was not begun",
            where=folder.store.url,
            remedy=f"the open iteration is {iteration_number(committed)}",
        )
    if not later and any(other > index for other in _begun(folder)):
        raise StorageError(
            f"iterations after {iteration_number(index)} were begun",
            where=folder.store.url,
            remedy=way_out(folder, index).replace("the iteration", "them too"),
        )


def _begun(folder: RunFolder) -> list[int]:
    return [
        int(name)
        for name in folder.store.folders("iterations")
        if name.isdecimal() and folder.iteration(int(name)).list()
    ]


def _groups(folder: RunFolder, index: int) -> int:
    """Number of groups that the iteration drew, 0 if that cannot be read."""
    try:
        prompts = folder.iteration(index).read_table("prompts.parquet", "prompts", columns=["group_id"])
        return int(prompts.num_rows)
    except StorageError:
        return 0


def _paths(folder: RunFolder, index: int) -> Iterator[str]:
    """Paths to move, in an order that may be interrupted: first checkpoints of later weights, then records, then the rest.

    A checkpoint without its marker does not count, and a task without its record runs again.
    """
    store = folder.store
    saved = [path for path in store.list("checkpoints") if _number(path.split("/")[1]) > index]
    yield from sorted(saved, key=lambda path: not path.endswith(f"/{COMPLETE}"))
    yield from (path for path in store.list("exports") if _number(path.split("/")[1]) > index)
    least = index + 1 if index else 0  # the first iteration also evaluates before it trains
    yield from (path for path in store.list("eval") if _number(Path(path).stem) >= least)
    begun = [path for path in store.list("iterations") if _number(path.split("/")[1]) >= index]
    yield from sorted(begun, key=lambda path: "/results/" not in path)


def _number(name: str) -> int:
    """The number that names a folder or file; -1 for another name."""
    return int(name) if name.isdecimal() else -1
