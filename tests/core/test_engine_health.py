"""The state machine of an engine, as a table and over random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.engine_health import TRANSITIONS, EngineEvent, EngineHealth, EngineState

EVENTS = st.lists(st.tuples(st.sampled_from(list(EngineEvent)), st.integers(0, 3)), max_size=30)


def told(health: EngineHealth, event: EngineEvent, version: int) -> EngineHealth:
    return health.after(event, version if event is EngineEvent.CONFIRMED else None)


@pytest.mark.parametrize("state", EngineState)
@pytest.mark.parametrize("event", EngineEvent)
def test_every_event_in_every_state_follows_the_table_or_is_refused(
    state: EngineState, event: EngineEvent
) -> None:
    health = EngineHealth(state, 5 if state is EngineState.SERVING else None)
    if (state, event) in TRANSITIONS:
        assert told(health, event, 5).state is TRANSITIONS[state, event]
    else:
        with pytest.raises(ValueError, match="cannot be"):
            told(health, event, 5)


def test_the_whole_life() -> None:
    health = EngineHealth()
    for event, expected in [
        (EngineEvent.STARTED, EngineState.STARTING),
        (EngineEvent.ANSWERED, EngineState.REFITTING),
        (EngineEvent.REFIT, EngineState.REFITTING),
        (EngineEvent.CONFIRMED, EngineState.SERVING),
        (EngineEvent.LOST_REQUEST, EngineState.SUSPECT),
        (EngineEvent.ANSWERED, EngineState.REFITTING),
        (EngineEvent.CONFIRMED, EngineState.SERVING),
        (EngineEvent.REFIT, EngineState.REFITTING),
        (EngineEvent.DIED, EngineState.DEAD),
    ]:
        health = told(health, event, 1)
        assert health.state is expected


@given(EVENTS)
def test_an_engine_serves_only_what_it_confirmed_since_anything_else_happened(
    events: list[tuple[EngineEvent, int]],
) -> None:
    health, confirmed = EngineHealth(), None
    for event, version in events:
        try:
            health = told(health, event, version)
        except ValueError:
            continue
        if event is EngineEvent.CONFIRMED:
            confirmed = version
        elif event is not EngineEvent.ANSWERED:
            confirmed = None
        assert [v for v in range(4) if health.serves(v)] == ([] if confirmed is None else [confirmed])
        assert (health.version is None) == (health.state is not EngineState.SERVING)


def test_a_version_comes_with_a_confirmation_only() -> None:
    ready = EngineHealth(EngineState.REFITTING)
    with pytest.raises(ValueError, match="only with one"):
        ready.after(EngineEvent.CONFIRMED)
    with pytest.raises(ValueError, match="only with one"):
        ready.after(EngineEvent.ANSWERED, 3)
