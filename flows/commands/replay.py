"""`millrace replay`: repeat stored steps from stored batches, and compare metrics and weights.

Uses separate trainer ranks beside a run that may be running; changes nothing in storage.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.ray import actors, client, cluster, placement
from millrace.connectors.storage.checkpoint_files import check_marker
from millrace.connectors.storage.driven_runs import forget_driven, note_driven
from millrace.connectors.storage.files import in_threads, recorded
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.rank import Rank
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.contracts.task_records import StepMetrics
from millrace.core.errors import MissingFileError, StorageError
from millrace.core.families.served_files import ALONE
from millrace.core.hooks.loading import search_in
from millrace.core.replay import check_replayed, with_settings
from millrace.flows.commands.named_by_run import named_by_run
from millrace.flows.commands.terminal import RootOption, console, guarded, named_first
from millrace.flows.driver.named_model import at_commit, of_new_run
from millrace.flows.driver.stored_run import run_record
from millrace.flows.preflight.check_references import pass_blocks_on
from millrace.tasks.runtime.orphans import driven_run
from millrace.tasks.runtime.trainer import Ranks, bring_up, make_ranks, recorded_step

FIGURES = ("loss", "grad_norm", "tokens", "samples")


def replay(
    run: str,
    first: Annotated[int, typer.Option("--from", help="Replay starts after this many iterations.")],
    last: Annotated[int, typer.Option("--to", help="Replay ends after this many iterations.")],
    root: RootOption = "runs",
    config: Annotated[
        Path | None, typer.Option(help="YAML file that replaces the run's own configuration.")
    ] = None,
) -> None:
    """Repeat stored steps from stored batches and compare metrics and weights; exits with 1 if they differ."""
    own = guarded(lambda: own_configuration(config, []))
    result = guarded(lambda: replay_run(root, run, first, last, own, named_first(run)))
    table = Table("step", "loss stored", "loss again", "grad norm stored", "grad norm again")
    for step in result.steps:
        table.add_row(
            str(step["version"]), *(f"{x:.9g}" for name in ("loss", "grad_norm") for x in step[name])
        )
    console.print(f"from {result.started_from}:", table, result.weights)
    raise SystemExit(0 if result.equal else 1)


@dataclass
class Replay:
    """Repeated steps, and their differences from the stored ones."""

    started_from: str = "the model as it was before the first step"
    steps: list[dict[str, Any]] = field(
        default_factory=list
    )  # for each version: metric -> (stored, repeated)
    weights: str = ""
    equal: bool = True


def replay_run(
    root: str,
    run: str,
    first: int,
    last: int,
    own: RunConfig | None = None,
    say: Callable[[list[str]], None] = lambda _: None,
) -> Replay:
    """Replay iterations `first` to `last` (exclusive), from the newest complete checkpoint that is not after `first`.

    own, say: as for `evaluate_run`.
    """
    record, folder = run_record(root, run), RunFolder(root, run)
    committed = folder.first_open_iteration()
    if not 0 <= first < last <= committed:
        raise StorageError(
            f"{folder.store.url}: has {committed} committed iterations; ask for 0 <= from < to <= {committed}"
        )
    if configuration_of(record, folder, first).pipeline.rollouts_only:
        raise StorageError(
            "has rollouts only, and no step to make again (pipeline.rollouts_only)",
            where=folder.store.url,
            remedy="replay a run that trained",
        )
    stored = configuration_of(record, folder, first)
    if own is None:
        say(named_by_run(stored))
    config = own or at_commit(stored, record.get("model_commit")).config
    pass_blocks_on(config)
    cluster.start_or_join(config.placement.ray_address, f"{folder.identity(str(record.get('id')))}-replay")
    try:
        return asyncio.run(_replay(config, folder, first, last))
    finally:
        cluster.leave()


def own_configuration(file: Path | None, overrides: Sequence[str]) -> RunConfig | None:
    """The configuration of a caller's file; None without one."""
    if file is None:
        return None
    config = load_config(str(file), overrides)
    search_in(config.run.import_from)
    return config.with_dtype(of_new_run(config))


def configuration_of(record: Mapping[str, Any], folder: RunFolder, index: int) -> RunConfig:
    """The configuration under which an iteration was trained; the parent's for the first iterations of a branch."""
    parent = record.get("parent")
    ours = record["config"] if parent is None or index >= parent["at"] else parent["config"]
    config = RunConfig.model_validate(ours)
    recorded = recorded_step(IterationFiles(folder, index), index * config.steps_per_iteration + 1)
    # a step of a run of rollouts only was not trained, and has no settings
    return with_settings(config, recorded) if recorded and "settings" in recorded else config


@asynccontextmanager
async def ranks_alone(config: RunConfig) -> AsyncIterator[Ranks]:
    """The trainer's ranks without engines, ready; ended afterwards."""
    identity = client.namespace() or config.run.name
    await asyncio.to_thread(note_driven, driven_run(config, identity))
    try:
        places = placement.Reservation(config, engines=False).places("trainer")
        ranks = make_ranks(config, config.for_actors(), places)
        await ranks.setup()
        yield ranks
    finally:
        await actors.end()
        placement.release()
        await asyncio.to_thread(forget_driven, identity)


async def _replay(config: RunConfig, folder: RunFolder, first: int, last: int) -> Replay:
    await actors.end()
    steps = config.steps_per_iteration
    async with ranks_alone(config) as ranks:
        result = Replay()

        def compare(index: int, recorded: StepMetrics, again: StepMetrics, *, exact: bool) -> None:
            if index < first:
                check_replayed(index, recorded, again, exact=exact)
                return
            stored: Mapping[str, Any] = recorded
            made: Mapping[str, Any] = again
            compared = {name: (stored[name], made[name]) for name in FIGURES}
            result.steps.append({"version": recorded["version"], **compared})
            result.equal = result.equal and all(before == after for before, after in compared.values())

        came = await bring_up(ranks, folder, last * steps, steps, at_most=first * steps, on_step=compare)
        if came.checkpoint:
            result.started_from = f"checkpoint {came.checkpoint}"
        await _compare_weights(config, ranks, folder, last, last * steps, result)
        return result


async def _compare_weights(
    config: RunConfig, ranks: Ranks, folder: RunFolder, last: int, version: int, result: Replay
) -> None:
    """Compare with the export after the last iteration, or else with its checkpoint."""
    here = None if config.sync.by_url else config.sync.directory
    with temporary_folder("millrace-replay", here) as name:
        again, stored = Path(name).absolute() / "again", Path(name).absolute() / "stored"
        await export_ranks(config, ranks, version, again)
        if folder.store.list(f"exports/{last:06d}"):
            export_folder(folder, last, stored)
            against = "export"
        elif last in folder.complete_checkpoints():
            check_marker(folder, last, version)
            await ranks.each(Rank.load, folder.store.url_of(folder.checkpoint_path(last)))
            await export_ranks(config, ranks, version, stored)
            against = "checkpoint"
        else:
            result.weights = (
                f"there is neither a checkpoint nor an export after iteration {last} to compare weights with"
            )
            return
        differing = largest_differences(again, stored)
    result.equal = result.equal and not differing
    shown = "; ".join(f"{name} by {value:.3g}" for name, value in list(differing.items())[:5])
    result.weights = (
        f"{len(differing)} tensors differ from the {against}: {shown}"
        if differing
        else f"every weight equals the {against} after iteration {last}, bit for bit"
    )


def export_folder(folder: RunFolder, last: int, into: Path) -> None:
    """The export after an iteration.

    Raises CorruptFileError for a file that differs from the checkpoint task's record, MissingFileError without the record.
    """
    export = folder.store.child(f"exports/{last:06d}")
    record = IterationFiles(folder, last - 1).record("checkpoint")
    url = folder.iteration(last - 1).url_of(record_path("checkpoint"))
    if record is None:
        raise MissingFileError(
            "no such file, and it names the files of the export", where=url, remedy="restore it from a copy"
        )
    entries = recorded(record.get("export_files", ()), url)
    in_threads(export.verify, entries)
    export.download_dir("", str(into), [entry.path for entry in entries])


async def export_ranks(
    config: RunConfig, ranks: Ranks, version: int, folder: Path, *, merged: bool = False
) -> None:
    """Export the ranks' weights to a folder of this host, through sync.directory if that is a URL.

    merged: with trainer.lora the model, to which what the adapters add is added; otherwise the adapters.
    """
    if not config.sync.by_url:
        await ranks.each(Rank.export, str(folder), version, merged)
        return
    between = Store(config.sync.directory or "").child(f"millrace-replay-{uuid.uuid4().hex}")
    try:
        await ranks.each(Rank.upload, between.url_of("model"), version, ALONE, merged)
        between.download_dir("model", str(folder))
    finally:
        between.remove("", recursive=True)


def largest_differences(one: Path, other: Path) -> dict[str, float]:
    """Tensors that differ between two Hugging Face folders, with their largest difference."""
    left, right = (_tensors(folder) for folder in (one, other))
    assert left.keys() == right.keys(), "exports of one model name the same tensors"
    return {
        name: (left[name].double() - right[name].double()).abs().max().item()
        for name in sorted(left)
        if not _same_bytes(left[name], right[name])
    }


def _same_bytes(one: Any, other: Any) -> bool:
    import torch

    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _tensors(folder: Path) -> dict[str, Any]:
    # numpy has no bfloat16
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
