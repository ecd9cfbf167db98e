"""The run whose stored rollouts another run trains on (pipeline.rollouts_from): whether it fits, and how the other run starts.

Knows nothing of how the rollouts are taken; `millrace.tasks.generation.stored_rollouts` does that.
"""

from collections.abc import Iterator
from typing import Any

from millrace.connectors.huggingface.hub import is_named
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.restart import changes
from millrace.core.config.reading.findings import by_name
from millrace.core.errors import MillraceError
from millrace.flows.driver.fingerprints import differences, of_model
from millrace.flows.driver.same_run import hashed_in, only_moved, stored_config
from millrace.flows.driver.stored_run import run_record, settings_of

FIELD = "pipeline.rollouts_from"
MADE_BY = ("run.seed", "model", "data", "rollout", "reward", "algorithm.teacher_server")
"""Fields that decide rollouts and rewards; only the type of the weights may differ."""
SAME_MODEL = ("model.path: ", "model.tokenizer: ", "model.chat_template: ")


def source_problems(config: RunConfig) -> Iterator[Problem]:
    """Why the run that pipeline.rollouts_from names cannot give its rollouts to this run, and the fields that must match."""
    name = config.pipeline.rollouts_from
    if name is None or name == config.run.name:
        return
    try:
        record, folder = run_record(config.storage.root, name), RunFolder(config.storage.root, name)
        source = stored_config(settings_of(record), name)
        committed = folder.first_open_iteration(strict=False)
    except MillraceError as error:
        reason = str(error).removesuffix(f"; {error.remedy}")
        yield Problem(FIELD, name, reason, error.remedy or "name another run")
        return
    for reason in _not_taken(source):
        yield Problem(FIELD, name, reason, "name another run")
    hashed = hashed_in(record)
    for change in changes(source, config):
        if _made_them(change.path) and not change.restart.resume and not only_moved(change, hashed):
            yield Problem(
                by_name(change.path, config.model_dump(mode="json")),
                change.now,
                f"the rollouts of {name} were made with {change.before!r:.200}",
                f"set it to that, or make rollouts with {change.now!r:.200}",
            )
    # the folder of a named model is compared once it is there
    if not is_named(config.model):
        yield from _of_other_files(config, name, record)
    if source.steps_per_iteration != config.steps_per_iteration:
        yield Problem(
            "trainer.global_batch",
            config.global_batch,
            f"an iteration of {config.steps_per_iteration} steps cannot train what {name} stored in iterations of "
            f"{source.steps_per_iteration}: rows name weight versions by steps",
            f"set trainer.global_batch and trainer.passes to make {source.steps_per_iteration}",
        )
    if committed < config.run.iterations:
        yield config.problem(
            "run.iterations",
            f"the run {name} has stored {committed}",
            f"set it to {committed} or less, or train {name} further" if committed else f"train {name} first",
        )


def _of_other_files(config: RunConfig, name: str, record: dict[str, Any]) -> Iterator[Problem]:
    before, now = (
        {file: digest for file, digest in prints.items() if file.startswith(SAME_MODEL)}
        for prints in (record.get("fingerprints", {"model": {}})["model"], of_model(config))
    )
    changed = differences(before, now) if before else []
    if changed:
        yield config.problem(
            "model.path",
            f"the rollouts of {name} were made with other files: {', '.join(changed)}",
            "put the files back, or make rollouts with these",
        )


def _not_taken(source: RunConfig) -> Iterator[str]:
    if source.algorithm.supervised:
        yield "it was supervised (algorithm.loss=sft), and has no rollouts"
    if source.pipeline.select == "finish":
        yield "it deferred groups from one iteration to the next (pipeline.select=finish)"
    if source.rollout.buffer:
        yield "its batches hold groups of earlier iterations (rollout.buffer)"


def _made_them(path: str) -> bool:
    return path != "model.dtype" and any(path == name or path.startswith(f"{name}.") for name in MADE_BY)


def begun_with(config: RunConfig) -> dict[str, Any]:
    """Entry of a new run's run.json about the run that its rollouts come from, whose records lie in its iterations."""
    if config.pipeline.rollouts_from is None:
        return {}
    record = run_record(config.storage.root, config.pipeline.rollouts_from)
    own = [record["id"]] if "id" in record else []
    return {"ancestors": [*record.get("ancestors", []), *own]}
