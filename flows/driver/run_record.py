"""run.json: what a run is, every attempt at it, and links to its pages.

Owns the file, and decides what may differ when a run is started again under its name.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from millrace.core.config import RunConfig
from millrace.core.config.reading.stored import VERSION, lifted
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.prompts import SourceFingerprint, source_changes
from millrace.core.errors import ConfigError, DataError, MissingFileError
from millrace.tasks import report
from millrace.tasks.runtime.runtime import Runtime

log = logging.getLogger(__name__)

FIXED = (
    "run.seed",
    "model.path",
    "data.sources",
    "data.shuffle",
    "data.max_prompt_tokens",
    "rollout",
    "filter",
    "algorithm",
    "trainer.global_batch",
    "trainer.optimizer",
)
FIXED_IN_A_BRANCH = (
    "run.seed",
    "model.path",
    "data.sources",
    "data.shuffle",
    "data.max_prompt_tokens",
    "rollout.prompts",
    "rollout.samples_per_prompt",
    "trainer.global_batch",
)
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


async def open_run_record(runtime: Runtime, attempt: int) -> None:
    """Write or extend run.json, and open the MLflow run that belongs to it.

    Raises ConfigError if the configuration differs from the run's in a field that would make it another run.
    """
    store = runtime.run_folder.store
    resolved = runtime.config.model_dump(mode="json")
    try:
        record = lifted(await asyncio.to_thread(store.read_json, "run.json"))
    except MissingFileError:
        name = runtime.config.run.name
        record = {"name": name, "config": resolved, "seed_name": "", "mlflow_run_id": None, "attempts": []}
    if record["config"] is not None:
        check_same_run(record["config"], resolved, runtime.config, FIXED)
    else:
        check_same_run(record["parent"]["config"], resolved, runtime.config, FIXED_IN_A_BRANCH)
    record["config"], record["config_version"] = resolved, VERSION
    runtime.prompts.use_seed_name(record["seed_name"])
    record["data"] = await asyncio.to_thread(check_same_data, record.get("data", []), runtime)
    await asyncio.to_thread(runtime.prompts.dataset.write_quarantine, store)
    record["quarantined"] = runtime.prompts.dataset.quarantined()
    record["mlflow_run_id"] = await report.open_tracking(runtime, record["mlflow_run_id"])
    record["versions"] = versions()
    record["code_revision"] = code_revision()
    record["attempts"].append(
        {
            "number": attempt,
            "started": datetime.now(UTC).isoformat(),
            "host": platform.node(),
            "flow_run_id": flow_run.id,
            "flow_run_url": flow_run.ui_url,
        }
    )
    await asyncio.to_thread(store.write_json, "run.json", record)


async def finish_run_record(runtime: Runtime) -> None:
    """Mark the run complete in run.json and in MLflow."""
    store = runtime.run_folder.store
    record = await asyncio.to_thread(store.read_json, "run.json")
    record["completed"] = datetime.now(UTC).isoformat()
    record["attempts"][-1]["recovery"] = runtime.recovery.seconds  # seconds until it worked, by phase
    await asyncio.to_thread(store.write_json, "run.json", record)
    await report.close_tracking(runtime)


def check_same_run(
    before: dict[str, Any], now: dict[str, Any], config: RunConfig, fixed: Sequence[str]
) -> None:
    """Refuse to go on with a configuration that would make it another run, naming every field that differs."""
    before, now = _without_paths(before), _without_paths(now)
    differing = [path for path in fixed if _get(before, path) != _get(now, path)]
    if differing:
        lines = [
            f"  {path}: was {_get(before, path)!r:.200}, now {_get(now, path)!r:.200}" for path in differing
        ]
        raise ConfigError(
            "exists with another configuration:\n" + "\n".join(lines),
            where=f"run {config.run.name}",
            remedy="Give the new run another run.name, or put these fields back.",
        )


def check_same_data(before: list[dict[str, Any]], runtime: Runtime) -> list[dict[str, Any]]:
    """The spans of iterations that drew from the same data; the last span is what the sources hold now.

    Refuses sources that changed under the run, naming the changes, unless data.allow_changes is set: then the ledger starts
    again at the first open iteration. A file that was only moved is the same data.
    """
    now = runtime.prompts.dataset.fingerprints()
    since = 0
    if before:
        recorded = {
            name: SourceFingerprint.model_validate(value) for name, value in before[-1]["sources"].items()
        }
        changes = source_changes(recorded, now)
        if not changes:
            runtime.prompts.use_data_since(before[-1]["since"])
            return before
        if not runtime.config.data.allow_changes:
            raise DataError(
                "its data changed:\n  " + "\n  ".join(changes),
                where=f"run {runtime.config.run.name}",
                remedy="Put the files back, start under another run.name, or set data.allow_changes=true to go on with them.",
            )
        since = runtime.run_folder.first_open_iteration()
        log.warning(
            "the data changed; from iteration %d on prompts are drawn from what it holds now: %s",
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


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without where its sources lie: what they hold is compared by fingerprint."""
    sources = [{**source, "path": None} for source in config["data"]["sources"]]
    return {**config, "data": {**config["data"], "sources": sources}}


def _get(values: dict[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
