"""Engines of a replay: requests share an engine's speed equally, further ones wait in line."""

import heapq
import math
from dataclasses import dataclass, field

from millrace.flows.planning.recorded import Speed


@dataclass(eq=False)
class SimulatedRequest:
    """One request of the group with this number. done: tokens so far; versions: tokens by the weights that made them."""

    group: int
    tokens: int
    done: float = 0.0
    versions: dict[int, float] = field(default_factory=dict)
    begun: float = 0.0  # its engine's work at its start, or at the last change of weights
    whole: bool = False

    @property
    def left(self) -> float:
        """Tokens to make."""
        return self.tokens - self.done


class SimulatedEngine:
    """One engine at a time of the replay. Work counts the tokens that each running request has made since the replay's start."""

    def __init__(self, speed: Speed, places: int) -> None:
        self._speed, self._places = speed, places
        self._work = 0.0
        self._tokens = 0.0  # tokens that the running requests have
        self._running: list[
            tuple[float, int, SimulatedRequest]
        ] = []  # requests by the work at which each is finished
        self._waiting: list[tuple[tuple[int, int], SimulatedRequest]] = []
        self._reading_s = 0.0  # seconds of reading before it makes tokens
        self._count = 0
        self._paused = 0
        self.version = 0
        self.busy_s = 0.0

    @property
    def load(self) -> int:
        """Running and waiting requests."""
        return len(self._running) + len(self._waiting)

    def put(self, answer: SimulatedRequest, priority: tuple[int, int]) -> None:
        """Take a request: lower priorities go first, and no two are equal."""
        heapq.heappush(self._waiting, (priority, answer))
        self._fill()

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which no request finishes."""
        if self._running and not self._paused:
            self.busy_s += seconds
            read = min(seconds, self._reading_s)
            self._reading_s -= read
            made = self._speed.made_in(seconds - read, len(self._running), self._tokens)
            self._work += made
            self._tokens += made * len(self._running)

    def next_s(self) -> float:
        """Seconds until a request finishes; infinite if none runs."""
        if not self._running or self._paused:
            return math.inf
        left = max(0.0, self._running[0][0] - self._work)
        return self._reading_s + self._speed.time_of(left, len(self._running), self._tokens)

    def take_whole(self) -> list[SimulatedRequest]:
        """Remove and return the finished requests. Waiting ones take their places."""
        found = []
        while self._running and self._running[0][0] - self._work <= 1e-9 * max(1.0, self._work):
            _, _, answer = heapq.heappop(self._running)
            self._note(answer)
            answer.done, answer.whole = answer.tokens, True
            self._tokens -= answer.tokens
            found.append(answer)
        if found:
            self._fill()
        return found

    def pause(self) -> None:
        """Pause until `serve` or `go_on`."""
        self._paused += 1

    def serve(self, version: int, recompute: bool) -> None:
        """Continue with new weights. recompute: read the running requests' tokens again."""
        for _, _, answer in self._running:
            self._note(answer)
        if recompute:
            self._read(self._tokens)
        self.version = version
        self._paused -= 1

    def go_on(self) -> None:
        """Continue with the same weights."""
        self._paused -= 1

    def cut(self, groups: set[int]) -> None:
        """Abort the requests of some groups; they keep their tokens."""
        for _, _, answer in self._running:
            if answer.group in groups:
                self._note(answer)
                self._tokens -= answer.done
        self._running = [entry for entry in self._running if entry[2].group not in groups]
        heapq.heapify(self._running)
        self._waiting = [entry for entry in self._waiting if entry[1].group not in groups]
        heapq.heapify(self._waiting)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._places:
            _, answer = heapq.heappop(self._waiting)
            answer.begun = self._work
            self._tokens += answer.done
            self._read(answer.done)
            self._count += 1
            heapq.heappush(self._running, (self._work + answer.left, self._count, answer))

    def _read(self, tokens: float) -> None:
        """Read tokens before generating: a token costs as much as one more running request."""
        self._reading_s += self._speed.each * tokens

    def _note(self, answer: SimulatedRequest) -> None:
        """Count the tokens of a running request since its start or the last change of weights."""
        made = self._work - answer.begun
        answer.versions[self.version] = answer.versions.get(self.version, 0.0) + made
        answer.done += made
        answer.begun = self._work
