"""The replay against times that follow by hand, the planner's rule, and what a fit of engines' speed finds again."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from millrace.flows.planning.compare import ComparedWay, Machine, RecordedRun, calibrated, verdicts, ways
from millrace.flows.planning.engines import SimulatedEngine, SimulatedRequest
from millrace.flows.planning.pipeline import Mode, SimulatedLayout, SimulatedRun, replay
from millrace.flows.planning.recorded import Group, RecordedRequest, Seconds, Speed, fit_speed

EVEN = [Group((100, 100)) for _ in range(8)]
PHASES = Seconds(draw=0.1, ready=0.2, score=0.3, train=3, sync=0.5, checkpoint=0.4, evaluate=0.25, rest=0.25)
A_SECOND = Speed(0.01, 0.0)  # for 100 tokens


def layout(seconds: Seconds, speed: Speed = A_SECOND, engines: int = 1, places: int = 100) -> SimulatedLayout:
    return SimulatedLayout(engines, places, speed, seconds)


@pytest.mark.parametrize(
    ("seconds", "mode", "expected"),
    [
        (PHASES, Mode(), 6.0),  # the sum of all, with one second of generation
        (PHASES, Mode(1, 1), 3.9),  # the trainer: training, sync, checkpoint
        (PHASES, Mode(1, 1, drain=True), 3.9),
        (replace(PHASES, train=0, sync=0, checkpoint=0), Mode(), 2.1),
        (replace(PHASES, train=0, sync=0, checkpoint=0), Mode(0, 1, "finish"), 2.1),
        (Seconds(train=1), Mode(), 2.0),
        (Seconds(train=1), Mode(1, 1), 1.0),
        (Seconds(train=0.5), Mode(1, 1), 1.0 / 2 + 0.25),  # two open at once: 1.5 s for both
        (Seconds(train=0.5), Mode(2, 2), 0.5),
    ],
)
def test_the_time_of_an_iteration_follows_from_its_phases(
    seconds: Seconds, mode: Mode, expected: float
) -> None:
    assert replay(EVEN, 8, layout(seconds), mode).iteration_s == pytest.approx(expected)


def test_idle_shares_and_ages_follow_too() -> None:
    turns = replay(EVEN, 8, layout(Seconds(train=3)), Mode())
    assert turns.trainer_idle == pytest.approx(0.25)
    assert turns.engines_idle == pytest.approx(0.75)
    assert (turns.age_mean, turns.age_max) == (0.0, 0)
    ahead = replay(EVEN, 8, layout(Seconds(train=3)), Mode(1, 1))
    assert ahead.trainer_idle == pytest.approx(0.0)
    assert ahead.engines_idle == pytest.approx(2 / 3)
    assert (ahead.age_mean, ahead.age_max) == (1.0, 1)


def test_requests_share_an_engine_and_wait_for_a_place() -> None:
    shared = replay(EVEN, 8, layout(Seconds(), Speed(0.0, 0.001)), Mode())
    assert shared.iteration_s == pytest.approx(1.6)  # 16 requests of 100 tokens, 1,000 tokens a second
    two = replay(EVEN, 8, layout(Seconds(), Speed(0.0, 0.001), engines=2), Mode())
    assert two.iteration_s == pytest.approx(0.8)
    waves = replay(EVEN, 8, layout(Seconds(), places=4), Mode())
    assert waves.iteration_s == pytest.approx(4.0)


def test_for_each_dropped_group_one_more_generates() -> None:
    groups = [Group((100,)), Group((100,), kept=False)]
    assert replay(groups, 2, layout(Seconds()), Mode()).iteration_s > 1.5
    with pytest.raises(ValueError, match="no group is kept"):
        replay([Group((1,), kept=False)], 1, layout(Seconds()), Mode())


def test_groups_that_finish_first_save_the_tail() -> None:
    """One long answer in eight groups: waited for in turns, deferred where the reserve fills the batch."""
    long = [*EVEN[:7], Group((400, 100))]
    turns = replay(long, 8, layout(Seconds(train=0.1)), Mode())
    first = replay(long, 8, layout(Seconds(train=0.1)), Mode(0, 1, "finish", 0.25))
    assert turns.iteration_s == pytest.approx(4.1)
    assert first.iteration_s < 3.2
    assert first.age_max == 1


@pytest.mark.parametrize(
    ("ahead", "staleness", "select", "drain"),
    [
        (ahead, ahead + more, select, drain)
        for ahead, more, (select, drain) in itertools.product(
            (0, 1, 2), (0, 1, 2), (("draw", False), ("draw", True), ("finish", False))
        )
        if select == "finish" or not more
    ],
)
def test_no_token_is_older_than_the_bound(ahead: int, staleness: int, select: str, drain: bool) -> None:
    chance = random.Random(0)
    groups = [
        Group(tuple(int(chance.lognormvariate(4, 1)) + 1 for _ in range(4)), chance.random() < 0.8)
        for _ in range(60)
    ]
    mode = Mode(ahead, staleness, select, 0.25, drain)  # type: ignore[arg-type]
    found = replay(
        groups, 8, layout(Seconds(train=0.7, sync=0.1), Speed(0.004, 0.0005), engines=2, places=12), mode
    )
    assert found.age_max <= staleness
    assert 0 <= found.trainer_idle <= 1
    assert 0 <= found.engines_idle <= 1


def recorded(train: float, speed: Speed, groups: list[Group]) -> RecordedRun:
    """On one shared GPU."""
    machine = Machine(1, 1, 1, colocated=True, places=1000)
    return RecordedRun(groups, 8, Seconds(train=train), speed, machine, 0.0)


def best(rows: list[ComparedWay], layout: str) -> float:
    return min(
        row.outcome.iteration_s
        for row in rows
        if row.layout == layout and (row.colocated or row.mode.ahead) and row.mode.select == "draw"
    )


def test_two_gpus_and_no_tail_asynchrony_is_slower_and_four_gpus_help_with_one() -> None:
    """Generation to training as 70 to 30: shared, 0.5 of their sum on two GPUs; apart, 0.7, where no answer is read again."""
    full = recorded(3.0, Speed(0.0, 7.0 / 1600), EVEN)  # throughput does not depend on the number of requests
    rows = list(ways(full, 8, Mode(1, 1, recompute=False)))
    shared = [row for row in rows if row.colocated and row.gpus == 2 and row.mode == Mode()]
    assert shared[0].outcome.iteration_s == pytest.approx(5.0)
    assert best(rows, "1 + 1") == pytest.approx(7.0, rel=0.05)
    assert verdicts(rows)[0].startswith(
        "2 GPUs: asynchrony is slower. 1 + 1 (ahead 1, staleness 1, draw) takes 1.4"
    )
    tail = [Group((100, 1000))] + [
        Group((100, 100)) for _ in range(7)
    ]  # one answer that occupies a GPU alone
    rows = list(ways(recorded(3.0, Speed(0.006, 0.0002), tail), 8))
    assert verdicts(rows)[1].startswith("4 GPUs: asynchrony is faster. ")


def test_new_weights_read_the_answers_under_way_again() -> None:
    """Eight requests an iteration on one engine, one ahead: each sync finds the next iteration's with some of their tokens."""
    once = Seconds(train=0.5)
    speed = Speed(0.01, 0.0002)
    kept, again = (
        replay(EVEN, 8, layout(once, speed), Mode(1, 1, recompute=recompute)).iteration_s
        for recompute in (False, True)
    )
    assert kept < again < kept + 0.0002 * 16 * 100  # as if none of their tokens were left
    drained = [
        replay(EVEN, 8, layout(once, speed), Mode(1, 1, drain=True, recompute=recompute)).iteration_s
        for recompute in (False, True)
    ]
    assert drained[0] == drained[1], "none is under way then"


def test_an_answer_that_was_cut_is_read_before_it_goes_on() -> None:
    """A token read takes as long as one more running request: 0.001 s. One made takes 0.011 s."""
    engine, answer = SimulatedEngine(Speed(0.01, 0.001), places=2), SimulatedRequest(0, 1000)
    engine.put(answer, (0, 0))
    assert engine.next_s() == pytest.approx(11.0)
    engine.pass_time(5.5)
    engine.cut({0})
    assert answer.done == pytest.approx(500)
    engine.put(answer, (1, 0))
    assert engine.next_s() == pytest.approx(0.5 + 5.5)
    engine.pass_time(0.5)
    assert engine.next_s() == pytest.approx(5.5)
    engine.pause()
    engine.serve(1, recompute=True)
    assert engine.next_s() == pytest.approx(0.5 + 5.5)
    engine.pass_time(6.0)
    assert engine.take_whole() == [answer]
    assert answer.versions == pytest.approx({0: 500.0, 1: 500.0})
    assert engine.busy_s == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("shared_s", "split_s", "says"),
    [
        (
            10.0,
            14.0,
            "asynchrony is slower. 1 + 1 (ahead 1, staleness 1, draw) takes 1.40 times as long as colocated",
        ),
        (10.0, 10.4, "asynchrony is slower. "),
        (10.0, 10.2, "no difference to speak of. "),
        (10.0, 9.8, "no difference to speak of. "),
        (10.0, 9.6, "asynchrony is faster. "),
        (
            10.0,
            5.0,
            "asynchrony is faster. 1 + 1 (ahead 1, staleness 1, draw) takes 0.50 times as long as colocated",
        ),
    ],
)
def test_what_is_said_of_two_times(shared_s: float, split_s: float, says: str) -> None:
    def row(name: str, seconds: float, mode: Mode) -> ComparedWay:
        return ComparedWay(2, name, name == "colocated", mode, SimulatedRun(seconds, 0.0, 0.0, 1.0, 1))

    rows = [row("colocated", shared_s, Mode()), row("1 + 1", 1.0, Mode()), row("1 + 1", split_s, Mode(1, 1))]
    (said,) = verdicts(rows)
    assert said.startswith(f"2 GPUs: {says}")
    assert verdicts(rows[:1]) == []


def test_ways_are_those_that_engines_fit_and_the_one_that_is_wanted() -> None:
    of_two = replace(recorded(1.0, A_SECOND, EVEN), machine=Machine(1, 2, 2, True, 100))
    assert {row.layout for row in ways(of_two, 8)} == {"colocated", "3 + 1", "2 + 2"}
    wanted = Mode(1, 3, "finish", 0.5)
    modes = {(row.colocated, row.mode) for row in ways(recorded(1.0, A_SECOND, EVEN), 8, wanted)}
    assert (False, wanted) in modes
    assert (True, wanted) not in modes


def test_a_fit_finds_the_speed_that_made_the_intervals() -> None:
    speed, requests = Speed(0.01, 0.002), []
    for start, running in ((0.0, 1), (100.0, 4), (200.0, 16)):
        for _ in range(running):
            requests.append(RecordedRequest("e", (start, start + speed.time_of(50, running, 0)), 50))
    found = fit_speed(requests)
    assert found.base == pytest.approx(speed.base)
    assert found.each == pytest.approx(speed.each)
    assert found.context == 0
    assert fit_speed(requests[:1]).seconds(1, 0) == pytest.approx(0.012)
    with pytest.raises(ValueError, match="no answers"):
        fit_speed([RecordedRequest("e", (0.0, 1.0), 0)])


@pytest.mark.parametrize(("running", "tokens", "made"), [(1, 0.0, 1000.0), (64, 5000.0, 30.0), (3, 7.0, 0.5)])
def test_tokens_of_a_time_are_the_inverse_of_the_time_of_tokens(
    running: int, tokens: float, made: float
) -> None:
    for speed in (Speed(0.003, 0.0001), Speed(0.003, 0.0001, 1e-6), Speed(0.0, 0.0, 1e-6)):
        seconds = speed.time_of(made, running, tokens)
        assert speed.made_in(seconds, running, tokens) == pytest.approx(made)
        halves = speed.time_of(made / 2, running, tokens) + speed.time_of(
            made / 2, running, tokens + running * made / 2
        )
        assert halves == pytest.approx(seconds)


def test_a_fit_finds_what_long_contexts_cost() -> None:
    """Answers of many lengths that begin together, on an engine of a known speed."""
    speed, chance = Speed(0.003, 2e-5, 4e-8), random.Random(3)
    requests = []
    for start in (0.0, 1000.0, 2000.0):
        lengths = sorted(max(5, round(600 * chance.lognormvariate(0, 1))) for _ in range(64))
        now, made, running, tokens = start, 0, 64, 0.0
        for length in lengths:
            now += speed.time_of(length - made, running, tokens)
            tokens += running * (length - made) - length
            made, running = length, running - 1
            requests.append(RecordedRequest("e", (start, now), length))
    found = fit_speed(requests)
    for running, tokens in ((8, 20_000.0), (64, 20_000.0), (128, 100_000.0)):
        assert found.seconds(running, tokens) == pytest.approx(speed.seconds(running, tokens), rel=0.1)


def test_a_long_answer_counts_as_often_as_it_was_drawn() -> None:
    """Nineteen short iterations and a long one: their mean, whichever iterations the figures begin with."""
    groups = [Group((100,)) for _ in range(19)] + [Group((2000,))]
    assert replay(groups, 1, layout(Seconds()), Mode()).iteration_s == pytest.approx((19 * 1 + 20) / 20)


def test_calibrated_engines_take_the_time_that_was_measured() -> None:
    made = calibrated(recorded(1.0, Speed(0.003, 0.0001), EVEN), generation_s=5.0)
    assert replay(EVEN, 8, made.layout, Mode()).iteration_s == pytest.approx(6.0)
