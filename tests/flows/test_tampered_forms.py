"""Files that only some forms of a run leave, changed in every way: what reads them gets what was written, or names the file.

Two runs: one of rollouts of several turns that trains groups again, and one that defers groups. Both save and evaluate in the
background. A kind of file that neither the plain run nor these have a row for fails.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import COMPLETE, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts.turns import TurnRow
from millrace.flows.commands.discard import discard_iterations
from millrace.flows.commands.verify import verify_run
from millrace.tasks.generation.sessions.rollout_record import stored_events
from tests.soak import forms
from tests.support.flow_runs import Workplace
from tests.support.run_readers import (
    COMMITTED,
    OPEN,
    UNDER_WAY,
    Numbers,
    branch,
    digest,
    ledger,
    replay,
    resume,
    sql,
    stored_evaluations,
)
from tests.support.tampering import (
    KINDS,
    WAYS,
    Readers,
    another,
    check,
    check_verify,
    kind_of,
    linked,
    outcome,
    reopened,
)

pytestmark = pytest.mark.slow

BOTH = (
    *(f"checkpoint.{setting}" for setting in ("background=true", "every=1", "keep_last=3")),
    *("evaluation.background=true", "evaluation.every=1", "rollout.prompts=4", "trainer.global_batch=8"),
    'evaluation.sets=[{"name": "held_out", "path": "held_out.jsonl", "sampling": {"max_new_tokens": 8}}]',
)
FURTHER = re.compile(
    r"__0_[1-9]\.distcp"
)  # files of a save but its first: their number follows the machine's cores
SHARDS = (".metadata", "__0_0.distcp", "__0_1.distcp", "common.pt", "metadata.json")


@dataclass(frozen=True)
class Form:
    """A run: its settings, its newest complete checkpoint, and the rows that it has beside those of a plain run.

    as_plain: of the plain run's rows, those whose files have something of the form in them.
    """

    settings: tuple[str, ...]
    checkpoint: int
    rows: tuple[str, ...]
    as_plain: tuple[str, ...]


IN_BACKGROUND = (
    *(f"{at}/results/evaluate_before.json" for at in (COMMITTED, UNDER_WAY)),
    "checkpoints/000003/__0_1.distcp",  # a save in the background writes several
)
FORMS = {
    "turns": Form(
        (*forms.overrides("tool"), *forms.overrides("reuse"), *BOTH),
        checkpoint=1,
        rows=(
            *(f"{at}/turns/part" for at in (COMMITTED, UNDER_WAY)),
            *IN_BACKGROUND,
            *(f"half-written/{name}" for name in SHARDS),
            *("discarded/reason.json", "discarded/file"),
        ),
        as_plain=(
            *(f"{COMMITTED}/{name}" for name in ("batch.parquet", "results/checkpoint.json")),
            *(f"{UNDER_WAY}/{name}" for name in ("batch.parquet", "results/sample_prompts.json")),
            *(f"{UNDER_WAY}/{name}" for name in ("verdicts.parquet", "evaluations/part")),
        ),
    ),
    "deferred": Form(
        (*forms.overrides("deferred"), *BOTH),
        checkpoint=2,
        rows=(
            *(
                f"{at}/{name}"
                for at in (COMMITTED, UNDER_WAY)
                for name in ("cut.json", "deferred.parquet", "joined.parquet", "logprobs/rank")
            ),
            *IN_BACKGROUND,
        ),
        as_plain=(
            *(f"{UNDER_WAY}/results/{task}.json" for task in ("rollout", "filter")),
            *(f"{COMMITTED}/{name}" for name in ("prompts.parquet", "rewards/part")),
        ),
    ),
}


def kind_in_form(path: str) -> str:
    """The row of a file, as of a plain run but for what only these forms have."""
    if path.startswith("discarded/"):
        return "discarded/reason.json" if path.endswith("/reason.json") else "discarded/file"
    kind = kind_of(path)
    return kind.replace("evaluate.json", "evaluate_before.json") if "evaluate_before" in path else kind


def rows_of(run: Path) -> dict[str, str]:
    """A file of each kind in a run, those of its first iteration last."""
    paths = sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
    half = {f"checkpoints/{done:06d}/" for done in (1, 2, 3)} - {
        f"checkpoints/{done:06d}/" for done in RunFolder(str(run.parent), run.name).complete_checkpoints()
    }
    found: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: ("/000000/" in path, path)):
        if not path.startswith("logs/") and path != "lease/lock":
            unfinished = re.match("|".join(half), path) if half else None
            kind = f"half-written/{path[unfinished.end() :]}" if unfinished else kind_in_form(path)
            found.setdefault(FURTHER.sub("__0_1.distcp", kind), path)
    return found


def with_discarded(run: Path) -> None:
    """As it is when its open iteration was given up, and another start made it again: as it was, on a CPU."""
    before = run.with_name("before")
    shutil.copytree(run, before)
    discard_iterations(str(run.parent), run.name, OPEN, reason="for the test")
    for folder in ("iterations", "checkpoints", "exports", "eval"):
        shutil.copytree(before / folder, run / folder, dirs_exist_ok=True)
    shutil.rmtree(before)


def with_half_a_save(run: Path) -> None:
    """As a driver leaves it that dies in the open iteration's checkpoint while the one before is being written."""
    (run / UNDER_WAY / "results" / "checkpoint.json").unlink()
    (run / "checkpoints" / f"{OPEN:06d}" / COMPLETE).unlink()
    for folder in ("checkpoints", "exports"):
        shutil.rmtree(run / folder / f"{OPEN + 1:06d}")


@pytest.fixture(scope="module")
def runs(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each form's run, with an open iteration."""
    for name, text in {**forms.MODULES, forms.TAILED: forms.tailed_rows()}.items():
        (workplace.folder / name).write_text(text)
    made = {}
    for name, form in FORMS.items():
        root = tmp_path_factory.mktemp(name)
        workplace.train(root / "whole", *form.settings, SOAK_NOTES=str(root / "notes"))
        made[name] = root / "a"
        reopened(root / "whole" / "a", made[name])
    with_discarded(made["turns"])
    with_half_a_save(made["turns"])
    return made


def readers_of(form: str) -> Readers:
    """What reads a run of the form."""
    return {
        "resume": resume,
        "replay": replay,
        "branch": partial(branch, at=FORMS[form].checkpoint),
        "evaluate": stored_evaluations,
        "sql": sql,
        "ledger": ledger,
    }


@dataclass(frozen=True)
class Whole:
    """What readers read of a run as it is, and what verify says nothing names."""

    numbers: dict[str, Numbers]
    strangers: Collection[str]


@pytest.fixture(scope="module")
def expected(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    made = {}
    for form, run in runs.items():
        root = tmp_path_factory.mktemp("expected")
        linked(run, root / "a")
        verdict = verify_run(str(root), "a")
        assert verdict.problems == []
        numbers = {name: reader(str(root)) for name, reader in readers_of(form).items()}
        made[form] = Whole(numbers, verdict.strangers)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_file_of_the_form_has_a_row(runs: dict[str, Path], form: str) -> None:
    found, rows = set(rows_of(runs[form])), FORMS[form]
    assert found - set(KINDS) == set(rows.rows)
    assert set(rows.as_plain) <= found & set(KINDS)


def test_the_runs_have_what_their_rows_are_about(runs: dict[str, Path], expected: dict[str, Whole]) -> None:
    assert all(FORMS_AT_WORK[form](expected[form]) for form in FORMS)
    left = [path for path in rows_of(runs["turns"]).values() if path.startswith("checkpoints/000002/")]
    assert set(left) <= set(expected["turns"].strangers)
    assert expected["deferred"].strangers == []


FORMS_AT_WORK: dict[str, Callable[[Whole], bool]] = {
    "turns": lambda whole: any(key.startswith("reused ") for key in whole.numbers["resume"]),
    "deferred": lambda whole: "joined" in whole.numbers["resume"] and "cut" in whole.numbers["resume"],
}


@pytest.mark.parametrize(
    ("form", "kind", "way"),
    [
        (form, kind, way)
        for form, rows in FORMS.items()
        for kind in (*rows.rows, *rows.as_plain)
        for way in WAYS
    ],
)
def test_a_changed_file_of_a_form_gives_the_same_numbers_or_is_named(
    runs: dict[str, Path], expected: dict[str, Whole], tmp_path: Path, form: str, kind: str, way: str
) -> None:
    run, whole = runs[form], expected[form]
    path = rows_of(run)[kind]
    linked(run, tmp_path / "a")
    WAYS[way](Store(str(tmp_path / "a")), path, another(run, path))
    unread = kind.startswith(("half-written/", "discarded/"))
    check_verify(str(tmp_path), path, way, unread, whole.strangers)
    check(str(tmp_path), path, way, readers_of(form), whole.numbers)


def recorded_turns(root: str) -> Numbers:
    """What a start that generates the open iteration takes up of rollouts that are under way, row by row."""
    store = RunFolder(root, "a").iteration(OPEN)
    table = read_parts(store, "turns", "turns", ignore_incomplete=True)
    rollouts = stored_events(TurnRow(**row) for row in table.to_pylist())
    return {
        f"{rollout} {row.order}": digest(repr(row).encode())
        for rollout, rows in rollouts.items()
        for row in rows
    }


@pytest.mark.parametrize("way", WAYS)
def test_turns_under_way_are_taken_up_as_they_were_written_or_not_at_all(
    runs: dict[str, Path], tmp_path: Path, way: str
) -> None:
    """No record names them yet: their names have their hash. What is left out is generated again."""
    linked(runs["turns"], tmp_path / "a")
    for record in (tmp_path / "a" / UNDER_WAY / "results").iterdir():
        record.unlink()
    expected = recorded_turns(str(tmp_path))
    path = rows_of(runs["turns"])[f"{UNDER_WAY}/turns/part"]
    WAYS[way](Store(str(tmp_path / "a")), path, another(runs["turns"], path))
    taken_up = recorded_turns(str(tmp_path))
    assert taken_up.items() <= expected.items()
    assert (taken_up == expected) == (way == "doubled")
    numbers, refused = outcome(sql, str(tmp_path))
    assert refused is None or path.rsplit("/", 1)[-1] in str(refused)
