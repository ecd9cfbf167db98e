"""Whether a configuration may resume a stored run, or start a branch of one: which changed fields are refused, and why.

Knows nothing of flows. `millrace check` names the refused fields before anything starts; the driver refuses them again.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.parts.restart import Change, changes
from millrace.core.errors import ConfigError, of_run


def stored_config(values: dict[str, Any], run: str) -> RunConfig:
    """The configuration in a run.json; newer fields have their defaults."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"its configuration cannot be read: {wrong}", where=f"run.json of {run}") from error


def hashed_in(record: Mapping[str, Any]) -> set[str]:
    """The fields whose files a run.json holds hashes of: these files may have another path now, if their content is the same."""
    return {name.partition(": ")[0] for name in record.get("fingerprints", {"model": ()})["model"]}


def refused_in_run(before: RunConfig, now: RunConfig, hashed: Collection[str] = ()) -> list[Change]:
    """The fields that differ and that a resume may not change. hashed: as `hashed_in` says."""
    return [change for change in _not_only_moved(before, now, hashed) if not change.restart.resume]


def refused_in_branch(before: RunConfig, now: RunConfig, hashed: Collection[str] = ()) -> list[Change]:
    """The fields that differ and that a branch may not change. hashed: as `hashed_in` says."""
    return [change for change in _not_only_moved(before, now, hashed) if not change.restart.branch]


def _not_only_moved(before: RunConfig, now: RunConfig, hashed: Collection[str]) -> Iterator[Change]:
    """The fields that differ. `auto` means the run's type."""
    found = changes(before.with_dtype(before.dtype), now.with_dtype(before.dtype))
    return (change for change in found if not only_moved(change, hashed))


def check_resume(before: RunConfig, now: RunConfig, hashed: Collection[str] = ()) -> None:
    """Refuse to resume a run if a field differs that a resume may not change, naming every such field."""
    refused = refused_in_run(before, now, hashed)
    if refused:
        branch, run = all(change.restart.branch for change in refused), before.run.name
        url = RunFolder(now.storage.root, run).store.url
        raise ConfigError(
            f"exists with another configuration:\n{_lines(refused)}",
            where=f"run {now.run.name}",
            remedy="Put these fields back, or change them in a branch: "
            f"`millrace branch {of_run(run, url, 'NEW', '--at ITERATION')}`."
            if branch
            else "Put these fields back, or give the new run another run.name.",
        )


def check_branch(
    before: RunConfig, now: RunConfig, parent: dict[str, Any], hashed: Collection[str] = ()
) -> None:
    """Refuse to start a branch if a field differs from its parent's that a branch may not change, naming every such field."""
    refused = refused_in_branch(before, now, hashed)
    if refused:
        raise ConfigError(
            f"is a branch of {parent['run']}, which has another configuration:\n{_lines(refused)}",
            where=f"run {now.run.name}",
            remedy="Put these fields back, or start a new run: a branch continues its parent's iterations.",
        )
    then, here = before.algorithm, now.algorithm
    for field, missing in (
        ("algorithm.advantage", here.critic is not None and then.critic is None),
        ("algorithm.reference_update_steps", here.reference_update_steps and not then.reference_update_steps),
    ):
        if missing and parent["at"]:
            raise ConfigError(
                f"the checkpoints of {parent['run']} hold no model for it",
                where=field,
                remedy="put it back, start a new run, or branch at 0",
            )


def only_moved(change: Change, hashed: Collection[str]) -> bool:
    """Whether only a path differs: its content is the same, or is compared by hashes later."""
    return change.moved and (
        change.path in hashed or os.path.realpath(change.before) == os.path.realpath(change.now)
    )


def _lines(refused: Sequence[Change]) -> str:
    return "\n".join(
        f"  {change.path}: was {change.before!r:.200}, now {change.now!r:.200} ({change.restart.because})"
        for change in refused
    )
