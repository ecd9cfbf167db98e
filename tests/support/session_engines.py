"""Rollouts of several turns over real processes, dialogues, records and engines; and what an engine says of a sample afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.user_code.mcp_tools import tool_schemas
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.rollout import SessionSection
from millrace.core.contracts.turns import TurnRow
from millrace.core.families.routed_experts import RoutingFormat
from millrace.core.hooks.slime.arguments import OF_GENERATION
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.sessions.runner import MadeSample, SessionRunner, session_task
from millrace.tasks.generation.sessions.session_rollout import Opening
from millrace.tasks.generation.single_samples import SampleGenerator

TEMPERATURE = 1.0  # an engine gives log-probabilities of a prompt at no other
NEW_TOKENS = 12
LONGEST = 1000
EXACT = 1e-4  # of log-probabilities


def dispatcher_of(client: SglangClient, attempts: int = 3) -> Dispatcher:
    """Requests to one engine, which nothing recovers."""

    async def nothing(version: int) -> None:
        """It is not lost."""

    return Dispatcher(
        lambda: [client],
        nothing,
        lambda engine, error: None,
        version=-1,
        attempts=attempts,
        progress_timeout_s=120,
    )


class EnginePlace:
    """Makes rollouts whose turns a dispatcher's engines generate."""

    def __init__(
        self,
        model: Path,
        dispatcher: Dispatcher,
        session: Mapping[str, Any],
        new_tokens: int = NEW_TOKENS,
        stop: Sequence[str] = (),
        form: RoutingFormat | None = None,
    ) -> None:
        """session: the section. new_tokens, stop: of a turn. form: of the experts that engines are asked for."""
        sampling = {"max_new_tokens": new_tokens, "temperature": TEMPERATURE, "stop": list(stop)}
        values = {
            "run": {"name": "exact"},
            "model": {"path": str(model)},
            "data": {"sources": [{"path": "none.jsonl"}]},
            "rollout": {"sampling": sampling},
        }
        config = RunConfig.model_validate(values)
        settings = SessionSection.model_validate({"timeout_s": 60, "max_turns": 6, **session})
        self._tokenizer = PromptTokenizer.load(config.model)
        self.pool = SessionPool(settings)

        async def ready() -> Dispatcher:
            return dispatcher

        budget = FailureBudget("field", 0.9, 100, what="failed", where="here", remedy="fix it")
        generator = SampleGenerator(
            config, config.rollout.sampling, ready, budget, self._tokenizer.decode, form=form
        )
        dialogues = Dialogues(self._tokenizer, tool_schemas(settings.tools))
        self._runner = SessionRunner(
            settings,
            config.rollout.sampling,
            self.pool,
            dialogues,
            generator,
            {**OF_GENERATION, "hf_checkpoint": str(model)},
        )
        self.rows: list[TurnRow] = []

    async def run(
        self, number: int = 0, stored: Sequence[TurnRow] = (), prompt: str = "1+1=", **task: Any
    ) -> list[MadeSample]:
        """The samples of a rollout; its rows are in `rows`."""
        messages: list[Any] = task.pop("messages", [{"role": "user", "content": prompt}])
        ids = self._tokenizer.encode_prompts([messages], chat=True)[0]
        opening = Opening(
            f"g-{number:04d}", "g", messages, ids, seed=100 + number, chat=True, longest=LONGEST
        )

        async def write(row: TurnRow) -> None:
            self.rows.append(row)

        shown = json.dumps(messages if len(messages) > 1 else prompt)
        made = session_task(shown, None, json.dumps(task), "s", number)
        samples, _, _ = await self._runner.run(opening, made, stored, write)
        return samples


async def asked_again(client: SglangClient, sample: MadeSample) -> list[float]:
    """What the engine gives each token of the response when it is asked for the whole sample as one prompt."""
    ids = [*sample.prompt_ids, *sample.response_ids]
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": TEMPERATURE},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await client.post("/generate", body, timeout_s=120)
    found = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, *_ in found] == ids
    return [value for value, *_ in found[len(sample.prompt_ids) :]]


async def assert_exact(client: SglangClient, samples: Sequence[MadeSample], rows: Sequence[TurnRow]) -> None:
    """Trained tokens are those that the engine made, after the tokens that it saw, and each of them is trained once."""
    trained = []
    for sample in samples:
        assert sample.status in ("completed", "truncated"), sample.reason
        assert len(sample.response_ids) == len(sample.loss_mask) == len(sample.logprobs)
        again = await asked_again(client, sample)
        for token, mask, value, expected in zip(
            sample.response_ids, sample.loss_mask, sample.logprobs, again, strict=True
        ):
            if mask:
                trained.append(token)
                assert value == pytest.approx(expected, abs=EXACT)
    made = [row for row in rows if row.kind == "segment"]
    assert sorted(trained) == sorted(token for row in made for token in row.output_ids)
    assert trained
