"""Generates single samples on the engines, for rollout and evaluate.

Owns how many samples are in flight and the request that an engine gets. Knows nothing of rows or files.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.connectors.engines.client import NO_TOKENS, AskedExperts, Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.dispatching.pieces import Flush, ended_at_stop, shortened
from millrace.connectors.huggingface.answer_ends import AnswerEnds
from millrace.core.config import RunConfig
from millrace.core.config.rollout import Sampling
from millrace.core.contracts.images import SentImages
from millrace.core.contracts.sample import Status
from millrace.core.errors import EngineError, EngineLostError
from millrace.core.families.routed_experts import RoutingFormat
from millrace.tasks.generation.admission import CachePressure, Places, places_of
from millrace.tasks.generation.failures import FailureBudget

NEVER = -1e9  # a token's bias with which its probability is 0
STATUSES: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
Engines = Callable[[], Awaitable[Dispatcher]]
"""Makes the engines ready at the weight version that will generate."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one sample: a generation, or the reason for its lack. Neither if it was ended before it started."""

    generation: Generation | None
    reason: str | None
    started: float  # Unix time at which it got a slot among the samples in flight
    seconds: float
    # stored experts of its earlier part, if another iteration or attempt made that
    routed_before: bytes = b""

    @property
    def routed(self) -> bytes | None:
        """Stored experts of prompt and answer; None if there are none."""
        new = self.generation.routed if self.generation else None
        return self.routed_before + (new.data if new else b"") or None

    @property
    def status(self) -> Status:
        """The sample's status in its row."""
        if self.generation is None:
            return "aborted" if self.reason is None else "failed"
        return STATUSES[self.generation.finish]

    @property
    def output_ids(self) -> npt.NDArray[np.int32]:
        """The response's token ids; none if it failed."""
        return self.generation.output_ids if self.generation else NO_TOKENS.ids

    @property
    def text(self) -> str:
        """The response's text; empty if it failed."""
        return self.generation.text if self.generation else ""


class SampleGenerator:
    """Generates single samples, as many at a time as there are places, and counts samples and tokens."""

    def __init__(
        self,
        config: RunConfig,
        sampling: Sampling,
        engines: Engines,
        budget: FailureBudget,
        text_of: Callable[[Sequence[int]], str] | None = None,
        places: Places | None = None,
        ends: Callable[[], AnswerEnds] = AnswerEnds,
        form: RoutingFormat | None = None,
        unsampled: Sequence[int] = (),
    ) -> None:
        """text_of: decodes the token ids of an answer that several requests made; by default their texts are joined.

        places: for samples in flight; None: as the configuration says, for this generator alone. ends: tokens that end answers, which requests name for engines. form: of
        routed experts, which engines are asked for; None: they are not. unsampled: ids that no answer may contain.
        """
        self.outstanding = 0  # started samples without an answer
        self.samples = 0
        self.tokens = 0
        self.engines_s = 0.0  # seconds until the engines were ready
        self._params, self._form = sampling.request, form
        if unsampled:
            bias = {**(self._params.get("logit_bias") or {}), **{str(token): NEVER for token in unsampled}}
            self._params = {**self._params, "logit_bias": bias}
        self._budget, self._text_of, self._ends = budget, text_of, ends
        self._make_ready = engines
        self._engines: Dispatcher | None = None
        self._stopped = False
        self._ready = asyncio.Lock()
        self._places = places or places_of(config)

    @property
    def in_flight_limit(self) -> int | None:
        """How many samples may be in flight now; None if the configuration decides that."""
        return self._places.found

    def take_pressure(self) -> CachePressure | None:
        """What the engines' KV caches reached since the last call; None if they were not read."""
        return self._places.take_pressure()

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        seed: int,
        rid: str,
        session: str | None,
        own: Mapping[str, Any] | None = None,
        made: Sequence[int] = (),
        priority: int | None = None,
        flush: Flush | None = None,
        routed: bytes = b"",
        images: Callable[[], Awaitable[SentImages | None]] | None = None,
    ) -> Answer:
        """Generate one answer. Equal tokens, seed and weights give an equal answer.

        `session` keeps the samples of a group together. own: sampling parameters of this answer alone. made: its earlier
        part, which it continues. priority: the smallest of waiting requests goes first. flush: stores its tokens meanwhile.
        routed: stored experts of the first tokens, which are not asked for again. images: reads the pictures of the prompt,
        once the sample has a place. If no engine can generate it, the answer has the reason. Raises BudgetError if too many
        samples failed.
        """
        self.outstanding += 1
        async with self._places.place(priority):
            started, generation, reason = time.time(), None, None
            try:
                engines = None if self._stopped else await self._dispatcher()
                params = {**self._params, **(own or {}), "sampling_seed": seed}
                params |= self._ends().stops(params)
                if engines and not self._stopped:
                    generation = await engines.generate(
                        [*prompt_tokens, *made],
                        shortened(params, len(made)),
                        rid=rid,
                        session=session,
                        continued=len(made),
                        priority=priority,
                        flush=flush,
                        experts=AskedExperts(self._form, len(routed) // self._form.width)
                        if self._form
                        else None,
                        images=await images() if images else None,
                    )
            except EngineError as error:
                reason = str(error)
                self.fail(reason, rid)
            else:
                self.tokens += len(generation.output_ids) if generation else 0
                if self._text_of and generation and generation.pieces > 1 and not made:
                    generation = replace(generation, text=self._text_of(generation.output_ids.tolist()))
                if self._text_of and generation:
                    generation = ended_at_stop(made, generation, params, self._text_of)
            seconds = time.time() - started
        self.samples += 1
        self.outstanding -= 1
        return Answer(generation, reason, started, seconds)

    async def stop(self) -> None:
        """End running requests: each answer keeps its tokens so far. Nothing is generated afterwards."""
        self._stopped = True
        if self._engines:
            await self._engines.stop()

    def fail(self, reason: str, sample: str) -> None:
        """Count a failed sample. Raises BudgetError if too many failed."""
        self._budget.add(reason, sample)
        self._budget.check()

    async def _dispatcher(self) -> Dispatcher:
        """The engines, made ready when the first sample needs them."""
        async with self._ready:
            if self._engines is None:
                started = time.perf_counter()
                try:
                    engines = await self._make_ready()
                except EngineLostError:
                    # it died meanwhile, which is no failure of the sample that asked first
                    engines = await self._make_ready()
                self.engines_s = time.perf_counter() - started
                await self._places.watch(engines)
                self._engines = engines
            return self._engines
