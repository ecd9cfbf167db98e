"""Every mode of running ahead and of choosing groups, on engines that answer late at random, with the driver killed at random.

A run of each mode is its own replay, accounts for every token and trains none that is too old. Where time decides nothing, two
runs are equal bit for bit. MILLRACE_MATRIX_SEED gives other delays and other places of the kill.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.flows.commands.ledger import accounts_of_run
from millrace.flows.commands.verify import verify_run
from tests.soak import forms, promises
from tests.soak.points import CHECKPOINTED, TASKS, WHENS
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import PATIENCE_S, Workplace, wait_until
from tests.support.slow_engines import SlowEngine, setting, slow_engines

SEED = os.environ.get("MILLRACE_MATRIX_SEED", "7")
ENGINES = 2
ITERATIONS = 4
SAMPLES = 4  # of a group
STEPS = 2  # of an iteration


@dataclass(frozen=True)
class Mode:
    """A cell of the matrix."""

    ahead: int
    staleness: int
    select: str
    on_update: str

    def __str__(self) -> str:
        return f"{self.ahead}-{self.staleness}-{self.select}-{self.on_update}"

    @property
    def overrides(self) -> list[str]:
        """What the command line adds to run.yaml."""
        return [
            *forms.overrides("deferred"),
            f"pipeline.ahead={self.ahead}",
            f"pipeline.max_staleness={self.staleness}",
            f"pipeline.select={self.select}",
            f"pipeline.on_update={self.on_update}",
            f"rollout.samples_per_prompt={SAMPLES}",
            f"run.iterations={ITERATIONS}",
        ]

    @property
    def dies(self) -> str:
        """Where the driver is killed, as MILLRACE_KILL_POINT has it."""
        places = [f"{CHECKPOINTED}/{task}/{when}" for task, when in product(TASKS, WHENS)]
        return random.Random(f"{SEED} {self}").choice(places)


BOUNDS = ((0, 0), (0, 1), (1, 1), (1, 2))
REPEATING = [Mode(*bounds, "draw", "finish") for bounds in BOUNDS]
CUTTING = [
    *(Mode(*bounds, "finish", "resend") for bounds in BOUNDS),
    Mode(1, 2, "finish", "retract"),
]


@pytest.fixture(scope="module")
def finished_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What engines finished, by the ids of requests."""
    log = tmp_path_factory.mktemp("engines") / "finished.log"
    log.touch()
    return log


@pytest.fixture(scope="module")
def engines(workplace: Workplace, finished_log: Path) -> Iterator[list[str]]:
    """Addresses of engines, which one run after the other uses. The workplace gets rows with answers of very different lengths."""
    (workplace.folder / forms.TAILED).write_text(forms.tailed_rows())
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("MILLRACE_FINISHED_LOG", str(finished_log))
        yield [
            stack.enter_context(
                embedded_engine(
                    workplace.folder / "model", log=finished_log.with_name(f"engine-{number}.log")
                )
            )[0]
            for number in range(ENGINES)
        ]


def killed_and_resumed(
    place: Workplace, root: Path, mode: Mode, engines: list[str], finished_log: Path
) -> tuple[promises.Killed, list[SlowEngine]]:
    """A run of the mode whose driver is killed once; what was stored then, and what the engines finished after it."""
    seen = finished_log.stat().st_size
    root.mkdir()
    held = root / "held"
    with slow_engines(engines, f"{SEED} killed {mode}") as slow:
        process = place.start(
            *("train", "run.yaml", f"storage.root={root}", *mode.overrides, setting(slow)),
            MILLRACE_KILL_POINT=mode.dies,
            MILLRACE_KILL_POINT_FILE=str(held),
        )
        try:
            wait_until(lambda: held.exists() or process.poll() is not None)
        finally:
            process.kill()
            said, _ = process.communicate(timeout=PATIENCE_S)
        assert held.exists(), f"{mode.dies} was not reached: {said}"
        state = promises.Killed(
            parts=promises.parts(root / "a"), finished_before=promises.finished(finished_log, seen)
        )
        place.train(root, *mode.overrides, setting(slow))
    state.finished_after = promises.finished(finished_log, seen)[len(state.finished_before) :]
    return state, slow


def ages(run: Path) -> list[int]:
    """The age of each span of trained tokens, in published versions."""
    paths = sorted(run.glob("iterations/*/batch.parquet"))
    rows = [pq.read_table(path, columns=["policy_versions"]).to_pylist() for path in paths]
    return [
        index - span["version"] // STEPS
        for index, batch in enumerate(rows)
        for row in batch
        for span in row["policy_versions"]
    ]


def finishing_order(run: Path) -> list[str]:
    """Samples in the order in which they were stored, of each iteration."""
    paths = sorted(run.glob("iterations/*/rollouts/part-*.parquet"))
    return [sample for path in paths for sample in pq.read_table(path)["sample_id"].to_pylist()]


def problems_of(place: Workplace, run: Path, mode: Mode) -> list[str]:
    """What a finished run of the mode breaks of what every mode promises."""
    accounts = accounts_of_run(str(run.parent), run.name)
    problems = [*accounts.problems, *verify_run(str(run.parent), run.name).problems]
    closed = [row[0] for row in accounts.listing.rows if row[-1] == "yes"]
    if closed != list(range(1, ITERATIONS + 1)):
        problems.append(f"accounts close at iterations {closed} alone")
    if max(ages(run)) > mode.staleness:
        problems.append(f"a token was {max(ages(run))} versions old")
    for index in range(ITERATIONS):
        problems += _lost_groups(run, index)
    return problems + promises.replayed(place, run)


def _lost_groups(run: Path, index: int) -> list[str]:
    """Groups that an iteration deferred and the next one has not, and samples on which it says more than one thing."""
    folder = run / "iterations" / f"{index:06d}"
    verdicts = pq.read_table(folder / "verdicts.parquet").to_pylist()
    named = Counter(row["sample_id"] for row in verdicts)
    problems = [f"iteration {index}: {sample} has several verdicts" for sample, n in named.items() if n > 1]
    deferred = {row["group_id"] for row in verdicts if row["verdict"] == "deferred"}
    following = folder.with_name(f"{index + 1:06d}") / "verdicts.parquet"
    if deferred and following.exists():
        later = {row["group_id"] for row in pq.read_table(following).to_pylist()}
        problems += [f"iteration {index}: {group} was deferred, and lost" for group in deferred - later]
    return problems


def deferred(run: Path) -> list[dict[str, Any]]:
    paths = sorted(run.glob("iterations/*/verdicts.parquet"))
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    return [row for row in rows if row["verdict"] == "deferred"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", REPEATING, ids=str)
def test_where_time_decides_nothing_two_runs_are_equal_however_late_engines_answer(
    workplace: Workplace, engines: list[str], finished_log: Path, tmp_path: Path, mode: Mode
) -> None:
    """One is never interrupted; the other has other delays, and its driver is killed."""
    with slow_engines(engines, f"{SEED} whole {mode}") as slow:
        workplace.train(tmp_path / "whole", *mode.overrides, setting(slow))
    state, slow_again = killed_and_resumed(workplace, tmp_path / "killed", mode, engines, finished_log)
    whole, killed = tmp_path / "whole" / "a", tmp_path / "killed" / "a"
    assert all(one.answered for one in (*slow, *slow_again)), "each engine was used"
    assert sorted(finishing_order(whole)) == sorted(set(finishing_order(killed)))
    assert finishing_order(whole) != finishing_order(killed), "the delays changed nothing"
    assert not promises.broken(whole, killed, state, starts=2)
    assert max(ages(whole)) == mode.ahead
    assert not problems_of(workplace, killed, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", CUTTING, ids=str)
def test_where_groups_that_finish_first_are_trained_a_killed_run_is_its_own_replay(
    workplace: Workplace, engines: list[str], finished_log: Path, tmp_path: Path, mode: Mode
) -> None:
    state, slow = killed_and_resumed(workplace, tmp_path / "killed", mode, engines, finished_log)
    run = tmp_path / "killed" / "a"
    assert all(one.answered for one in slow), "each engine was used"
    assert not promises.broken_of_its_own(run, state, starts=2)
    assert not problems_of(workplace, run, mode)
    assert bool(deferred(run)) == (mode.staleness > mode.ahead), "groups are deferred where that is allowed"
    if mode.staleness:
        assert max(ages(run)) > 0, "no token is older than the weights that it trains"
