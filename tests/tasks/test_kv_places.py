"""Samples in flight by the pressure on KV caches: places, their order, and embedded engines with a small cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.admission import EngineLoad
from millrace.core.config import RunConfig
from millrace.core.errors import EngineError, EngineLostError
from millrace.core.sharding import WHOLE, Share
from millrace.tasks.generation.admission import CachePressure, FixedPlaces, KvPlaces, places_of
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.single_samples import SampleGenerator
from tests.support.engine_process import embedded_engine, peaked_model
from tests.support.scripted_engines import ScriptedEngines

MakeConfig = Callable[..., RunConfig]
ROOM_FOR_FOUR = EngineLoad(0.75, 400, 0, 0)


class Loaded(ScriptedEngines):
    """Engines with these loads; an error is raised."""

    def __init__(self, *loads: EngineLoad | EngineError) -> None:
        super().__init__()
        self.loads = loads
        self.serves = True

    @property
    def caching(self) -> Sequence[Loaded]:  # type: ignore[override]  # only `load` is asked
        return [self] if self.serves else []

    async def load(self) -> EngineLoad:
        first, *others = self.loads
        self.loads = (*others,) or self.loads
        if isinstance(first, EngineError):
            raise first
        return first


async def test_one_sample_makes_the_engines_ready_and_then_as_many_start_as_fit() -> None:
    places, running, most = KvPlaces(100, 100, every_s=0.001), 0, 0

    async def sample(number: int) -> None:
        nonlocal running, most
        async with places.place(None):
            running += 1
            most = max(most, running)
            if not number:
                assert (running, places.state.limit) == (1, 1)
                await places.watch(Loaded(ROOM_FOR_FOUR))
            await asyncio.sleep(0.01)
            running -= 1

    await asyncio.gather(*map(sample, range(12)))
    assert most == 4


async def test_the_smallest_number_starts_first_and_a_cancelled_one_keeps_no_place() -> None:
    places, order = KvPlaces(1, 100), []

    async def sample(priority: int | None) -> None:
        async with places.place(priority):
            order.append(priority)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(sample(priority)) for priority in (5, 3, 1, None, 2)]
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [5, None, 1, 3]
    assert places.in_flight == 0


async def test_readings_go_on_after_a_time_without_samples_in_flight() -> None:
    places = KvPlaces(100, 100, every_s=0.001)
    engines = Loaded(ROOM_FOR_FOUR)
    async with places.place(None):
        await places.watch(engines)
    await asyncio.sleep(0.05)  # the readings end with the last sample
    read: list[int] = []
    engines.load = lambda: noted(read)  # type: ignore[method-assign]

    async def noted(read: list[int]) -> EngineLoad:
        read.append(places.in_flight)
        return ROOM_FOR_FOUR

    async with places.place(None):
        await asyncio.sleep(0.05)
    assert 1 in read


async def test_the_pressure_on_caches_is_the_largest_since_it_was_taken() -> None:
    places = KvPlaces(100, 100)
    assert places.take_pressure() is None
    full, idle = EngineLoad(0.9, 400, 3, 2), EngineLoad(0.25, 400, 1, 5)
    engines = Loaded(full, idle)
    for _ in range(2):
        await places.watch(engines)
    assert places.take_pressure() == CachePressure(used=0.9, queue=5)
    assert places.take_pressure() is None
    assert FixedPlaces(3).take_pressure() is None


async def test_engines_that_serve_no_version_of_an_evaluation_are_read_on() -> None:
    """Its engines go on to the next version, and rollouts are made by the others' readings."""
    places = KvPlaces(100, 100, every_s=0.001)
    rollout, evaluation = Loaded(ROOM_FOR_FOUR, EngineLoad(0.95, 400, 4, 0)), Loaded(ROOM_FOR_FOUR)
    async with places.place(None):
        await places.watch(rollout)
        await places.watch(evaluation)
        evaluation.serves = False
        await asyncio.sleep(0.05)
    assert places.state.limit == 1


async def test_a_lost_engine_changes_nothing_and_one_that_gives_no_load_is_refused() -> None:
    places = KvPlaces(10, 100)
    await places.watch(Loaded(EngineLostError("engine-0: gone")))
    assert (places.state.known, places.state.limit) == (False, 1)
    with pytest.raises(EngineError, match="no such page"):
        await places.watch(Loaded(EngineError("engine-0: no such page")))


def test_the_configuration_chooses_the_places(make_config: MakeConfig) -> None:
    assert isinstance(places_of(make_config()), FixedPlaces)
    rollout = {"admission": "kv", "max_concurrency": 8, "sampling": {"max_new_tokens": 50}}
    config = make_config(
        rollout=rollout, engines={"count": 2}, data={"max_prompt_tokens": 30, "sources": [{"path": "x"}]}
    )
    for share, bound, part in ((WHOLE, 16, 1.0), (Share((0,), 4), 4, 0.25)):
        places = places_of(config, share)
        assert isinstance(places, KvPlaces)
        assert (places.state.bound, places.state.longest, places.state.part) == (bound, 80, part)


async def test_an_embedded_engine_with_a_small_cache_gets_no_more_than_it_holds(
    tmp_path: Path, make_config: MakeConfig
) -> None:
    """With a fixed number, half of the requests would wait in the engine."""
    sampling = {"max_new_tokens": 60, "min_new_tokens": 40}
    config = make_config(rollout={"admission": "kv", "max_concurrency": 64, "sampling": sampling})
    small = ("--max-total-tokens", "2100", "--max-running-requests", "256")
    model = peaked_model(tmp_path / "model", seed=0)
    with embedded_engine(model, *small, "--weight-version", "0", log=tmp_path / "log") as (url, _):
        client = SglangClient(url, "engine-0")
        engines = Dispatcher(
            lambda: [client], _no_recovery, lambda *_: None, version=0, attempts=1, progress_timeout_s=60
        )

        async def ready() -> Dispatcher:
            return engines

        budget = FailureBudget("field", 0.0, 1, what="failed", where="here", remedy="fix it")
        places = KvPlaces(64, 70, every_s=0.02)
        made = SampleGenerator(config, config.rollout.sampling, ready, budget, places=places)
        waiting: list[int] = []

        async def look() -> None:
            while True:
                await asyncio.sleep(0.02)
                waiting.append((await client.load()).waiting)

        looking = asyncio.ensure_future(look())
        asked = (made.generate([1, 2, 3], seed=i, rid=f"g-{i:04}", session=None) for i in range(120))
        answers = await asyncio.gather(*asked)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await client.close()
    assert all(answer.generation for answer in answers)
    assert 1 < places.state.limit < 64
    assert sum(waiting) / len(waiting) < 4


async def _no_recovery(_: int) -> None:
    raise AssertionError("no engine is lost")
