"""A runner of rollouts of several turns over real processes and real dialogues: engines alone are scripted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.connectors.engines.client import AskedExperts, Generation
from millrace.connectors.engines.dispatching.pieces import Flush
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.config.rollout import Sampling, SessionSection
from millrace.core.contracts.images import SentImages
from millrace.core.contracts.turns import TurnRow
from millrace.core.sessions.tools import load_tools
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.sessions.runner import MadeSample, SessionRunner, session_task
from millrace.tasks.generation.sessions.session_rollout import Opening
from millrace.tasks.generation.single_samples import SampleGenerator
from tests.support.chat_templates import tokenizer_of
from tests.support.scripted_engines import ScriptedEngines, generation

FUNCTIONS = "tests.support.session_functions"


TOKENIZER = PromptTokenizer(tokenizer_of("chatml"))


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


class Engines(ScriptedEngines):
    """Generates texts in turn, each ended as the model ends turns; remembers what it was sent."""

    def __init__(self, *texts: str, fails: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__(fails)
        self.texts = texts
        self.tokenizer, self.end = TOKENIZER, "<|im_end|>"

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
        await super().generate(input_ids, params, rid=rid, session=session)
        turn = int(rid.rpartition(".")[2])
        text = self.texts[min(turn, len(self.texts) - 1)] + self.end
        ids = self.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"][
            : params["max_new_tokens"]
        ]
        finish = "stop" if len(ids) < params["max_new_tokens"] else "length"
        return generation(ids, [-0.5] * len(ids), text, finish)


class Place:
    """A task's runner, and what it wrote. pools: of earlier places, by their settings: one of the same settings is used again.

    family: whose chat template is used, besides chatml; the engines' texts then hold the tokens that end turns.
    """

    def __init__(
        self, config: RunConfig, engines: Engines, pools: dict[str, SessionPool], **settings: Any
    ) -> None:
        self.tokenizer = TOKENIZER
        if "family" in settings:
            self.tokenizer = PromptTokenizer(tokenizer_of(settings.pop("family")))
            engines.tokenizer, engines.end = self.tokenizer, ""
        tools = [f"{FUNCTIONS}:{name}" for name in settings.pop("tools", ())]
        tools += settings.pop("module_tools", ())
        for form in ("function", "environment"):
            if form in settings and not isinstance(settings[form], dict):
                function, options = (
                    settings[form] if isinstance(settings[form], tuple) else (settings[form], {})
                )
                settings[form] = {"function": f"{FUNCTIONS}:{function}", "options": options}
        self.settings = SessionSection.model_validate({"timeout_s": 2, "tools": tools, **settings})
        key = self.settings.model_dump_json()
        self.pool = pools[key] = pools.get(key) or SessionPool(self.settings)
        self.engines, self.rows = engines, list[TurnRow]()
        schemas = [tool.schema for tool in load_tools(self.settings.tools).values()]

        async def ready() -> Engines:
            return engines

        budget = FailureBudget(
            "rollout.max_failed_share", 0.5, 4, what="failed", where="here", remedy="fix it"
        )
        sampling = Sampling(max_new_tokens=200)
        self.generator = SampleGenerator(config, sampling, ready, budget)
        self.runner = SessionRunner(
            self.settings, sampling, self.pool, Dialogues(self.tokenizer, schemas), self.generator, {}
        )

    async def run(
        self,
        stored: Sequence[TurnRow] = (),
        rollout: str = "g-0000",
        longest: int = 512,
        metadata: Mapping[str, Any] | None = None,
        source: Source | None = None,
    ) -> list[MadeSample]:
        prompt = [{"role": "user", "content": "1+1="}]
        ids = self.tokenizer.encode_prompts([prompt], chat=True)[0]
        opening = Opening(rollout, "g", prompt, ids, seed=7, chat=True, longest=longest, columns=source)

        async def write(row: TurnRow) -> None:
            self.rows.append(row)

        samples, _, _ = await self.runner.run(
            opening, session_task('"1+1="', '"2"', json.dumps(metadata or {}), "s", 0), stored, write
        )
        return samples


def shown(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.tokenizer.decode(list(ids))
    return text
