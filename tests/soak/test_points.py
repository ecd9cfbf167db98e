"""The soak tries what it says: every victim is in its matrix, a clock is off, and what a machine cannot try does not count."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import islice, product
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.soak import draws, jobs, numbers, stores
from tests.soak.__main__ import Results, judge, work
from tests.soak.forms import FORMS
from tests.soak.harness import Outcome, Site
from tests.soak.neighbours import CLOCK
from tests.soak.points import (
    CLOCKS,
    EVALUATE,
    NEIGHBOURS,
    OWN_VICTIMS,
    TASKS,
    VICTIMS,
    Point,
    at_random,
    matrix,
)
from tests.soak.rollouts import SESSIONS
from tests.support.flow_runs import Workplace, wait_until
from tests.support.late_s3 import Odds
from tests.support.reward_server import FAILING, fails


def test_the_matrix_has_every_victim_and_neighbour_and_each_point_once() -> None:
    for every in (False, True):
        points = matrix(every)
        assert {point.victim for point in points} == {*VICTIMS, *OWN_VICTIMS, *NEIGHBOURS}
        assert max(Counter(map(str, points)).values()) == 1
    assert set(map(str, matrix())) <= set(map(str, matrix(every=True)))
    by_task = Counter((point.victim, point.task) for point in matrix(every=True) if not point.form)
    assert len(by_task) == (len(VICTIMS) + len(NEIGHBOURS)) * len((*TASKS, EVALUATE))
    drawn = list(islice(at_random(0, 3), 500))
    assert {point.victim for point in drawn} == set(VICTIMS)
    assert {point.task for point in drawn} == {*TASKS, EVALUATE}


def test_the_matrix_and_the_random_kills_have_every_form_of_the_run() -> None:
    pipeline = {"ahead", "evaluation_ahead", "sent_again", "retracted", "tool_ahead", "eager"}
    assert set(FORMS) == {
        *SESSIONS,
        *pipeline,
        "deferred",
        "deferred_ahead",
        "deferred_shards",
        "sent_again_shards",
        "eager_shards",
        "flushed",
        "fsdp",
        "levels",
        "passes",
        "pictures",
        "sent_seldom",
        "reuse",
        "remote_reward",
        "shards",
        "two_nodes",
        "evaluation",
    }
    own = {(name, victim) for name, form in FORMS.items() for victim in form.own_victims}
    shards = {
        (form, victim)
        for form in ("shards", "deferred_shards", "eager_shards")
        for victim in ("shard", "board")
    }
    shards.add(("sent_again_shards", "shard"))
    assert own == {*shards, *(("two_nodes", victim) for victim in ("node", "shard", "board"))}
    for points in (matrix(), matrix(every=True)):
        dying = {(point.form, point.victim) for point in points if point.form}
        assert dying == {*product(FORMS, VICTIMS), *own} - {("two_nodes", "ray")}  # its user's, as its nodes
        for name, form in FORMS.items():
            places = {(p.task, p.when) for p in points if p.form == name and p.victim == "driver"}
            assert len(places) >= (2 if name in SESSIONS else 3), f"{name} is hardly killed at all"
            assert places == {*form.driver_dies, (form.all_die_in, "in")}
    assert {point.form for point in islice(at_random(0, 3), 500)} == {"", *FORMS}
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert [name for name in FORMS if f"`{name}`" not in page] == []


def test_a_remote_reward_fails_for_the_same_samples_however_often_it_is_asked() -> None:
    samples = [{"prompt": f"{number}+1=", "response": str(number)} for number in range(4000)]
    failing = [sample for sample in samples if fails(sample)]
    assert failing == [sample for sample in samples if fails({**sample, "metadata": {"again": True}})]
    assert len(failing) / len(samples) == pytest.approx(FAILING, abs=0.01)


@pytest.mark.parametrize("off_s", sorted({off_s for off_s, _ in CLOCKS.values()}))
def test_a_clock_that_is_off_moves_what_python_reads(off_s: int) -> None:
    code = (
        "import time, datetime, pickle; from datetime import UTC\n"
        "now = datetime.datetime.now(UTC)\n"
        "assert type(now) is datetime.datetime and pickle.loads(pickle.dumps(now)) == now\n"
        "print(time.time(), time.time_ns() / 1e9, now.timestamp(), datetime.datetime.now().timestamp())"
    )
    variables = {**os.environ, "PYTHONPATH": str(CLOCK), "MILLRACE_SOAK_CLOCK_S": str(off_s)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert [float(text) - time.time() for text in out.stdout.split()] == pytest.approx([off_s] * 4, abs=60)


def test_a_point_that_a_machine_cannot_try_is_named_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no unshare
    site = Site(Workplace(tmp_path), whole=tmp_path)
    outcome = site.kill(Point("namespace", "reward", "in"))
    assert "no PID namespaces here" in outcome.skipped
    assert judge([Outcome(Point("driver", "reward", "in")), outcome]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 points held" in said
    assert "skipped: namespace-in-reward-1-sync: no PID namespaces here" in said
    assert judge([Outcome(Point("driver", "reward", "in"))]) == 0


class OnPaper(Site):
    """A workplace whose kills are only noted; its first one ends once all others have been made."""

    made: list[str]
    all_others: threading.Event | None = None

    def kill(self, point: Point) -> Outcome:
        """Note it."""
        if self.all_others is not None:
            assert self.all_others.wait(60), "its other points were not made elsewhere"
        self.made.append(str(point))
        return Outcome(point)

    def close(self) -> None:
        """Nothing runs here."""


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_slow_workplace_holds_up_no_other_and_each_point_is_made_once(tmp_path: Path) -> None:
    points = matrix()[:5]
    left: SimpleQueue[Point] = SimpleQueue()
    for point in points:
        left.put(point)
    slow, fast = [OnPaper(Workplace(_made(tmp_path / name))) for name in ("slow", "fast")]
    slow.made, fast.made, slow.all_others = [], [], threading.Event()
    results = Results(tmp_path / "out.json")
    beside = threading.Thread(target=work, args=(slow, left, results))
    beside.start()
    wait_until(lambda: left.qsize() < len(points))
    work(fast, left, results)
    slow.all_others.set()
    beside.join()
    assert len(slow.made) == 1
    assert sorted([*slow.made, *fast.made]) == sorted(map(str, points))
    assert {each["name"] for each in json.loads((tmp_path / "out.json").read_text())} == {*map(str, points)}


def test_the_draws_of_strikes_have_every_form_part_and_blow() -> None:
    made = [draws.drawn(0, number) for number in range(1000)]
    assert {(draw.form, draw.dynamic) for draw in made} == {("", False), ("", True)} | {
        (form, False) for form in FORMS
    }
    strikes = [strike for draw in made for strike in draw.strikes]
    ray = {"gcs", "raylet", "ray"}  # its processes
    assert {strike.part for strike in strikes} == ({*VICTIMS, *OWN_VICTIMS} - {"terminal", "node"}) | ray
    assert {strike.blow for strike in strikes} == set(draws.BLOWS)
    assert all(strike.part in draws.parts_of(draw.form) for draw in made for strike in draw.strikes)
    only = [draws.drawn(0, number, ["shard"], ["shards"]) for number in range(20)]
    assert {(draw.form, strike.part) for draw in only for strike in draw.strikes} == {("shards", "shard")}
    assert made[7] == draws.drawn(0, 7)


def test_the_draws_of_failing_stores_have_every_fault_and_each_has_late_listings() -> None:
    made = [stores.drawn(0, number) for number in range(500)]
    assert {kind for draw in made for kind in draw.rates} == set(stores.RATES)
    assert {*stores.RATES} == {field.name for field in fields(Odds) if field.type == "float"}
    assert all({"stale", "hidden"} & {*draw.rates} for draw in made)
    assert {draw.form for draw in made} == {"", *stores.COMPARED}
    assert {len(draw.kills) for draw in made} == {0, 1, 2}
    assert made[7] == stores.drawn(0, 7)


def test_tries_are_spread_over_jobs_and_one_that_falls_ends_the_command_with_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = jobs.parser_of("x", "").parse_args(
        [
            "--runs",
            "5",
            "--jobs",
            "2",
            "--folder",
            str(tmp_path / "here"),
            "--out",
            str(tmp_path / "out.json"),
        ]
    )
    assert jobs.spread(falling_site, arguments) == 1
    said = capfd.readouterr().out
    assert "5 tries: 3 held, 1 named error, 1 FELL" in said
    tries = json.loads((tmp_path / "out.json").read_text())
    assert {(each["number"], each["verdict"]) for each in tries} == {
        (0, jobs.HELD),
        (1, jobs.HELD),
        (2, jobs.HELD),
        (3, jobs.NAMED),
        (4, jobs.FELL),
    }


@contextlib.contextmanager
def falling_site(_folder: Path, _arguments: argparse.Namespace) -> Iterator[Callable[[int], jobs.Try]]:
    """Where the fourth try ends with an error that is named, and the fifth falls."""
    yield lambda number: jobs.Try(
        number, "drawn", {3: jobs.NAMED, 4: jobs.FELL}.get(number, jobs.HELD), "", 0.0
    )


def test_two_versions_of_the_code_are_compared_by_every_number_of_every_run() -> None:
    assert {*FORMS} - {*numbers.RUNS} == {name for name, form in FORMS.items() if form.two_nodes}
    one = {"plain": {"weights": "a", "step loss": "b"}, "retracted": {"weights": "a"}}
    assert numbers.differing(one, one) == []
    other = {"plain": {"weights": "a", "step loss": "c", "step lr": "d"}, "retracted": {"weights": "b"}}
    assert numbers.differing(one, other) == ["plain: step loss differs", "plain: step lr differs"] + (
        [] if "retracted" in numbers.REPLAYED else ["retracted: weights differs"]
    )
    assert numbers.differing(one, {"plain": one["plain"]}) == ["retracted: only one of both has it"]
