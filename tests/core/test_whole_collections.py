"""When a driver's garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from millrace.connectors.host.garbage import collect_garbage, collect_whole_when_asked, give_back_memory
from tests.support.slow_members import slow_but


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def whole_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_many_living_objects_wake_no_whole_collection_and_young_garbage_goes_all_the_same() -> None:
    collect_garbage()
    collect_whole_when_asked()
    before, first = whole_collections(), weakref.ref(Knot())
    living = [[number] for number in range(400_000)]
    assert whole_collections() == before
    assert first() is None
    gc.set_threshold(700, 10, 10)  # as Python has it
    living += [[number] for number in range(400_000)]
    assert whole_collections() > before


@pytest.mark.parametrize("collect", slow_but([collect_garbage, give_back_memory], collect_garbage))
def test_what_grew_old_goes_when_asked(collect: object) -> None:
    collect_whole_when_asked()
    knot = Knot()
    seen = weakref.ref(knot)
    gc.collect()  # it is old now
    del knot
    assert seen() is not None
    assert callable(collect)
    collect()
    assert seen() is None
