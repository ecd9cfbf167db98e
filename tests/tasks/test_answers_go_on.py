"""Answers over real files: what of one was stored before a kill is asked for no more, and the row is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from millrace.connectors.engines.client import AskedExperts, Generation
from millrace.connectors.engines.dispatching.pieces import Flush
from millrace.connectors.huggingface.answer_ends import AnswerEnds
from millrace.connectors.storage.parts import read_parts
from millrace.core.accounts.token_counts import COLUMNS, account_of
from millrace.core.config.rollout import Sampling
from millrace.core.contracts import schema
from millrace.core.contracts.images import SentImages
from millrace.core.contracts.sample import JudgedSample
from millrace.core.contracts.turns import TurnRow
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.answers import Answers
from millrace.tasks.generation.single_samples import SampleGenerator
from millrace.tasks.rollout import row_writer, sample_generator
from millrace.tasks.stream import Joined
from tests.support.scripted_engines import TEXT_ALONE, ScriptedEngines
from tests.support.stored_samples import drawn_group, sample_of
from tests.tasks.test_rollout_writer import context

GROUP = drawn_group(0, iteration=0, source="default")
LENGTH, STORED = 64, 40
SAMPLING = Sampling(max_new_tokens=LENGTH)


class KilledError(Exception):
    """The driver died."""


class Engines(ScriptedEngines):
    """Makes LENGTH tokens that count from 100 on. dies: with the driver, once STORED of them are reported."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    async def generate(
        self,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        *,
        rid: str,
        session: str | None,
        continued: int = 0,
        priority: int | None = None,
        flush: Flush | None = None,
        experts: AskedExperts | None = None,
        images: SentImages | None = None,
    ) -> Generation:
        self.requests.append((rid, list(input_ids), dict(params), session))
        assert flush is not None
        if self.dies:
            flush.take(made(continued, STORED))
            await flush.settled()
            raise KilledError
        return made(continued, LENGTH)


def made(start: int, end: int) -> Generation:
    ids = np.arange(start, end, dtype=np.int32)
    spans = [(0, 0)]
    return Generation(ids + 100, -ids.astype(float), "", "length", spans, "engine-0", 0)


async def attempt(ctx: IterationContext, engines: Engines) -> None:
    async def ready() -> Engines:
        return engines

    config = ctx.config
    ours = sample_generator(ctx)
    generator = SampleGenerator(config, config.rollout.sampling, ready, ours._budget, ours._text_of)
    stored = [TurnRow(**row) for row in read_parts(ctx.folder, "turns", "turns").to_pylist()]
    writers = [row_writer(ctx, kind, generator) for kind in ("rollouts", "turns")]
    answers = Answers(ctx, generator, *writers, stored)
    left = answers.left(GROUP, 0)
    assert (left.response_length if left else 0) == (STORED if stored else 0)
    async with answers.open():
        await answers(GROUP, 0)


@pytest.mark.parametrize(
    ("stop", "length"),
    [
        pytest.param([], LENGTH, id="to its last token"),
        pytest.param(["139 140"], STORED + 1, id="to a stop text that the kill cut"),
    ],
)
async def test_an_answer_goes_on_where_storage_has_it(tmp_path: Path, stop: list[str], length: int) -> None:
    ctx = context(tmp_path)
    sampling = SAMPLING.model_copy(update={"stop": stop})
    ctx.config = ctx.config.model_copy(
        update={"rollout": ctx.config.rollout.model_copy(update={"flush_tokens": 16, "sampling": sampling})}
    )
    assert ctx.config.data.sources[0].name == GROUP.source
    prompts = SimpleNamespace(
        **TEXT_ALONE,
        sample_seed=lambda group, index: 7,
        tokenizer=SimpleNamespace(decode=lambda ids, _: " ".join(map(str, ids)), ends=AnswerEnds()),
    )
    ctx.runtime = cast(Any, SimpleNamespace(prompts=prompts, places=lambda share: None))
    with pytest.raises(BaseExceptionGroup) as caught:
        await attempt(ctx, Engines(dies=True))
    assert caught.value.subgroup(KilledError) is not None
    turns = read_parts(ctx.folder, "turns", "turns")
    open_ = account_of(
        read_parts(ctx.folder, "rollouts", "rollouts").select(COLUMNS["rollouts"]),
        turns.select(COLUMNS["turns"]),
    )
    assert open_.problems() == []
    assert open_.tokens_of("in flight") == STORED

    engines = Engines(dies=False)
    await attempt(ctx, engines)
    ((_, asked, params, _),) = engines.requests
    assert asked == [*GROUP.prompt_tokens, *range(100, 100 + STORED)]
    assert params["max_new_tokens"] == LENGTH - STORED
    (row,) = read_parts(ctx.folder, "rollouts", "rollouts").to_pylist()
    assert row["tokens"] == [*GROUP.prompt_tokens, *range(100, 100 + length)]
    assert row["rollout_logprobs"] == [-float(at) for at in range(length)]
    assert row["policy_versions"] == [{"first_token": 0, "version": 0}]
    assert row["response"] == " ".join(map(str, range(100, 100 + length)))
    assert row["status"] == ("completed" if stop else "truncated")
    whole = account_of(
        read_parts(ctx.folder, "rollouts", "rollouts").select(COLUMNS["rollouts"]),
        turns.select(COLUMNS["turns"]),
    )
    assert whole.problems() == []
    assert whole.tokens_of("in flight") == length, "a segment's tokens count once"


@pytest.mark.parametrize("length", [0, 3])
def test_a_sample_that_was_deferred_before_has_a_row_also_where_a_kill_kept_it_from_going_on(
    tmp_path: Path, length: int
) -> None:
    """One without a token had none, and the account of the iteration did not close: the run ended there at each start."""
    ctx = context(tmp_path)
    group = replace(GROUP, deferrals=1)
    before = sample_of(group, 0, "", length=length, status="aborted")
    ctx.stream.joined = Joined([group], begun={before.sample_id: before})
    prompts = SimpleNamespace(
        **TEXT_ALONE,
        sample_seed=lambda group, index: before.seed,
        tokenizer=SimpleNamespace(decode=lambda ids, _: before.response, ends=AnswerEnds()),
    )
    ctx.runtime = cast(Any, SimpleNamespace(prompts=prompts, places=lambda share: None))
    generator = sample_generator(ctx)
    answers = Answers(ctx, generator, *[row_writer(ctx, kind, generator) for kind in ("rollouts", "turns")])
    left = answers.left(group, 0)
    assert left is not None
    assert (left.status, list(left.tokens)) == ("aborted", before.tokens)
    assert answers.left(group, 1) is None, "it was never begun"
    rows = [schema.to_table([row], "rollouts") for row in (left, before)]
    nothing = [schema.to_table([], kind) for kind in ("rollouts", "turns", "batch")]
    of = {"sample_id": before.sample_id, "group_id": group.group_id, "prompt_id": group.prompt_id}
    verdict = JudgedSample(**of, verdict="deferred", reason=None, train_step=None)
    judged = schema.to_table([verdict], "verdicts")
    account = account_of(*nothing[:2], judged, nothing[2], cut=rows[0], carried=rows[1])
    assert account.problems() == []
    assert account.tokens_of("deferred") == length
