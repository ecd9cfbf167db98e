"""The life of one engine as a pure state machine: what happened to it decides whether it may serve.

Owns states and transitions; knows nothing of processes, requests or clocks. An engine serves a weight version only
after it confirmed that version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """The states of an engine."""

    DEAD = "dead"  # no process, or a process that must not be used any more
    STARTING = "starting"  # a process that has not answered yet
    REFITTING = "refitting"  # answers, but has not confirmed the weights it should have
    SERVING = "serving"  # has confirmed a version
    SUSPECT = "suspect"  # a request was lost on it


class EngineEvent(StrEnum):
    """The events of an engine."""

    STARTED = "started"  # its process was started
    ANSWERED = "answered"  # it answers to health questions
    CONFIRMED = "confirmed"  # it reported which version it serves
    REFIT = "refit"  # it is about to get other weights
    LOST_REQUEST = "lost_request"
    DIED = "died"


TRANSITIONS: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (EngineState.DEAD, EngineEvent.STARTED): EngineState.STARTING,
    (EngineState.STARTING, EngineEvent.ANSWERED): EngineState.REFITTING,
    (EngineState.REFITTING, EngineEvent.ANSWERED): EngineState.REFITTING,
    (EngineState.REFITTING, EngineEvent.REFIT): EngineState.REFITTING,
    (EngineState.REFITTING, EngineEvent.CONFIRMED): EngineState.SERVING,
    (EngineState.REFITTING, EngineEvent.LOST_REQUEST): EngineState.SUSPECT,
    (EngineState.SERVING, EngineEvent.ANSWERED): EngineState.SERVING,
    (EngineState.SERVING, EngineEvent.REFIT): EngineState.REFITTING,
    (EngineState.SERVING, EngineEvent.LOST_REQUEST): EngineState.SUSPECT,
    (EngineState.SUSPECT, EngineEvent.ANSWERED): EngineState.REFITTING,
    (EngineState.SUSPECT, EngineEvent.LOST_REQUEST): EngineState.SUSPECT,
    (EngineState.SUSPECT, EngineEvent.REFIT): EngineState.SUSPECT,
    (EngineState.DEAD, EngineEvent.LOST_REQUEST): EngineState.DEAD,
    **{(state, EngineEvent.DIED): EngineState.DEAD for state in EngineState},
}


@dataclass(frozen=True)
class EngineHealth:
    """State of one engine; `version`: the confirmed one, None unless it serves."""

    state: EngineState = EngineState.DEAD
    version: int | None = None

    def after(self, event: EngineEvent, version: int | None = None) -> EngineHealth:
        """The state after an event. Raises ValueError for an event that cannot happen in this state."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise ValueError(f"an engine that is {self.state} cannot be {event}")
        if (event is EngineEvent.CONFIRMED) != (version is not None):
            raise ValueError("a version comes with a confirmation, and only with one")
        if event is EngineEvent.CONFIRMED:
            return EngineHealth(following, version)
        return EngineHealth(following, self.version if following is EngineState.SERVING else None)

    @property
    def holds_memory(self) -> bool:
        """Whether it may hold GPU memory that the trainer needs; an engine that lost a request may."""
        return self.state in (EngineState.SERVING, EngineState.REFITTING, EngineState.SUSPECT)

    def serves(self, version: int) -> bool:
        """Whether requests for a weight version may go to it."""
        return self.state is EngineState.SERVING and self.version == version
