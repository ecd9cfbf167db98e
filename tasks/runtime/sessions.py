"""The worker processes that run rollouts of several turns, and the dialogues they hold: started when first needed, ended with
the run."""

import json
from collections.abc import Sequence
from functools import cached_property

from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.rollout import Sampling
from millrace.core.hooks.slime.arguments import run_arguments
from millrace.core.sessions.interface import Message
from millrace.core.sharding import WHOLE, Share
from millrace.tasks.generation.sessions.runner import SessionRunner
from millrace.tasks.generation.sessions.session_rollout import Opening
from millrace.tasks.generation.single_samples import SampleGenerator
from millrace.tasks.runtime.prompts import Prompts


class Sessions:
    """Creates the runners of tasks."""

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        self._config, self._prompts = config, prompts
        self._pool: SessionPool | None = None

    def runner(self, sampling: Sampling, generator: SampleGenerator, share: Share = WHOLE) -> SessionRunner:
        """A runner of one task's rollouts. `rollout.session` is set. share: this process's share of concurrent rollouts."""
        settings = self._config.rollout.session
        assert settings is not None, "rollouts are of several turns"
        if self._pool is None:
            self._pool = SessionPool(settings)
        return SessionRunner(
            settings, sampling, self._pool, self._dialogues, generator, run_arguments(self._config), share
        )

    def opening(
        self,
        source: PromptRows,
        rollout_id: str,
        group_id: str,
        prompt: str,
        prompt_ids: Sequence[int],
        seed: int,
    ) -> Opening:
        """The start of a rollout on a prompt of a source. prompt: JSON text."""
        return Opening(
            rollout_id=rollout_id,
            group_id=group_id,
            messages=opening_messages(prompt, source.system),
            prompt_ids=prompt_ids,
            seed=seed,
            chat=source.chat,
            longest=self._config.data.max_prompt_tokens + self._config.rollout.longest_response,
            columns=source,
        )

    def close(self) -> None:
        """End the processes. A later runner starts new ones."""
        if self._pool:
            self._pool.close()
            self._pool = None

    @cached_property
    def _dialogues(self) -> Dialogues:
        return Dialogues(self._prompts.tokenizer, self._prompts.tools)


def opening_messages(prompt: str, system: str | None) -> list[Message]:
    """The messages of a stored prompt, which is JSON text: the start of a dialogue."""
    found: str | Sequence[Message] = json.loads(prompt)
    messages: list[Message] = [{"role": "user", "content": found}] if isinstance(found, str) else list(found)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages
