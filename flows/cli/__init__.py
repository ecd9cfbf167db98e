"""The `millrace` command line. Parses, prints and leaves; what commands do stands in other modules.

Heavy imports happen inside commands, so that a wrong configuration is answered at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from millrace.core.errors import MillraceError, first_error

if TYPE_CHECKING:
    from millrace.core.config import RunConfig

T = TypeVar("T")

app = typer.Typer(
    help="LLM reinforcement-learning post-training as resumable Prefect flows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
errors = Console(stderr=True)

ConfigArgument = Annotated[Path, typer.Argument(help="YAML file with the configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to set: key=value, dotted, as in run.name=a.")
]
RootOption = Annotated[str, typer.Option(help="Storage root that holds the runs.")]


@app.command()
def train(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train a run, or go on with it: the same name resumes."""
    resolved = _load(config, overrides)
    _check(resolved)
    run_training(resolved)


@app.command()
def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Resolve a configuration, touch everything it names, and print the plan."""
    from millrace.core.config.plan import make_plan
    from millrace.flows.preflight.check import render

    resolved = _load(config, overrides)
    _check(resolved)
    console.print(render(make_plan(resolved)))


@app.command()
def quickstart(
    root: RootOption = "runs",
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 0,
    iterations: Annotated[int | None, typer.Option(help="RL iterations; more runs longer.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; quickstart-SEED when not given.")] = None,
) -> None:
    """Build a tiny model, warm it up, train it by GRPO on arithmetic, and show what it learnt."""
    from millrace.flows.quickstart import run_quickstart

    _guarded(lambda: run_quickstart(root=root, seed=seed, iterations=iterations, name=name, console=console))


@app.command()
def runs(root: RootOption = "runs") -> None:
    """List the runs under a storage root."""
    from millrace.flows.tools.browse import runs_table

    _guarded(lambda: console.print(runs_table(root)))


@app.command()
def show(run: str, root: RootOption = "runs") -> None:
    """Show a run: its iterations, curves and files."""
    from millrace.flows.tools.browse import run_tables

    _guarded(lambda: [console.print(part) for part in run_tables(root, run)])


@app.command()
def verify(run: str, root: RootOption = "runs") -> None:
    """Check every hash, the ledger and the lineage of a run again; exits with 1 if anything is wrong."""
    from millrace.flows.tools.verify import verify_run

    found = _guarded(lambda: verify_run(root, run))
    console.print(
        f"{run}: {found.iterations} iterations, {found.files} files, {found.trained_samples} trained samples, "
        f"{found.checkpoints} checkpoints looked at"
        + (f"; iteration {found.open_iteration} is open" if found.open_iteration is not None else "")
    )
    for problem in found.problems:
        console.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)
    console.print("nothing is wrong" if not found.problems else f"{len(found.problems)} problems")
    raise SystemExit(1 if found.problems else 0)


@app.command()
def replay(
    run: str,
    first: Annotated[int, typer.Option("--from", help="First iteration to replay.")],
    last: Annotated[int, typer.Option("--to", help="Iteration to stop before.")],
    root: RootOption = "runs",
) -> None:
    """Make stored steps again from stored batches and compare figures and weights; exits with 1 if they differ."""
    from millrace.flows.tools.replay import replay_run

    found = _guarded(lambda: replay_run(root, run, first, last))
    table = Table("step", "loss stored", "loss again", "grad norm stored", "grad norm again")
    for step in found.steps:
        table.add_row(
            str(step["version"]), *(f"{x:.9g}" for name in ("loss", "grad_norm") for x in step[name])
        )
    console.print(f"from {found.started_from}:", table, found.weights)
    raise SystemExit(0 if found.equal else 1)


@app.command()
def sql(run: str, query: str, root: RootOption = "runs") -> None:
    """Ask DuckDB about a run: views prompts, samples, rewards, verdicts, batches, steps, evaluations."""
    from millrace.flows.tools.sql import query_table

    console.print(_guarded(lambda: query_table(root, run, query)))


@app.command()
def branch(
    run: str,
    new: str,
    at: Annotated[int, typer.Option(help="Iterations of the run that the branch begins with.")],
    root: RootOption = "runs",
) -> None:
    """Start a new run from any checkpointed iteration of another."""
    from millrace.flows.tools.branch import branch_run

    console.print(_guarded(lambda: branch_run(root, run, new, at)), soft_wrap=True)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="Run whose left-over actors are to end.")],
    root: RootOption = "runs",
) -> None:
    """End what a killed driver left behind of a run: trainer ranks and engines. Files stay."""
    from millrace.flows.tools.browse import stop_run

    _guarded(lambda: console.print(stop_run(root, run)))


@app.command("server")
def server(action: Annotated[str, typer.Argument(help="start or stop")] = "start") -> None:
    """Start (or find) the local Prefect server; or stop it, and the local Ray head with every actor on it."""
    from millrace.connectors.prefect.server import ensure_server, stop_server, ui_url

    if action == "stop":
        from millrace.connectors.ray.cluster import stop_local_head

        console.print(f"Prefect server: {'stopped' if stop_server() else 'none runs'}")
        console.print(f"Ray head: {'stopped' if stop_local_head() else 'none runs'}")
    elif action == "start":
        _guarded(lambda: console.print(f"Prefect: {ui_url(ensure_server())}"))
    else:
        raise typer.BadParameter("start or stop")


def run_training(config: RunConfig) -> dict[str, Any]:
    """Run the training flow in this process against the configured or a local Prefect server."""
    import httpx

    from millrace.connectors.prefect.server import ensure_server, ui_url

    def go() -> dict[str, Any]:
        console.print(f"Prefect: {ui_url(ensure_server())}")
        if config.algorithm.loss == "sft":
            from millrace.flows.sft import sft as flow
        else:
            from millrace.flows.train import train as flow

        try:
            result: dict[str, Any] = asyncio.run(flow(config))
        except httpx.TransportError as error:
            raise MillraceError(
                f"the Prefect server at {ensure_server()} does not answer ({type(error).__name__}: {error}); "
                "what finished is kept: start the same command again"
            ) from error
        return result

    result = _guarded(go)
    did, total = result["did"], result["iterations"]
    console.print(f"run {config.run.name}: {total} iterations complete, {did} of them now")
    return result


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    from millrace.core.config.load import load_config

    return _guarded(lambda: load_config(str(path), overrides or []))


def _check(config: RunConfig) -> None:
    from millrace.core.config.problems import render_problems
    from millrace.flows.preflight.check import check as check_config

    problems = check_config(config)
    if problems:
        errors.print(render_problems(problems), markup=False, highlight=False)
        raise SystemExit(2)


def _guarded(call: Callable[[], T]) -> T:
    """Run a command; errors that a person can mend are printed without a traceback and exit with 2."""
    try:
        return call()
    except BaseException as error:
        cause = first_error(error)
        if isinstance(cause, MillraceError):
            errors.print(f"{type(cause).__name__}: {cause}", markup=False, highlight=False, soft_wrap=True)
            sys.exit(2)
        raise


if __name__ == "__main__":
    app()
