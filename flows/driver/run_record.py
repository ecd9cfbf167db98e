"""run.json: what a run is, every attempt at it, and links to its pages.

Owns the file, and decides what may differ when a run is started again under its name.
"""

import asyncio
import logging
import platform
import subprocess
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from millrace.connectors.prefect.flow_run_state import settle_dead, settle_late_tasks
from millrace.connectors.storage.run_folder import first_undrawn_iteration
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.config.parts.redaction import shown_text
from millrace.core.config.reading.load import VERSION, readable
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.rows.prompts import SourceFingerprint, source_changes
from millrace.core.errors import (
    BudgetError,
    DataError,
    MillraceError,
    MissingFileError,
    StalledError,
    first_error,
)
from millrace.flows.driver.fingerprints import fingerprints
from millrace.flows.driver.rollouts_source import begun_with
from millrace.flows.driver.same_run import check_branch, check_resume, hashed_in, stored_config
from millrace.flows.driver.start_changes import branched_fields, check_same_model, start_changes
from millrace.flows.driver.stored_run import ahead_of, check_no_run, spans_of
from millrace.tasks.kill_points import kill_point
from millrace.tasks.reporting import report
from millrace.tasks.runtime.runtime import Runtime

log = logging.getLogger(__name__)

STARTS = 10  # starts of one flow run without a complete iteration
ERROR_CHARACTERS = 2000  # characters kept of an error that ended an attempt
VERSIONED = (
    "millrace",
    "torch",
    "megatron-core",
    "prefect",
    "ray",
    "mlflow",
    "transformers",
    "sglang",
    "sglang-router",
)


def run_id(store: Store) -> str:
    """The run's id from run.json, a new one for a run that has none yet."""
    try:
        record = store.read_sealed("run.json")
    except MissingFileError:
        record = {}
    return str(record.get("id") or uuid.uuid4().hex)


def is_complete(store: Store) -> bool:
    """Whether run.json marks the run complete, or does not exist."""
    try:
        return bool(store.read_sealed("run.json").get("completed"))
    except MissingFileError:
        return True


async def open_run_record(runtime: Runtime, attempt: int, asked: RunConfig, commit: str | None) -> None:
    """Write or extend run.json, and open the MLflow run that belongs to it.

    asked: the configuration as it was given, in which the model may be named. commit: of the named model.
    Raises ConfigError if the configuration differs from the run's in a field that would make it another run.
    """
    store = runtime.run_folder.store
    resolved = asked.model_dump(mode="json")
    try:
        record = readable(await asyncio.to_thread(store.read_sealed, "run.json"))
    except MissingFileError:
        await asyncio.to_thread(check_no_run, store)
        name = runtime.config.run.name
        record = {"name": name, "config": resolved, "mlflow_run_id": None, "attempts": []}
        record |= await asyncio.to_thread(begun_with, asked)
    hashed = hashed_in(record)
    before = stored_config(record["config"] or record["parent"]["config"], record["name"])
    if record["config"] is not None:
        check_resume(before, asked, hashed)
    else:
        check_branch(before, asked, record["parent"], hashed)
    since = await asyncio.to_thread(runtime.run_folder.first_open_iteration)
    check_goes_on(record, str(flow_run.id), since)
    await asyncio.to_thread(_settle_earlier, record["attempts"])
    record["id"] = runtime.run_id
    prints = await asyncio.to_thread(fingerprints, runtime.config)
    branched = branched_fields(record, before, asked)
    check_same_model(runtime.config.run.name, record.get("fingerprints"), prints, branched)
    undrawn = await asyncio.to_thread(first_undrawn_iteration, runtime.run_folder)
    installed = versions()
    record["changes"] = start_changes(record, before, asked, prints, installed, since)
    record["fingerprints"] = prints
    record["config"], record["config_version"] = resolved, VERSION
    record["model_commit"] = commit
    record["data"] = await asyncio.to_thread(check_same_data, record.get("data", []), runtime)
    ahead = ahead_of(record)
    p, then = runtime.config.pipeline, before.pipeline
    # a lowered setting stays lowered, unless this start changes how far ahead the run goes
    if "ahead" not in record or (then.ahead, then.min_ess) != (p.ahead, p.min_ess):
        ahead = ahead.since(undrawn, runtime.config.pipeline.ahead)
    runtime.prompts.use_ahead(ahead)
    record["ahead"] = spans_of(ahead)
    record["mlflow_run_id"] = await report.open_tracking(runtime, record["mlflow_run_id"])
    record["quarantine"] = await asyncio.to_thread(runtime.prompts.dataset.write_quarantine, store)
    record["quarantined"] = runtime.prompts.dataset.quarantined()
    record["answers_end_at"] = runtime.prompts.tokenizer.ends.named
    record["versions"] = installed
    record["code_revision"] = code_revision()
    if record["attempts"] and (stall := record["attempts"][-1].get("stalled")):
        log.warning("the start before ended by a stall: %s: %s", stall["waited_for"], stall["reason"])
    # the run continues: more iterations are wanted
    record.pop("completed", None)
    record["attempts"].append(
        {
            "number": attempt,
            "started": datetime.now(UTC).isoformat(),
            "complete": since,
            "host": platform.node(),
            "flow_run_id": flow_run.id,
            "flow_run_url": flow_run.ui_url,
        }
    )
    await asyncio.to_thread(store.write_sealed, "run.json", record)


def _settle_earlier(
    attempts: list[dict[str, Any]], settle: Callable[[Sequence[str], str], object] = settle_dead
) -> None:
    """Set a final state on Prefect's page for flow runs of earlier attempts: they are dead, as this driver has the lease."""
    ours = (None, str(flow_run.id))
    earlier = [attempt["flow_run_id"] for attempt in attempts if attempt["flow_run_id"] not in ours]
    if earlier:
        settle(earlier, f"Its process was killed. The run goes on as flow run {flow_run.name}.")


def check_goes_on(record: dict[str, Any], flow_run_id: str, complete: int) -> None:
    """Refuse the start of a flow run whose newest starts all ended before an iteration was complete: it would resume forever.

    complete: number of complete iterations.
    """
    newest = record["attempts"][-STARTS:]
    if len(newest) == STARTS and all(
        (attempt["flow_run_id"], attempt.get("complete")) == (flow_run_id, complete) for attempt in newest
    ):
        raise BudgetError(
            f"{STARTS} starts of this flow run ended before iteration {iteration_number(complete)} was complete",
            where=f"run {record['name']}",
            remedy="find the cause in the logs of the flow run, then start the run again as a new flow run, which resumes it",
        )


def _note_floor(record: dict[str, Any], runtime: Runtime) -> None:
    """Record the rounding floor of the model's log-probabilities, if this start has measured it."""
    if runtime.rounding_floor is not None:
        record["logprob_gap_floor"] = runtime.rounding_floor


async def finish_run_record(runtime: Runtime) -> None:
    """Mark the run complete in its trackers, and last in run.json: a start that finds no mark there repeats all of it."""
    store, last = runtime.run_folder.store, runtime.config.run.iterations
    await kill_point(last, "finish", "before")
    await report.close_tracking(runtime)
    await kill_point(last, "finish", "in")
    record = await asyncio.to_thread(store.read_sealed, "run.json")
    _note_floor(record, runtime)
    record["completed"] = datetime.now(UTC).isoformat()
    record["attempts"][-1]["recovery"] = runtime.recovery.seconds  # seconds until it worked, by phase
    await asyncio.to_thread(store.write_sealed, "run.json", record)
    await kill_point(last, "finish", "after")
    await asyncio.to_thread(_settle_earlier, record["attempts"], settle_late_tasks)


async def record_end(runtime: Runtime, attempt: int, by: str | None, error: BaseException) -> None:
    """Note in run.json how this attempt ended before the run was complete.

    attempt: its number. by: the signal or the pause that ended it; None: the error.
    """
    store = runtime.run_folder.store
    try:
        record = await asyncio.to_thread(store.read_sealed, "run.json")
    except MissingFileError:
        # the attempt ended before there was a run
        return
    if not record["attempts"] or record["attempts"][-1]["number"] != attempt:
        return
    _note_floor(record, runtime)
    ended: dict[str, str] = {"at": datetime.now(UTC).isoformat()}
    if by is None:
        cause = first_error(error)
        said = str(cause) if isinstance(cause, MillraceError) else f"{cause}".partition("\n")[0]
        ended["error"] = shown_text(f"{type(cause).__name__}: {said}")[:ERROR_CHARACTERS]
    else:
        ended["by"] = by
    record["attempts"][-1]["ended"] = ended
    await asyncio.to_thread(store.write_sealed, "run.json", record)


async def record_verdict(runtime: Runtime, error: StalledError) -> None:
    """Note in run.json the stall that ended this attempt."""
    store = runtime.run_folder.store
    record = await asyncio.to_thread(store.read_sealed, "run.json")
    record["attempts"][-1]["stalled"] = {
        "error": type(error).__name__,
        "waited_for": error.where,
        "reason": error.reason,
        "at": datetime.now(UTC).isoformat(),
    }
    await asyncio.to_thread(store.write_sealed, "run.json", record)


def check_same_data(before: list[dict[str, Any]], runtime: Runtime) -> list[dict[str, Any]]:
    """The spans of iterations that drew from the same data; the last span has the current data.

    Refuses sources that changed under the run, naming the changes, unless data.allow_changes is set: then the ledger starts
    again at the first open iteration. A file that was only moved is the same data.
    """
    since = 0
    stored = before[-1]["sources"] if before else {}
    recorded = {name: SourceFingerprint.model_validate(value) for name, value in stored.items()}
    runtime.prompts.read_whole(name for name, source in recorded.items() if not source.streamed)
    now = runtime.prompts.dataset.fingerprints()
    if before:
        changes = source_changes(recorded, now)
        if not changes:
            runtime.prompts.use_data_since(before[-1]["since"])
            return before
        if not runtime.config.data.allow_changes:
            raise DataError(
                "its data changed:\n  " + "\n  ".join(changes),
                where=f"run {runtime.config.run.name}",
                remedy="Put the files back, start under another run.name, or set data.allow_changes=true to continue with them.",
            )
        since = first_undrawn_iteration(runtime.run_folder)
        log.warning(
            "the data changed; from iteration %d on prompts are drawn from its new content: %s",
            iteration_number(since),
            "; ".join(changes),
        )
    runtime.prompts.use_data_since(since)
    return [*before, {"since": since, "sources": {name: value.model_dump() for name, value in now.items()}}]


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide numbers."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_revision() -> str | None:
    """Git revision of the checkout that runs, `+changes` if it is not clean; None when installed as a wheel."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    git = ["git", "-C", str(folder)]
    revision = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if revision.returncode:
        return None
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    )
    return revision.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
