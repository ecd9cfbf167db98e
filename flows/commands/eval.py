"""`millrace eval`: held-out sets answered by a stored run's weights after some iteration, or by a Hugging Face folder.

Uses separate engines beside a run that may be running; changes nothing in the run's folder.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow.parquet as pq
import typer

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import render_problems
from millrace.core.config.reading.load import load_config
from millrace.core.contracts.task_records import EvaluatedSet
from millrace.core.errors import ConfigError
from millrace.core.evaluation import difference
from millrace.core.families.adapters import holds_adapters
from millrace.core.families.config_file import only_adapters
from millrace.core.hooks.loading import search_in
from millrace.flows.commands.listing import CsvOption, JsonOption, Listing, print_listing
from millrace.flows.commands.named_by_run import named_by_run
from millrace.flows.commands.replay import own_configuration
from millrace.flows.commands.terminal import (
    Overrides,
    RootOption,
    guarded,
    lines_before_prefect,
    named_first,
    print_lines,
)
from millrace.flows.commands.weights_after import configuration_after, iterations_done, weights_after
from millrace.flows.driver.named_model import at_commit, of_new_run
from millrace.flows.driver.stored_run import run_record
from millrace.flows.preflight.check_references import pass_blocks_on

if TYPE_CHECKING:
    from millrace.tasks.runtime.runtime import Runtime

CONFIG_JSON = "config.json"


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


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: figures by set, and the number of iterations that trained the weights."""

    done: int
    version: int
    sets: dict[str, EvaluatedSet]
    rewards: dict[str, dict[str, list[float]]]  # by set and prompt


def figures_of(found: Sequence[Evaluated]) -> Listing:
    """A row for each set and subset; with two evaluations also the difference of each set, prompt by prompt."""
    most = {k for each in found for figures in each.sets.values() for k in figures["pass_at"]}
    passes = sorted(most, key=int)
    columns = ["set", "iterations", "samples", "reward", "± 95 %", "majority", *(f"pass@{k}" for k in passes)]
    rows: list[Sequence[Any]] = []
    for each in found:
        for name, figures in each.sets.items():
            subsets = {f"{name}/{key}": part for key, part in figures["subsets"].items()}
            for shown, part in {name: figures, **subsets}.items():
                at = [part.get("pass_at", {}).get(k) for k in passes]
                own = [part["samples"], part["reward_mean"], part.get("interval"), part.get("majority"), *at]
                rows.append([shown, each.done, *own, part.get("truncated_share"), part.get("not_scored")])
    for before, after in pairwise(found):
        for name, rewards in after.rewards.items():
            if rewards and before.rewards[name]:
                gain, interval = difference(before.rewards[name], rewards)
                changed = [name, f"{after.done} - {before.done}", None, gain, interval]
                rows.append([*changed, *[None] * (len(columns) + 2 - len(changed))])
    return Listing([*columns, "truncated", "not scored"], rows)


def evaluate_run(
    root: str,
    run: str,
    at: int | None,
    sets: Sequence[str],
    out: Path | None,
    own: RunConfig | None = None,
    say: Callable[[list[str]], None] = lambda _: None,
) -> Evaluated:
    """Evaluate a run's weights after iteration `at`, by default the newest committed one. out: folder for the rows.

    own: the caller's configuration, instead of the run's. say: gets lines about what the run's configuration makes this process
    import, start and join, before it does.
    Weights come from the export after the iteration, or are made again from an earlier checkpoint and the stored batches.
    """
    record, folder = run_record(root, run), RunFolder(root, run)
    done = iterations_done(folder, at)
    stored = configuration_after(record, folder, done)
    if own is None:
        say(named_by_run(stored))
    config = own or at_commit(stored, record.get("model_commit")).config
    version = done * stored.steps_per_iteration
    with temporary_folder("millrace-evaluation") as name:
        weights = weights_after(config, folder, record, done, Path(name) / "weights")
        return _evaluate(config, weights, done, version, sets, Path(name), out)


def evaluate_folder(
    model: Path, config_file: Path, overrides: Sequence[str], sets: Sequence[str], out: Path | None
) -> Evaluated:
    """Evaluate a Hugging Face folder on the sets of a configuration. out: folder for the rows."""
    if holds_adapters(model):
        raise only_adapters(model, f"eval {model}")
    if not (model / CONFIG_JSON).exists():
        raise ConfigError(
            f"there is no run of this name, and no {CONFIG_JSON} in a folder of this name",
            where=str(model),
            remedy="name a run under --root, or a folder with a Hugging Face model",
        )
    config = load_config(str(config_file), [*overrides, f"model.path={model.absolute()}"])
    config = config.with_dtype(of_new_run(config))
    search_in(config.run.import_from)
    with temporary_folder("millrace-evaluation") as name:
        return _evaluate(config, str(model.absolute()), 0, 0, sets, Path(name), out)


def _evaluate(
    config: RunConfig,
    model: str,
    done: int,
    version: int,
    sets: Sequence[str],
    folder: Path,
    out: Path | None,
) -> Evaluated:
    # these import torch
    from millrace.flows.preflight.check import check
    from millrace.tasks.runtime.gpu_memory import StoredWeights
    from millrace.tasks.runtime.runtime import Runtime

    config = _alone(config, model, sets, folder)
    pass_blocks_on(config)
    problems = check(config, prepared=True)
    if problems:
        raise ConfigError(render_problems(problems))
    runtime = Runtime(config, StoredWeights)
    record = asyncio.run(_answered(runtime, done, version))
    rewards: dict[str, dict[str, list[float]]] = {}
    for name in record:
        stored = Path(config.storage.root) / config.run.name / "eval" / name / f"{done:06d}.parquet"
        rewards[name] = _rewards(stored)
        if out:
            target = out / f"{name}-{done:06d}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(stored, target)
    return Evaluated(done, version, record, rewards)


def _rewards(stored: Path) -> dict[str, list[float]]:
    """The rewards of a stored set by prompt; a sample with failed scoring counts 0, with failed generation not at all."""
    from millrace.tasks.evaluate import UNSCORED

    found: dict[str, list[float]] = {}
    for row in pq.read_table(stored, columns=["prompt_id", "reward", "scoring"]).to_pylist():
        if row["reward"] is not None or row["scoring"] in UNSCORED:
            found.setdefault(row["prompt_id"], []).append(row["reward"] or 0.0)
    return found


async def _answered(runtime: Runtime, done: int, version: int) -> dict[str, EvaluatedSet]:
    from millrace.tasks.context import IterationContext
    from millrace.tasks.evaluate import evaluate_version

    try:
        context = IterationContext(runtime, done)
        return (await evaluate_version(context, done, version))["sets"]
    finally:
        await runtime.close(end_actors=True)


def _alone(config: RunConfig, model: str, sets: Sequence[str], folder: Path) -> RunConfig:
    """The configuration with this model and these sets, in an unused folder. Raises ConfigError."""
    known = {held_out.name: held_out for held_out in config.evaluation.sets}
    if not known:
        raise ConfigError(
            "there are no held-out sets", where="evaluation.sets", remedy="add one to the configuration"
        )
    for name in sets:
        if name not in known:
            raise ConfigError(
                "unknown held-out set",
                where=f"--set {name}",
                remedy=f"there are: {', '.join(known)}",
            )
    if config.algorithm.supervised:
        raise ConfigError(
            "supervised runs answer nothing: they have the loss of their sets, which `millrace show` lists",
            where="algorithm.loss = sft",
            remedy="to sample answers, name the folder of an export and the configuration of an RL run: "
            "`millrace eval FOLDER --config rl.yaml`",
        )
    if not config.engines.started:
        raise ConfigError(
            "an evaluation loads other weights, which engines of another run may not be given",
            where=f"engines.kind = {config.engines.kind}",
            remedy="set engines.kind to sglang or embedded: engines=... of its own configuration",
        )
    values = config.model_dump(mode="json")
    values["model"]["path"] = model
    values["storage"]["root"] = str(folder)
    values["run"]["name"] = f"evaluation-{uuid.uuid4().hex[:8]}"
    values["checkpoint"]["keep_best"] = None
    values["pipeline"]["rollouts_from"] = None
    # the weights hold what adapters add
    values["trainer"]["lora"], values["sync"]["lora"] = None, "merged"
    # no task asks the teacher here, and it need not run
    if config.algorithm.teacher_server:
        values["algorithm"] |= {"teacher_server": None, "teacher": model}
    values["evaluation"]["sets"] = [known[name].model_dump(mode="json") for name in (sets or known)]
    return RunConfig.model_validate(values)
