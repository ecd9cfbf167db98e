"""The answers of held-out sets: by checkpoint, and two checkpoints beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.ranged import RangedTables
from millrace.core.errors import MissingFileError, StorageError
from millrace.core.plain_text import whole
from millrace.flows.commands.named_files import named_by_records
from millrace.flows.viewer.messages import Message, Pictures, conversation, readable_json
from millrace.flows.viewer.stored import NotShown, Problems, ViewedRun

PAGE = 50
COLUMNS = (
    *("prompt_id", "index", "prompt", "label", "response", "response_length", "status", "reward", "scoring"),
    *("version", "subset", "reason", "answer", "loss"),
)


@dataclass(frozen=True)
class HeldOutAnswer:
    """An answer to a held-out prompt. other: what another checkpoint answered; None without one."""

    prompt_id: str
    index: int
    prompt: list[Message]
    label: str | None
    figures: dict[str, Any]
    response: str
    other: dict[str, Any] | None
    other_response: str | None


@dataclass(frozen=True)
class HeldOut:
    """A page of the answers of a set after some iterations. changed: rows whose reward differs from the other checkpoint's."""

    set: str
    done: int
    other: int | None
    answers: list[HeldOutAnswer]
    found: int
    changed: int
    problems: list[NotShown]


def evaluated_at(run: ViewedRun, problems: Problems) -> dict[str, list[int]]:
    """The iterations after which each set was evaluated; 0 is before training."""
    found: dict[str, list[int]] = {}
    for path in _files(run, problems):
        _, name, file = path.split("/")
        found.setdefault(name, []).append(int(file.removesuffix(".parquet")))
    return {name: sorted(done) for name, done in sorted(found.items())}


def held_out(
    run: ViewedRun, name: str, done: int, other: int | None = None, page: int = 0, changed_only: bool = False
) -> HeldOut:
    """The answers of a set after `done` iterations, beside those after `other`. Raises MissingFileError without such a file."""
    problems = Problems()
    files = _files(run, problems)
    rows = _rows(run, files, name, done, problems)
    beside = {_key(row): row for row in _rows(run, files, name, other, problems)} if other is not None else {}
    pairs = [(row, beside.get(_key(row))) for row in rows]
    changed = [pair for pair in pairs if pair[1] and pair[0]["reward"] != pair[1]["reward"]]
    listed = changed if changed_only else pairs
    systems = {
        each["name"]: each.get("system") for each in run.settings.get("evaluation", {}).get("sets", ())
    }
    pictures = run.pictures(problems)
    return HeldOut(
        set=name,
        done=done,
        other=other,
        answers=[
            _answer(*pair, systems.get(name), pictures) for pair in listed[PAGE * page : PAGE * (page + 1)]
        ],
        found=len(listed),
        changed=len(changed),
        problems=problems.listed(),
    )


def _files(run: ViewedRun, problems: Problems) -> dict[str, FileEntry]:
    """The evaluations that records name, by path. A supervised run's and those beside iterations are among them."""
    found: dict[str, FileEntry] = {}
    for index in run.numbers():
        try:
            for entry in named_by_records(run.folder, index):
                if entry.path.startswith("eval/"):
                    found[entry.path] = entry
        except StorageError as error:
            problems.note(error)
    return found


def _rows(
    run: ViewedRun, files: Mapping[str, FileEntry], name: str, done: int, problems: Problems
) -> list[dict[str, Any]]:
    path = f"eval/{name}/{done:06d}.parquet"
    if path not in files:
        raise MissingFileError(
            "nothing that is committed names it", where=run.folder.store.url_of(path), remedy="choose another"
        )
    tables = RangedTables(run.folder.store)
    found: list[dict[str, Any]] = tables.read(
        [files[path]], "evaluations", COLUMNS, failed=problems.note
    ).to_pylist()
    return found


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["prompt_id"], row["index"]


def _answer(
    row: Mapping[str, Any], other: Mapping[str, Any] | None, system: str | None, pictures: Pictures
) -> HeldOutAnswer:
    return HeldOutAnswer(
        prompt_id=row["prompt_id"],
        index=row["index"],
        prompt=conversation(row, system, pictures)[:-1],
        label=readable_json(row["label"]),
        figures=_figures(row),
        response=whole(row["response"]),
        other=_figures(other) if other else None,
        other_response=whole(other["response"]) if other else None,
    )


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "reward",
        "response_length",
        "status",
        "scoring",
        "version",
        "subset",
        "reason",
        "answer",
        "loss",
    )
    return {name: row[name] for name in names if row[name] is not None}
