"""Of many engines the least loaded one, as a look at each of them would find it."""

from __future__ import annotations

import random

from millrace.connectors.engines.dispatcher import LeastLoad, until_changed
from millrace.connectors.engines.sglang.client import SglangClient


def engines_of(count: int) -> list[SglangClient]:
    return [SglangClient("http://nowhere", f"engine-{index}") for index in range(count)]


def test_the_choice_is_that_of_a_look_at_every_engine() -> None:
    engines, draw = engines_of(20), random.Random(7)
    least, running = LeastLoad(engines), []
    for _ in range(3000):
        if running and draw.random() < 0.5:
            done = running.pop(draw.randrange(len(running)))
            done.in_flight -= 1
            least.ended(done)
            continue
        fewest = min(engine.in_flight for engine in engines)
        chosen = least.choose()
        assert chosen.in_flight == fewest
        chosen.in_flight += 1
        running.append(chosen)


def test_equally_loaded_engines_are_taken_in_the_order_of_their_ids() -> None:
    engines = engines_of(3)
    least = LeastLoad(engines[::-1])
    for wanted in (0, 1, 2, 0):
        chosen = least.choose()
        assert chosen is engines[wanted]
        chosen.in_flight += 1


def test_requests_that_others_send_and_end_are_seen_soon() -> None:
    engines = engines_of(10)
    for engine in engines:
        engine.in_flight = 50
    least = LeastLoad(engines)
    least.choose()
    engines[7].in_flight = 0  # behind its back
    assert engines[7] in [least.choose() for _ in range(10)]


def test_a_choice_does_not_look_at_every_engine() -> None:
    """With a thousand engines it took a millisecond a request."""
    looks = 0

    class Counting(SglangClient):
        @property
        def in_flight(self) -> int:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return self.load

        @in_flight.setter
        def in_flight(self, value: int) -> None:
            self.load = value

    engines: list[SglangClient] = [Counting("http://nowhere", f"engine-{index}") for index in range(1000)]
    least = LeastLoad(engines)
    for _ in range(5000):
        chosen = least.choose()
        chosen.in_flight += 1
        chosen.in_flight -= 1
        least.ended(chosen)
    assert looks < 12 * 5000


def test_engines_are_found_again_when_something_changed() -> None:
    changes, found = 0, 0

    def find() -> list[SglangClient]:
        nonlocal found
        found += 1
        return engines_of(2)

    serving = until_changed(lambda: changes, find)
    first = serving()
    assert serving() is first
    changes += 1
    assert serving() is not first
    assert found == 2


def test_an_engine_that_another_of_its_name_has_replaced_is_never_chosen() -> None:
    """Its lost request ended after the new one was there: both stood in the heap, which cannot order two engines."""
    lost, engines = engines_of(1)[0], engines_of(2)
    least = LeastLoad(engines)
    for _ in range(4):
        least.choose().in_flight += 1
    lost.in_flight = engines[0].in_flight
    least.ended(lost)
    least.ended(engines[0])
    assert all(least.choose() in engines for _ in range(20))
    assert lost not in [least.choose() for _ in range(20)]
