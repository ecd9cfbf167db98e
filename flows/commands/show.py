"""`millrace show`: one run, its folder and pages, and a row an iteration. Starts nothing and changes no file."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from millrace.connectors.storage.manifests.summaries import Committed
from millrace.connectors.storage.run_folder import TRACES, RunFolder
from millrace.core.config.pipeline import Pipeline
from millrace.core.errors import ConfigError
from millrace.core.logprob_gap import LogprobGuard
from millrace.flows.commands.listing import (
    NEWEST,
    CsvOption,
    JsonOption,
    Listing,
    NewestOption,
    print_listing,
)
from millrace.flows.commands.runs import state_of
from millrace.flows.commands.terminal import RootOption, guarded
from millrace.flows.driver.stored_run import evaluations, figures_of, run_record, settings_of

COLUMNS = {
    "reward": "reward/mean",
    "length": "rollout/response_length_mean",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "logprob_gap": "train/logprob_gap_mean",
    "tokens/s": "rollout/tokens_per_second",
}
SPEED = {  # columns of runs that measured them
    "scored/s": "reward/tokens_per_second",
    "trained/s": "train/tokens_per_second",
    "MFU": "train/mfu",
    "GPU busy": "gpu/busy_share",
}
FLOOR = "train/logprob_gap_floor"


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
    print_listing(guarded(lambda: run_listing(root, run, columns or ())), json, csv, newest)


def run_listing(root: str, run: str, columns: Sequence[str] = ()) -> Listing:
    """One run: its record, and a row per iteration with a column per evaluation set.

    Iteration 0 is the model before training, if it was evaluated. columns: names of metrics, or shell patterns, to show instead
    of the usual ones. Raises ConfigError for a name or pattern without a metric.
    """
    folder, record = RunFolder(root, run), run_record(root, run)
    if columns:
        return _chosen_figures(folder, record, columns)
    committed = list(folder.committed())
    metrics_of = {item.iteration + 1: item.metrics for item in committed}
    measured = {name for item in committed for name in item.metrics}
    shown = COLUMNS | {title: name for title, name in SPEED.items() if name in measured}
    evaluated = evaluations(folder, committed)
    sets = sorted({name for values in evaluated.values() for name in values})
    rows: list[Sequence[Any]] = []
    for number in range(0 if 0 in evaluated else 1, len(metrics_of) + 1):
        metrics = metrics_of.get(number, {})
        values = evaluated.get(number, {})
        figures = [_measured(name, metrics) for name in shown.values()]
        rows.append([number, *figures, *(values.get(name) for name in sets)])
    columns = ["iteration", *shown, *(f"eval/{name}" for name in sets)]
    return Listing(columns, rows, _facts(folder, record) | _peak(committed))


def _chosen_figures(folder: RunFolder, record: dict[str, Any], patterns: Sequence[str]) -> Listing:
    found = figures_of(folder)
    known = sorted({name for _, figures in found for name in figures})
    names = []
    for pattern in patterns:
        matched = [name for name in known if fnmatchcase(name, pattern)]
        if not matched:
            groups = ", ".join(sorted({f"{name.partition('/')[0]}/*" for name in known}))
            raise ConfigError(
                "no figure of the run has such a name",
                where=f"--columns {pattern}",
                remedy=f"there are: {groups}" if groups else "the run has no committed iteration yet",
            )
        names += [name for name in matched if name not in names]
    rows: list[Sequence[Any]] = [
        (number, *(figures.get(name) for name in names)) for number, figures in found
    ]
    return Listing(["iteration", *names], rows, _facts(folder, record))


def _measured(name: str, metrics: Mapping[str, float]) -> float | str | None:
    """A metric, or a note that it was not measured: differences of log-probabilities, if all tokens are of older weights."""
    if name == "train/logprob_gap_mean" and metrics.get("train/logprob_gap_share") == 0:
        return "not measured"
    return metrics.get(name)


def _facts(folder: RunFolder, record: dict[str, Any]) -> dict[str, str]:
    settings = settings_of(record)
    done, of = folder.first_open_iteration(strict=False), settings["run"]["iterations"]
    facts = {
        "run": folder.name,
        "state": f"{state_of(folder.store, record)}; {done} of {of} iterations",
        "folder": folder.store.url,
    }
    if record["attempts"] and (error := record["attempts"][-1].get("ended", {}).get("error")):
        facts["error"] = error
    if preset := settings["algorithm"].get("preset"):
        facts["preset"] = preset
    if text := _pipeline(settings.get("pipeline", {})):
        facts["pipeline"] = text
    facts["checkpoints"] = _after(str(number) for number in folder.complete_checkpoints())
    facts["exports"] = _after(str(int(name)) for name in folder.store.folders("exports"))
    if traced := [str(int(name) + 1) for name in folder.store.folders(TRACES)]:
        facts["traces"] = f"of iterations {', '.join(traced)}"
    if "parent" in record:
        facts["branch of"] = f"{record['parent']['run']} after {record['parent']['at']} iterations"
    model = settings["model"]["path"]
    commit = record.get("model_commit")
    facts["model"] = f"{model} at commit {commit}" if commit else model
    if floor := _rounding(folder, record):
        facts["rounding"] = floor
    if revision := record.get("code_revision"):
        facts["code"] = revision
    facts["versions"] = " ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    unusable = {name: count for name, count in record.get("quarantined", {}).items() if count}
    if unusable:
        counts = ", ".join(f"{count} rows of {name}" for name, count in unusable.items())
        facts["unusable"] = f"{counts}; see quarantine.parquet"
    facts["attempts"] = str(len(record["attempts"]))
    if tracked := record["mlflow_run_id"]:
        facts["MLflow run"] = tracked
    for attempt in record["attempts"][-1:]:
        facts["Prefect"] = str(attempt["flow_run_url"])
        if stall := attempt.get("stalled"):
            facts["ended by a stall"] = f"{stall['waited_for']}: {stall['reason']}"
    return facts


def _peak(committed: Sequence[Committed]) -> dict[str, str]:
    """Why no MFU is shown, if the run trained and no step has one."""
    trained = [item for item in committed if "train/grad_norm" in item.metrics]
    if not trained or any("train/mfu" in item.metrics for item in trained):
        return {}
    return {"MFU": "not computed: on a CPU, and on a GPU that is not listed, the peak is not known"}


def _pipeline(settings: Mapping[str, Any]) -> str:
    """Non-default pipeline settings: how far the run goes ahead of the trainer, and how old tokens may be. Empty without any."""
    usual = Pipeline().model_dump(mode="json")
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value != usual.get(name))


def _rounding(folder: RunFolder, record: Mapping[str, Any]) -> str | None:
    """The rounding floor of log-probabilities, from the newest iteration that measured it, else from the last start."""
    measured = [item.metrics[FLOOR] for item in folder.committed() if FLOOR in item.metrics]
    floor = measured[-1] if measured else record.get("logprob_gap_floor")
    if floor is None:
        return None
    return f"{floor:.3g} nats a token; engine and trainer may differ by {LogprobGuard().allows(floor):.3g}"


def _after(iterations: Iterable[str]) -> str:
    named = ", ".join(iterations)
    return f"after {named}" if named else "none"
