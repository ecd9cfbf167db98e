"""What is stored of a run: its record in run.json, and its figures by iteration. Reads files alone, and starts nothing."""

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, cast

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.manifests.summaries import Committed
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.accounts.staleness import Ahead
from millrace.core.config.reading.load import readable
from millrace.core.contracts.task_records import EvaluateRecord, HeldOutRecord
from millrace.core.errors import MissingFileError, StorageError
from millrace.core.evaluation import evaluation_metrics, held_out_metrics

EVALUATION = re.compile(r"^eval/(?P<set>.+)/reward_mean$|^eval/(?P<loss>.+/(loss|perplexity))$")


def run_record(root: str, run: str) -> Any:
    """The run.json of a run, in today's shape. Raises StorageError if there is no such run, or its file is corrupt."""
    store = RunFolder(root, run).store
    try:
        return readable(store.read_sealed("run.json"))
    except MissingFileError as error:
        check_no_run(store)
        raise StorageError(
            "no such run", where=store.url, remedy=f"`millrace runs --root {shlex.quote(root)}` lists them"
        ) from error


def check_no_run(store: Store) -> None:
    """Raise MissingFileError if a folder without a run.json holds iterations of a run."""
    if store.list("iterations"):
        raise MissingFileError(
            "no such file, and the run's configuration is gone with it",
            where=store.url_of("run.json"),
            remedy="restore it from a copy, or start a new run under another run.name",
        )


def settings_of(record: dict[str, Any]) -> Any:
    """The configuration of a run. A branch that was not started yet has its parent's."""
    return record["config"] or record["parent"]["config"]


def ahead_of(record: dict[str, Any]) -> Ahead:
    """How many iterations may be open ahead, by run.json."""
    return Ahead(tuple((span["since"], span["iterations"]) for span in record.get("ahead", ())))


def spans_of(ahead: Ahead) -> list[dict[str, int]]:
    """The setting in the form of run.json."""
    return [{"since": since, "iterations": iterations} for since, iterations in ahead.spans]


def figures_of(folder: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """All metrics by iteration, in order; the model before training has iteration 0."""
    found: dict[int, dict[str, float]] = {}
    files = IterationFiles(folder, 0)
    if evaluated := files.record("evaluate_before"):
        found[0] = evaluation_metrics(cast(EvaluateRecord, evaluated))
    if held_out := files.record("held_out_loss_before"):
        found.setdefault(0, {}).update(held_out_metrics(cast(HeldOutRecord, held_out)))
    for item in folder.committed():
        found.setdefault(item.iteration + 1, {}).update(item.metrics)
        # metrics of the weights that the iteration started with
        if item.evaluated:
            found.setdefault(item.evaluated["done"], {}).update(item.evaluated["metrics"])
    return sorted(found.items())


def evaluations(folder: RunFolder, committed: Iterable[Committed]) -> dict[int, dict[str, float]]:
    """Mean reward by iterations trained, and by set; of supervised runs loss and perplexity. 0: before training."""
    files = IterationFiles(folder, 0)
    found: dict[int, dict[str, float]] = {0: {}}
    for name, held_out in (files.record("evaluate_before") or {"sets": {}})["sets"].items():
        if held_out["reward_mean"] is not None:
            found[0][name] = held_out["reward_mean"]
    for name, held_out in (files.record("held_out_loss_before") or {"sets": {}})["sets"].items():
        found[0] |= {f"{name}/{figure}": held_out[figure] for figure in ("loss", "perplexity")}
    for item in committed:
        found.setdefault(item.iteration + 1, {}).update(_evaluated(item.metrics))
        # metrics of the weights that the iteration started with
        if item.evaluated:
            found.setdefault(item.evaluated["done"], {}).update(_evaluated(item.evaluated["metrics"]))
    return {done: values for done, values in found.items() if values}


def _evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    """The listed metrics of evaluations, by set, or by set and metric."""
    return {
        match["set"] or match["loss"]: value
        for name, value in metrics.items()
        if (match := EVALUATION.match(name))
    }
