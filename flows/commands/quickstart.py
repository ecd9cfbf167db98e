"""`millrace quickstart`: a tiny model, trained in minutes."""

from typing import Annotated

import typer

from millrace.flows.commands.terminal import RootOption, console
from millrace.flows.commands.train import interruptible


def quickstart(
    root: RootOption = "runs",
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 0,
    iterations: Annotated[
        int | None, typer.Option(help="RL iterations; more iterations take longer.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; quickstart-SEED when not given.")] = None,
) -> None:
    """Build a tiny model, warm it up, train it by GRPO on arithmetic, and show what it has learnt."""
    from millrace.flows.quickstart import run_quickstart

    interruptible(
        lambda: run_quickstart(root=root, seed=seed, iterations=iterations, name=name, console=console)
    )
