"""Differences of a start from the previous start: settings, code and versions, each with its iteration.

Owns the list `changes` in run.json, so that a run's record has the settings of every iteration.
"""

import logging
from collections.abc import Collection
from typing import Any

from millrace.core.config import RunConfig
from millrace.core.config.parts.restart import changes
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import ConfigError
from millrace.flows.driver.fingerprints import differences

log = logging.getLogger(__name__)
EXCHANGED = (  # what a branch may set otherwise
    "algorithm.teacher: ",
    "algorithm.reference: ",
    "algorithm.advantage.critic.path: ",
    "model.chat_template: ",
)


def branched_fields(record: dict[str, Any], before: RunConfig, now: RunConfig) -> list[str]:
    """The fields that a branch changes from its parent, at its first start; none at any other start."""
    return [] if record["config"] is not None else [change.path for change in changes(before, now)]


def check_same_model(
    run: str,
    before: dict[str, Any] | None,
    now: dict[str, dict[str, str]],
    branched: Collection[str] = (),
) -> None:
    """Refuse to resume with another model than the run's, naming the files. `before`: fingerprints of an earlier start, if any.

    branched: fields that a branch changes at its first start; their files may differ.
    """
    changed = [
        name
        for name in (differences(before["model"], now["model"]) if before else ())
        if not (name.startswith(EXCHANGED) and name.startswith(tuple(branched)))
    ]
    if changed:
        raise ConfigError(
            "its model changed:\n  " + "\n  ".join(changed),
            where=f"run {run}",
            remedy="Put the files back, or start a new run under another run.name: one run has one model.",
        )


def start_changes(
    record: dict[str, Any],
    before: RunConfig,
    now: RunConfig,
    prints: dict[str, dict[str, str]],
    versions: dict[str, str],
    since: int,
) -> list[dict[str, Any]]:
    """The run's list of changes with the changes of this start, which hold from the iteration with index `since` on.

    record: run.json before this start. Logs a line for each change.
    """
    items = [
        {"field": change.path, "was": change.before, "now": change.now} for change in changes(before, now)
    ]
    earlier = record.get("fingerprints")
    if earlier:
        items += [
            {"field": name, "was": earlier["code"].get(name), "now": prints["code"].get(name)}
            for name in differences(earlier["code"], prints["code"])
        ]
    installed = record.get("versions")
    if installed:
        items += [
            {"field": f"version of {name}", "was": installed.get(name), "now": versions.get(name)}
            for name in differences(installed, versions)
        ]
    for item in items:
        log.warning(
            "from iteration %d on: %s is %.200r, was %.200r",
            iteration_number(since),
            item["field"],
            item["now"],
            item["was"],
        )
    listed: list[dict[str, Any]] = record.get("changes", [])
    return [*listed, {"since": since, "changes": items}] if items else listed
