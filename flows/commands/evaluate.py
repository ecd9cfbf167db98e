"""The command that evaluates stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.flows.commands.tables import CsvOption, JsonOption, print_listing
from millrace.flows.commands.terminal import (
    Overrides,
    RootOption,
    guarded,
    lines_before_prefect,
    named_first,
    print_lines,
)


def evaluate(
    model: Annotated[str, typer.Argument(help="A run under --root, or a folder with a Hugging Face model.")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with the held-out sets, for a folder. For a run it replaces the run's own configuration."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Only this held-out set; may be repeated.")
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", help="After this many iterations of the run; the newest by default.")
    ] = None,
    against: Annotated[
        int | None,
        typer.Option(
            help="Answer them with the weights after this many iterations too, and print the difference, paired by prompt."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the rows, a Parquet file a set.")] = None,
    root: RootOption = "runs",
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Answer held-out sets with stored weights; print reward, interval, pass@k and the majority."""
    from millrace.connectors.storage.run_folder import RunFolder
    from millrace.core.errors import ConfigError
    from millrace.flows.tools.evaluate import (
        Evaluated,
        evaluate_folder,
        evaluate_run,
        figures_of,
        own_configuration,
    )

    def run() -> list[Evaluated]:
        if Path(model).name == model and RunFolder(root, model).store.exists("run.json"):
            if overrides and config is None:
                raise ConfigError(
                    "a run is evaluated as it was configured",
                    where=f"eval {model}",
                    remedy="leave out overrides, give --config FILE with your configuration, or name an export's folder",
                )
            own = own_configuration(config, overrides or [])
            asked = [at] if against is None else [against, at]
            return [
                evaluate_run(
                    root, model, done, sets or [], out, own, named_first(model if not number else "")
                )
                for number, done in enumerate(asked)
            ]
        if against is not None:
            raise ConfigError(
                "a folder has one state of the weights",
                where="--against",
                remedy="leave it out, or name a run",
            )
        if config is None and (Path(model) / "config.json").exists():
            raise ConfigError(
                "no held-out sets are given",
                where=f"eval {model}",
                remedy="give --config FILE with evaluation.sets",
            )
        return [evaluate_folder(Path(model), config or Path("run.yaml"), overrides or [], sets or [], out)]

    with lines_before_prefect():
        found = guarded(run)
    if not (json or csv):
        print_lines([f"{model}, {found[-1].done} iterations trained"])
    print_listing(figures_of(found), json, csv)
