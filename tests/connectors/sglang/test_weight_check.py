"""Engines and trainer are compared after a sync: equal weights pass, others stop the run and are sent again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.errors import LASTING, WeightsDifferError
from millrace.tasks.context import IterationContext
from millrace.tasks.publish import _sync_metrics
from millrace.tasks.shards.board import BoardKeeper
from millrace.tasks.sync_weights import sync_weights
from tests.support.asked_here import RanksHere
from tests.support.engine_process import CLOSE, reference_logprobs
from tests.support.fleets import MakeFleet, serving
from tests.support.metric_names import unexplained


class Ranks(RanksHere):
    """Trainer ranks that hold a model folder; what they say is a plain Hugging Face forward's."""

    def __init__(self, model: Path) -> None:
        self.model, self.asked = model, 0

    async def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        self.asked += 1
        assert all(sample.mask == [1] for sample in samples)
        return [-reference_logprobs(self.model, s.tokens[:-1], s.tokens[-1:])[0] for s in samples]


class Memory:
    """Engines of a real fleet, and ranks."""

    def __init__(self, fleet: Fleet, served: Path, ranks: Ranks) -> None:
        self._fleet, self._served, self.ranks = fleet, served, ranks

    @asynccontextmanager
    async def for_trainer(self) -> AsyncIterator[Any]:
        async def at(_: int) -> Ranks:
            return self.ranks

        yield SimpleNamespace(at=at)

    async def update_engines(self, version: int) -> dict[str, float]:
        await self._fleet.ensure(str(self._served))
        return await self._fleet.update_weights(str(self._served), version)

    async def for_engines(self, versions: VersionRange) -> Dispatcher:
        return await serving(self._fleet, self._served, versions.newest)


@pytest.fixture
def context(make_fleet: MakeFleet, tiny_model: Path, tmp_path: Path) -> Callable[..., IterationContext]:
    def make(served: Path, trained: Path, gap: float | None = 1e-3) -> IterationContext:
        config = RunConfig.model_validate(
            {
                "run": {"name": "a", "iterations": 1},
                "model": {"path": str(tiny_model)},
                "data": {"sources": [{"path": "none.jsonl"}]},
                "storage": {"root": str(tmp_path)},
                "sync": {"max_prompt_gap": gap},
            }
        )
        runtime = SimpleNamespace(
            config=config,
            memory=Memory(make_fleet(), served, Ranks(trained)),
            prompts=SimpleNamespace(tokenizer=PromptTokenizer.load(config.model)),
            run_folder=SimpleNamespace(iteration=lambda _: None),
            board=BoardKeeper(config, cast(Any, None), cast(Any, None)),  # there are no shards
        )
        return IterationContext(cast(Any, runtime), 0)

    return make


@pytest.mark.slow
async def test_equal_weights_pass_and_are_recorded(
    context: Callable[..., IterationContext], tiny_model: Path
) -> None:
    ctx = context(tiny_model, tiny_model)
    record = await sync_weights.fn(ctx)
    assert 0 < record["prompt_gap"] < CLOSE
    assert set(record["checksums"]) == {"engine-0", "engine-1"}
    assert len(set(record["checksums"].values())) == 1
    again = await sync_weights.fn(ctx)
    assert again["checksums"] == record["checksums"]
    ctx.records["sync_weights"] = record
    assert _sync_metrics(ctx) == {"sync/prompt_gap": record["prompt_gap"]}
    assert unexplained(_sync_metrics(ctx)) == []


async def test_other_weights_stop_the_run_and_no_engine_serves_them(
    context: Callable[..., IterationContext], tiny_model: Path, other_model: Path
) -> None:
    ctx = context(other_model, tiny_model)
    with pytest.raises(
        WeightsDifferError, match=r"engine-0 by \d.*engine-1 by \d.*sync\.max_prompt_gap is 0\.001"
    ) as caught:
        await sync_weights.fn(ctx)
    assert isinstance(caught.value, LASTING), "a retry of the task would find the same"
    engines = (await ctx.runtime.memory.for_engines(VersionRange.only(ctx.version_after))).serving
    assert [await engine.weight_version() for engine in engines] == [None, None]


async def test_nothing_is_asked_where_nothing_is_compared(
    context: Callable[..., IterationContext], tiny_model: Path, other_model: Path
) -> None:
    ctx = context(other_model, tiny_model, gap=None)
    record = await sync_weights.fn(ctx)
    assert "prompt_gap" not in record
    assert cast(Any, ctx.runtime.memory).ranks.asked == 0
    assert _sync_metrics(ctx) == {}
