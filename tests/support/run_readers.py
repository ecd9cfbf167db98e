"""What reads a run's folder, as functions of its root that return the numbers they read. The run is `a`, with an open iteration.

What needs a trainer is tried where its files are read: records, the batch in a rank, the choice of a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import tempfile
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import duckdb

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.storage.checkpoint_files import checkpoint_files
from millrace.connectors.storage.iteration_files import IterationFiles, commit_again
from millrace.connectors.storage.run_folder import RunFolder, numbers_of
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.core.config import RunConfig
from millrace.core.errors import CorruptFileError, MissingFileError
from millrace.core.waits import USUAL
from millrace.flows.commands.branch import branch_run
from millrace.flows.commands.ledger import accounts_of_run
from millrace.flows.commands.replay import export_folder
from millrace.flows.commands.sql import connect
from millrace.flows.driver.stored_run import run_record, settings_of
from millrace.tasks.batching.deferred_groups import join, read_cut
from millrace.tasks.batching.reused_groups import read_reused
from millrace.tasks.context import IterationContext
from millrace.tasks.evaluate import evaluate_version
from millrace.tasks.generation.admission import places_of
from millrace.tasks.run_recorded import _check_found
from millrace.tasks.runtime.prompts import Prompts
from millrace.tasks.runtime.scoring import Scoring
from millrace.tasks.runtime.trainer import recorded_step

OPEN, STEPS = 2, 2  # the run's open iteration, and its steps an iteration
COMMITTED, UNDER_WAY = f"iterations/{OPEN - 1:06d}", f"iterations/{OPEN:06d}"
TASKS = ("sample_prompts", "rollout", "reward", "filter", "train_step", "sync_weights", "checkpoint")
RECORDED = (*TASKS, "evaluate", "evaluate_before")
Numbers = dict[str, Any]


def resume(root: str) -> Numbers:
    """What a driver reads before it goes on with the open iteration, and its trainer to hold the newest version."""
    folder, record = RunFolder(root, "a"), run_record(root, "a")
    commit_again(folder)
    config = SimpleNamespace(run=SimpleNamespace(name="a"), run_limit=USUAL)
    ctx = IterationContext(cast(Any, SimpleNamespace(run_folder=folder, config=config)), OPEN)
    for task in RECORDED:
        _check_found(ctx, task)
    files = IterationFiles(folder, OPEN)
    there = {task: files.record(task) for task in RECORDED}
    for task, record_of in there.items():
        if record_of:
            ctx.add_record(task, record_of)
    return {
        **taken_in(ctx),
        "config": record["config"],
        "data": record["data"],
        "history": [history.model_dump() for history in folder.history()],
        **{task: record for task, record in there.items() if record},  # a task without a record runs again
        **brought_up(folder, record, OPEN + 1),
    }


def taken_in(ctx: IterationContext) -> Numbers:
    """What the open iteration has of those before it: groups that are trained again, and those that were deferred to it."""
    numbers: Numbers = {}
    for reuse in read_reused(ctx):
        rows = reuse.rollouts.select(["sample_id", "tokens", "rollout_logprobs"]).to_pylist()
        numbers[f"reused {reuse.group.group_id}"] = digest(repr((reuse.uses, rows)).encode())
    joined = join(ctx)
    if joined.groups:
        numbers["joined"] = digest(
            repr((joined.groups, joined.finished, joined.begun, joined.scores)).encode()
        )
    cut = read_cut(ctx)
    return {**numbers, "cut": cut.model_dump()} if cut else numbers


def replay(root: str) -> Numbers:
    """What a replay of the committed iterations reads, and the export after the last one if there is one."""
    folder, record = RunFolder(root, "a"), run_record(root, "a")
    folder.manifests()
    saved = OPEN + 1 in numbers_of(folder.store, "checkpoints")
    exported = Path(root) / f"export-{uuid.uuid4().hex}" if saved and "://" not in root else None
    read = brought_up(folder, record, OPEN)
    if exported:
        export_folder(folder, OPEN + 1, exported)
        read["export"] = {path.name: digest(path.read_bytes()) for path in exported.iterdir()}
        shutil.rmtree(exported)
    return {"config": record["config"], **read}


def brought_up(folder: RunFolder, record: dict[str, Any], iterations: int) -> Numbers:
    """The rows and figures of the steps up to an iteration, and what each checkpoint holds that may be taken.

    As bring_up of the trainer takes them; a checkpoint that is not whole gives way, with replay of all steps.
    """
    rank = TrainerRank({}, 0, 1)
    rank.config = RunConfig.model_validate(settings_of(record))
    numbers: Numbers = {}
    for index in range(iterations):
        files = IterationFiles(folder, index)
        if "batch.parquet" not in files.entries and index == OPEN:
            continue  # the filter runs again
        entry = files.entry("batch.parquet")
        rows = rank._read(files.folder.url_of(entry.path), entry.sha256)
        numbers[f"rows {index}"] = digest(
            repr([(row.sample_id, row.tokens, row.advantage) for row in rows]).encode()
        )
        steps = [recorded_step(files, index * STEPS + step) for step in (1, 2)]
        if steps[0] is not None:
            numbers[f"steps {index}"] = steps
    for done in folder.complete_checkpoints():
        if done <= iterations:
            with contextlib.suppress(CorruptFileError, MissingFileError):  # replayed
                numbers[f"shards {done}"] = shards(folder, done)
    return numbers


def shards(folder: RunFolder, done: int) -> list[tuple[str, str]]:
    """The files of a checkpoint, as its marker names them."""
    entries = checkpoint_files(folder, done, done * STEPS)
    store = folder.store.child(folder.checkpoint_path(done))
    for file in entries:
        store.verify(file)
    return [(file.path, digest(store.read(file.path))) for file in entries]


def branch(root: str, at: int = OPEN) -> Numbers:
    """Every file that a branch of the run after `at` iterations begins with."""
    name = f"branch-{uuid.uuid4().hex}"
    branch_run(root, "a", name, at)
    store = Store(root).child(name)
    made = {path: digest(store.read(path)) for path in store.list() if path != "run.json"}
    record = store.read_sealed("run.json")
    store.remove("", recursive=True)
    return {**made, "parent": record["parent"]["config"], "data": record["data"]}


def stored_evaluations(root: str) -> Numbers:
    """Held-out figures, as records and tables hold them."""
    rows, folder = evaluations(connect(root, "a", ["evaluations"])), RunFolder(root, "a")
    kept = [
        IterationFiles(folder, index).record(task)
        for index in range(OPEN)
        for task in ("evaluate_before", "evaluate")
    ]
    return {**{f"rows {done}": repr(found) for done, found in rows.items() if done <= OPEN}, "records": kept}


def ledger(root: str) -> Numbers:
    """What `millrace ledger` accounts for of the committed iterations; an open one's account grows with its records."""
    return {str(row[0]): row for row in accounts_of_run(root, "a").listing.rows if row[0] <= OPEN}


class Evaluation:
    """Evaluates a run's last weights again: held-out prompts, a real engine with the export, the reward's processes.

    Weights that were evaluated before are not evaluated again.
    """

    def __init__(self, engine_url: str, workplace: Path) -> None:
        """workplace: the folder in which the run's configuration names files."""
        self._url = engine_url
        self._workplace = workplace
        self._by_export: dict[str, Numbers] = {}

    def __call__(self, root: str) -> Numbers:
        """The stored evaluations, and the rows of the one that is made again."""
        stored, folder = stored_evaluations(root), RunFolder(root, "a")
        config = RunConfig.model_validate(run_record(root, "a")["config"])
        if IterationFiles(folder, OPEN).record("checkpoint") is None:
            return stored  # its task runs again before anything is evaluated
        with tempfile.TemporaryDirectory() as name:
            export = Path(name) / "export"
            export_folder(folder, OPEN + 1, export)
            content = digest(
                repr(sorted((p.name, digest(p.read_bytes())) for p in export.iterdir())).encode()
            )
            if content not in self._by_export:
                with contextlib.chdir(self._workplace):
                    made = asyncio.run(self._evaluated(config, export, RunFolder(name, "again")))
                self._by_export[content] = made
        return {**stored, **self._by_export[content]}

    async def _evaluated(self, config: RunConfig, export: Path, folder: RunFolder) -> Numbers:
        version = (OPEN + 1) * STEPS
        engine, scoring = SglangClient(self._url, "engine-0"), Scoring(config)

        async def ready(_: int) -> Dispatcher:
            return Dispatcher(
                lambda: [engine],
                cast(Any, None),
                cast(Any, None),
                version=version,
                attempts=1,
                progress_timeout_s=60,
            )

        try:
            await engine.weights.update_from_disk(str(export), version)
            live = {
                "memory": SimpleNamespace(for_engines=ready),
                "prompts": Prompts(config, folder),
                "places": lambda share: places_of(config, share),
            }
            runtime = cast(Any, SimpleNamespace(run_folder=folder, config=config, scoring=scoring, **live))
            record = await evaluate_version(IterationContext(runtime, OPEN), OPEN + 1, version)
        finally:
            scoring.close()
            await engine.close()
        return {"evaluated again": record["sets"]}


COMMITTED_ROWS = {  # of each view; all other rows are the open iteration's
    "prompts": "committed",
    "samples": "committed",
    "batches": "committed",
    "turns": "group_id in (select group_id from prompts where committed)",
    "rewards": "sample_id in (select sample_id from samples where committed)",
    "verdicts": "group_id in (select group_id from prompts where committed)",
    "logprobs": f"train_step <= {OPEN * STEPS}",
    "steps": f"iteration <= {OPEN}",
}


def sql(root: str) -> Numbers:
    """The rows of every view, those of committed iterations and those of the open one."""
    connection = connect(root, "a")
    return {
        **{
            f"evaluations {done}": digest(repr(rows).encode())
            for done, rows in evaluations(connection).items()
        },
        **{
            f"{view}, {name}": digest(
                repr(connection.sql(f"select * from {view} where {rows} order by all").fetchall()).encode()
            )
            for view, committed in COMMITTED_ROWS.items()
            for name, rows in (("committed", committed), ("open", f"not ({committed})"))
        },
    }


def evaluations(connection: duckdb.DuckDBPyConnection) -> dict[int, list[Any]]:
    """The rows of evaluations, by the iterations trained; of those that an open iteration makes as far as there are any."""
    found: dict[int, list[Any]] = {done: [] for done in range(OPEN)}
    view = connection.sql("select * from evaluations order by all")
    at = view.columns.index("iteration")
    for row in view.fetchall():
        found.setdefault(row[at], []).append(row)
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
