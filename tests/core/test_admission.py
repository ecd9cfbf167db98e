"""How many samples may be in flight, by how full engines are: each rule of the state machine, and runs of a simulated engine."""

from __future__ import annotations

import random

import pytest

from millrace.core.admission import FULL, GROWTH, PATIENCE, ROOM, Admission, EngineLoad

KNOWN = Admission(bound=100, longest=1000, limit=20, known=True)


def load(used: float, running: int = 20, waiting: int = 0, retracted: int = 0) -> EngineLoad:
    return EngineLoad(used, 16_000, running, waiting, retracted)


def test_growth_alone_never_makes_the_limit_fall() -> None:
    assert ROOM * GROWTH < FULL


@pytest.mark.parametrize(
    ("bound", "part", "limit"), [(100, 1.0, 32), (10, 1.0, 10), (100, 0.25, 8), (100, 0.01, 1)]
)
def test_the_first_limit_is_what_the_caches_hold_of_longest_samples(
    bound: int, part: float, limit: int
) -> None:
    start = Admission(bound, 1000, part)
    assert start.limit == 1
    assert start.after([], 1, 0, True) == start
    assert start.after([load(0.0), load(0.0)], 1, 0, True).limit == limit


RULES = {
    # readings, in flight, ended, waiting -> limit
    "all hold samples back, and turned over": ([load(0.5), load(0.6)], 20, 20, True, 24),
    "not turned over": ([load(0.5)], 20, 19, True, 20),
    "nothing waits": ([load(0.5)], 10, 20, False, 20),
    "one is not below ROOM": ([load(0.5), load(0.7)], 20, 20, True, 20),
    "between ROOM and FULL": ([load(0.8)], 20, 40, True, 20),
    "above FULL": ([load(0.95), load(0.2)], 20, 20, True, 14),
    "above FULL, and still draining": ([load(0.95)], 25, 20, True, 20),
    "retracted": ([load(0.5, retracted=1)], 20, 20, True, 14),
    "a queue, for one reading": ([load(0.5, 10, 6)], 20, 20, True, 20),
    "a lone sample": ([load(1.0)], 1, 0, True, 1),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule(rule: str) -> None:
    loads, in_flight, ended, waiting, limit = RULES[rule]
    assert KNOWN.after(loads, in_flight, ended, waiting).limit == limit


def test_a_queue_that_stands_takes_what_waits_from_the_limit() -> None:
    state = KNOWN
    for _ in range(PATIENCE - 1):
        state = state.after([load(0.5, 10, 6)], 20, 0, True)
        assert state.limit == 20
    assert state.after([load(0.5, 10, 5)], 20, 0, True).after([load(0.5, 10, 6)], 20, 0, True).limit == 20
    assert state.after([load(0.5, 10, 6)], 20, 0, True).limit == 14


def test_samples_that_ended_count_since_the_limit_changed() -> None:
    state = KNOWN.after([load(0.5)], 20, 12, True).after([load(0.5)], 20, 8, True)
    assert state.limit == 24
    assert state.after([load(0.5)], 24, 23, True).limit == 24


def test_a_cache_that_was_full_in_between_counts_for_one_time() -> None:
    state = KNOWN.after([load(0.8)], 20, 5, True).after([load(0.1)], 20, 15, True)
    assert (state.limit, state.ended) == (20, 0)
    assert state.after([load(0.1)], 20, 20, True).limit == 24


def test_the_limit_stays_between_one_and_its_bound() -> None:
    draw = random.Random(7)
    for _ in range(200):
        state = Admission(draw.randint(1, 500), draw.randint(10, 5000))
        for _ in range(30):
            reading = load(draw.random(), draw.randint(0, 50), draw.randint(0, 50))
            state = state.after([reading], draw.randint(0, state.limit), draw.randint(0, 600), True)
            assert 1 <= state.limit <= state.bound


@pytest.mark.parametrize("length", [100, 400, 900])
def test_an_engine_fills_up_and_retracts_nothing(length: int) -> None:
    """Samples of one length, a token a reading. They started together and stay together: caches fill up, and empty again."""
    capacity, state = 16_000, Admission(bound=1000, longest=1000)
    ages: list[int] = []
    used, ended = [0.0], 0
    for _ in range(60 * length):
        state = state.after([EngineLoad(used[-1], capacity, len(ages), 0)], len(ages), ended, True)
        started = min(state.limit - len(ages), 1 + state.limit // length)
        ages = [age + 1 for age in ages] + [1] * max(0, started)
        ended = sum(age >= length for age in ages)
        ages = [age for age in ages if age < length]
        used.append(sum(ages) / capacity)
    assert max(used) < 1
    assert max(used[-2 * length :]) > 0.65
