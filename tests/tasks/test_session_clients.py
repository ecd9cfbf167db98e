"""Clients that send whole histories, over real processes, HTTP, dialogues and records: engines alone are scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.sglang.client import Generation
from millrace.connectors.workers.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.rollout import Sampling, Session
from millrace.core.contracts.turns import TurnRow
from millrace.tasks.samples.failures import FailureBudget
from millrace.tasks.samples.generation import SampleGenerator
from millrace.tasks.sessions.runner import MadeSample, SessionRunner, session_task
from millrace.tasks.sessions.session_rollout import Opening
from tests.support.scripted_engines import ScriptedEngines

TOKENIZER = PromptTokenizer(build_tokenizer())
TURNS = {  # of the branch and the turn: what is generated
    "00.0000": "one",
    "00.0001": "two",
    "01.0000": "three",
    "01.0001": "four",
    "02.0000": "five",
}
Run = Callable[..., Any]


class Engines(ScriptedEngines):
    """Generates the text of a branch's turn, ended as the model ends turns."""

    async def generate(
        self, input_ids: Sequence[int], params: Mapping[str, Any], *, rid: str, session: str | None
    ) -> Generation:
        await super().generate(input_ids, params, rid=rid, session=session)
        text = TURNS[rid.partition(".")[2]] + "<eos>"
        ids = TOKENIZER.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-0.5] * len(ids), text, "stop", [(0, 3)], "engine-0", 0)


@pytest.fixture
async def run(make_config: Callable[..., RunConfig]) -> AsyncIterator[Run]:
    settings = Session.model_validate({"function": "tests.support.client_functions:compacts"})
    pool = SessionPool(settings)

    async def made(stored: Sequence[TurnRow] = ()) -> tuple[list[MadeSample], list[TurnRow], Engines]:
        engines, rows, sampling = Engines(), list[TurnRow](), Sampling()

        async def ready() -> Engines:
            return engines

        async def write(row: TurnRow) -> None:
            rows.append(row)

        budget = FailureBudget("field", 0.5, 4, what="failed", where="here", remedy="fix it")
        generator = SampleGenerator(make_config(), sampling, ready, budget)
        runner = SessionRunner(settings, sampling, pool, Dialogues(TOKENIZER, []), generator)
        prompt = [{"role": "user", "content": "1+1="}]
        ids = TOKENIZER.encode_prompts([prompt], chat=True)[0]
        opening = Opening("g-0000", "g", prompt, ids, seed=7, chat=True, longest=512)
        task = session_task('"1+1="', '"2"', None, "s", 0)
        samples, _, _ = await runner.run(opening, task, stored, write)
        return samples, rows, engines

    yield made
    pool.close()


def shown(ids: Sequence[int]) -> str:
    return "".join(TOKENIZER.tokenizer.convert_ids_to_tokens(list(ids)))


async def test_what_was_generated_stays_as_it_is_and_is_trained_once(run: Run) -> None:
    samples, _, _ = await run()
    assert [sample.reason for sample in samples] == [None, None, None]
    assert [(shown(sample.prompt_ids), shown(sample.response_ids)) for sample in samples] == [
        ("<user>1+1=<assistant>", "one<eos><user>again<assistant>two<eos>"),
        ("<user>in short: 2<assistant>", "three<eos><user>go on<assistant>four<eos>"),
        ("<user>1+1=<assistant>one<eos><user>otherwise<assistant>", "five<eos>"),
    ]
    trained = [
        shown([token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask])
        for sample in samples
    ]
    assert trained == ["one<eos>two<eos>", "three<eos>four<eos>", "five<eos>"]
    assert [sample.reward for sample in samples] == [1.0, 1.0, 1.0]


async def test_the_messages_of_a_branch_end_where_it_began(run: Run) -> None:
    samples, _, _ = await run()
    assert '"otherwise"' in samples[2].dialogue
    assert '"two"' not in samples[2].dialogue


@pytest.mark.parametrize("kept", range(6))
async def test_a_rollout_that_begins_again_generates_only_what_is_not_recorded(run: Run, kept: int) -> None:
    samples, rows, _ = await run()
    again, more, engines = await run(rows[:kept])
    assert again == samples
    assert [(row.branch, row.event, row.kind) for row in more] == [
        (row.branch, row.event, row.kind) for row in rows[kept:]
    ]
    assert len(engines.requests) == len(rows) - kept
