"""The command that evaluates stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from millrace.flows.cli.terminal import Overrides, RootOption, console, guarded, lines_before_prefect


def evaluate(
    model: Annotated[str, typer.Argument(help="A run under --root, or a folder with a Hugging Face model.")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the held-out sets, for a folder. A run has its own.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Only this held-out set; may be repeated.")
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", help="After this many iterations of the run; the newest by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the rows, a Parquet file a set.")] = None,
    root: RootOption = "runs",
) -> None:
    """Answer held-out sets with stored weights; print reward, interval, pass@k and the majority."""
    from millrace.connectors.storage.run_folder import RunFolder
    from millrace.core.errors import ConfigError
    from millrace.flows.tools.evaluate import Evaluated, evaluate_folder, evaluate_run

    def run() -> Evaluated:
        if Path(model).name == model and RunFolder(root, model).store.exists("run.json"):
            if config or overrides:
                raise ConfigError(
                    "a run is evaluated as it was configured",
                    where=f"eval {model}",
                    remedy="leave out --config and overrides, or name an export's folder in its place",
                )
            return evaluate_run(root, model, at, sets or [], out)
        if config is None and (Path(model) / "config.json").exists():
            raise ConfigError(
                "which sets are to be answered, and how, is not said",
                where=f"eval {model}",
                remedy="give --config FILE with evaluation.sets",
            )
        return evaluate_folder(Path(model), config or Path("run.yaml"), overrides or [], sets or [], out)

    with lines_before_prefect():
        found = guarded(run)
    table = Table("set", "samples", "reward", "± 95 %", "majority", "pass@k", "truncated", "not scored")
    for name, figures in found.sets.items():
        parts = {name: figures, **{f"{name}/{key}": part for key, part in figures.get("subsets", {}).items()}}
        for shown, part in parts.items():
            passes = ", ".join(f"{k}: {value:.3f}" for k, value in part.get("pass_at", {}).items())
            table.add_row(
                shown,
                str(part["samples"]),
                _figure(part["reward_mean"]),
                _figure(part.get("interval")),
                _figure(part.get("majority")),
                passes,
                _share(part.get("truncated_share")),
                str(part.get("not_scored", "")),
            )
    console.print(f"{model}, {found.done} iterations trained", table)


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else ""


def _share(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else ""
