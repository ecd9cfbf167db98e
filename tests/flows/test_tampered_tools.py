"""Tools that read some files of a run, after those were changed: `millrace plan --from` and `millrace score`."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.connectors.storage.store import Store
from millrace.connectors.user_code.process import Limits
from millrace.core.config import RunConfig
from millrace.flows.commands.plan import plan_from
from millrace.flows.commands.score import Columns, _read, score_file
from millrace.flows.driver.stored_run import run_record
from tests.support.run_readers import COMMITTED, Numbers
from tests.support.tampering import WAYS, another, linked, outcome, victim

PLANNED = (
    *(f"{COMMITTED}/{name}" for name in ("manifest.json", "results/rollout.json", "verdicts.parquet")),
    *(f"{COMMITTED}/rollouts/part", "run.json"),
)
NOT_READ = (f"{COMMITTED}/batch.parquet", f"{COMMITTED}/rewards/part")


def planned(root: str) -> Numbers:
    """What `millrace plan` says of the run."""
    plan = plan_from(RunConfig.model_validate(run_record(root, "a")["config"]), root, "a")
    return {"rows": plan.listing.rows, "facts": plan.listing.facts, "verdicts": plan.verdicts}


def scored(file: str) -> Numbers:
    """What `millrace score` reads of a table."""
    return {"rows": _read(file)}


@pytest.fixture(scope="module")
def plan(whole: Path) -> Numbers:
    return planned(str(whole.parent))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*PLANNED, *NOT_READ])
def test_a_plan_of_a_run_with_a_changed_file_is_the_same_or_names_it(
    whole: Path, plan: Numbers, tmp_path: Path, kind: str, way: str
) -> None:
    path = victim(whole, kind)
    linked(whole, tmp_path / "a")
    WAYS[way](Store(str(tmp_path / "a")), path, another(whole, path))
    found, refused = outcome(planned, str(tmp_path))
    if way == "doubled" or kind in NOT_READ:
        assert (found, refused) == (plan, None)
    else:
        assert refused is not None, "it is read"
        assert path.rsplit("/", 1)[-1] in str(refused)
        assert refused.remedy


@pytest.mark.parametrize("kind", [f"{COMMITTED}/rollouts/part", "eval/held_out/000002.parquet"])
def test_no_table_of_a_run_is_scored_as_another_than_was_written(
    whole: Path, tmp_path: Path, kind: str
) -> None:
    """A changed byte of a sample was scored as what it had become."""
    linked(whole, tmp_path / "a")
    path, store = victim(whole, kind), Store(str(tmp_path / "a"))
    data, file = store.read(path), str(tmp_path / "a" / path)
    assert all(isinstance(row["response"], str) for row in scored(file)["rows"])  # one may be empty
    step = max(1, len(data) // 100)
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), step)]
    for content in (*changed, data[: len(data) // 2], another(whole, path)):
        store.write(path, content)
        _, refused = outcome(scored, file)
        assert refused is not None
        assert path.rsplit("/", 1)[-1] in str(refused)
        assert refused.remedy


def test_a_table_of_a_run_is_scored(whole: Path, tmp_path: Path) -> None:
    part = whole / victim(whole, f"{COMMITTED}/rollouts/part")
    limits = Limits(memory_mb=None, max_processes=None)
    reward = "millrace.core.rewards.text:contains"
    out = str(tmp_path / "scores.jsonl")
    scores, _ = score_file(str(part), reward, {}, Columns(), out=out, workers=1, timeout_s=60, limits=limits)
    assert len(scores.rewards) == len(_read(str(part)))
