"""The life of one engine as a pure state machine: what happened to it decides whether it may serve.

Owns states and transitions; knows nothing of processes, requests or clocks. An engine serves a weight version only
after it confirmed that version, whatever happened before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where an engine is in its life."""

    DEAD = "dead"  # no process, or one that must not be used any more
    STARTING = "starting"  # a process that has not answered yet
    REFITTING = "refitting"  # answers, but has not confirmed the weights it is meant to have
    SERVING = "serving"  # has confirmed a version
    SUSPECT = "suspect"  # a request was lost on it


class Event(StrEnum):
    """What can happen to an engine."""

    STARTED = "started"  # its process was started
    ANSWERED = "answered"  # it answers to health questions
    CONFIRMED = "confirmed"  # it said which version it serves
    REFIT = "refit"  # other weights are about to be given to it
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
    """State of one engine; `version` is what it confirmed, None unless it serves."""

    state: State = State.DEAD
    version: int | None = None

    def after(self, event: Event, version: int | None = None) -> EngineHealth:
        """The state after an event. Raises ValueError for what cannot happen in this one."""
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
        """Whether it may hold GPU memory that another is to have; one that lost a request does."""
        return self.state in (State.SERVING, State.REFITTING, State.SUSPECT)

    def serves(self, version: int) -> bool:
        """Whether requests for a weight version may go there."""
        return self.state is State.SERVING and self.version == version
