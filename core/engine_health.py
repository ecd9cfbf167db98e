"""The life of one engine as a pure state machine: what happened to it decides whether it may serve.

Owns states and transitions; knows nothing of processes, requests or clocks. An engine serves a weight version only
after it confirmed that version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The states of an engine."""

    DEAD = "dead"  # no process, or a process that must not be used any more
    STARTING = "starting"  # a process that has not answered yet
    REFITTING = "refitting"  # answers, but has not confirmed the weights it should have
    SERVING = "serving"  # has confirmed a version
    SUSPECT = "suspect"  # a request was lost on it


class Event(StrEnum):
    """The events of an engine."""

    STARTED = "started"  # its process was started
    ANSWERED = "answered"  # it answers to health questions
    CONFIRMED = "confirmed"  # it reported which version it serves
    REFIT = "refit"  # it is about to get other weights
    LOST_REQUEST = "lost_request"
    DIED = "died"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.DEAD, Event.STARTED): State.STARTING,
    (State.STARTING, Event.ANSWERED): State.REFITTING,
    (State.REFITTING, Event.ANSWERED): State.REFITTING,
    (State.REFITTING, Event.REFIT): State.REFITTING,
    (State.REFITTING, Event.CONFIRMED): State.SERVING,
    (State.REFITTING, Event.LOST_REQUEST): State.SUSPECT,
    (State.SERVING, Event.ANSWERED): State.SERVING,
    (State.SERVING, Event.REFIT): State.REFITTING,
    (State.SERVING, Event.LOST_REQUEST): State.SUSPECT,
    (State.SUSPECT, Event.ANSWERED): State.REFITTING,
    (State.SUSPECT, Event.LOST_REQUEST): State.SUSPECT,
    (State.SUSPECT, Event.REFIT): State.SUSPECT,
    (State.DEAD, Event.LOST_REQUEST): State.DEAD,
    **{(state, Event.DIED): State.DEAD for state in State},
}


@dataclass(frozen=True)
class EngineHealth:
    """State of one engine; `version`: the confirmed one, None unless it serves."""

    state: State = State.DEAD
    version: int | None = None

    def after(self, event: Event, version: int | None = None) -> EngineHealth:
        """The state after an event. Raises ValueError for an event that cannot happen in this state."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise ValueError(f"an engine that is {self.state} cannot be {event}")
        if (event is Event.CONFIRMED) != (version is not None):
            raise ValueError("a version comes with a confirmation, and only with one")
        if event is Event.CONFIRMED:
            return EngineHealth(following, version)
        return EngineHealth(following, self.version if following is State.SERVING else None)

    @property
    def holds_memory(self) -> bool:
        """Whether it may hold GPU memory that the trainer needs; an engine that lost a request may."""
        return self.state in (State.SERVING, State.REFITTING, State.SUSPECT)

    def serves(self, version: int) -> bool:
        """Whether requests for a weight version may go to it."""
        return self.state is State.SERVING and self.version == version
