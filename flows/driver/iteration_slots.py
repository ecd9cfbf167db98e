"""Iterations that follow one another and overlap as far as the pipeline allows, each as a flow run.

Prefect creates a flow run by seven calls to its server, one after the other. GPUs would idle meanwhile, so the calls are made
while an earlier iteration still hands over its weights. Owns when held-out sets are evaluated (the untrained policy, after an
iteration, or beside the next one), and that a lower `pipeline.ahead` is in run.json before an iteration is drawn under it
(pipeline.min_ess; millrace.core.accounts.staleness makes the decision). Does not know what an iteration does.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from prefect import Flow, Task

from millrace.connectors.host.garbage import collect_between_iterations
from millrace.connectors.prefect.flow_run_state import count_apart
from millrace.connectors.prefect.run_page import untagged
from millrace.connectors.ray.task_runs import JoinedRayTaskRunner
from millrace.connectors.storage.run_folder import DRAWN
from millrace.core.accounts.staleness import LOW_IN_A_ROW, Ahead, lowered
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.task_records import EvaluateRecord
from millrace.core.errors import together
from millrace.core.periodic import due, evaluates_after
from millrace.core.sharding import in_shards
from millrace.core.waits import USUAL, Limit, beat, heartbeat, progressing
from millrace.flows.driver.stored_run import spans_of
from millrace.tasks.context import IterationContext
from millrace.tasks.evaluate import evaluate, evaluate_before, is_evaluated_by
from millrace.tasks.reporting import report
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.driver import with_evaluation_shards

AheadOf = Callable[[int], int]


class Stage(IntEnum):
    """How far an iteration is, in order."""

    DECIDED = 1  # the number of iterations that may be open before it is decided
    DRAWN = 2  # its prompts are committed
    GENERATED = 3  # its batch is fixed, and no engine works for it any more
    TRAINED = 4
    SERVED = 5  # engines have its weights
    LEFT_TRAINER = 6  # the trainer's state is copied if it is to be saved
    LEFT_ENGINES = 7  # it is evaluated, unless the next iteration evaluates
    DONE = 8  # its manifest is written


class Progress:
    """How far each iteration of this driver is. Iterations before `first` are done."""

    def __init__(self, first: int, limit: Limit = USUAL) -> None:
        """limit: how long an iteration waits without progress in the run."""
        self._limit = limit
        self._done = first  # iterations before it are done
        self._reached: dict[int, Stage] = {}
        self._changed = asyncio.Condition()

    async def reach(self, index: int, stage: Stage) -> None:
        """Note that an iteration has reached a stage, and so all earlier stages."""
        beat()
        async with self._changed:
            self._reached[index] = max(stage, self._reached.get(index, stage))
            while self._reached.get(self._done) is Stage.DONE:
                del self._reached[self._done]
                self._done += 1
            self._changed.notify_all()

    async def wait(self, index: int, stage: Stage) -> None:
        """Wait until an iteration has reached a stage. Raises StalledError if the run makes no progress."""
        what = f"iteration {iteration_number(index)} until it is {stage.name.lower().replace('_', ' ')}"
        await progressing(self._reaches(index, stage), what, self._limit, heartbeat)

    async def _reaches(self, index: int, stage: Stage) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: index < self._done or self._reached.get(index, 0) >= stage)


@dataclass(frozen=True)
class IterationSlot:
    """One iteration's place in the sequence, with L iterations ahead of the trained one (pipeline.ahead).

        async def iteration(runtime: Runtime, index: int, slot: IterationSlot) -> None:
            ...  # decide to be less far ahead
            await slot.may_draw()
            ...  # sample prompts
            await slot.reach(Stage.DRAWN)
            ...  # generate
            await slot.reach(Stage.GENERATED)
            await slot.may_train()
            ...  # train
            await slot.reach(Stage.TRAINED)
            await slot.may_sync()
            ...  # sync weights
            await slot.reach(Stage.SERVED)
            ...  # save
            await slot.reach(Stage.LEFT_TRAINER)
            ...  # evaluate
            await slot.reach(Stage.LEFT_ENGINES)
            await slot.may_publish()
            ...  # publish

    Guarantees: iteration i works when iteration i-L-1 is done and iteration i-1 has drawn, so at most L + 1 are open. L may be
    lowered for an iteration before it draws. Iterations train, sync and publish in their order. The flow run of iteration i is
    created when iteration i-L-1 has trained, since its remaining stages seldom fail. After an iteration fails, no further one
    starts to work.
    """

    index: int
    progress: Progress
    ahead: AheadOf  # the current L of each iteration
    most: int  # the largest L
    last: int  # index of the run's last iteration
    finish: bool = False  # weights wait for the requests of iterations ahead
    tidy: Callable[[], None] = lambda: None  # called before the iteration works

    async def may_work(self) -> None:
        """Wait until the previous iteration has drawn and the iteration L + 1 before is done."""
        await self.progress.wait(self.index - 1, Stage.DRAWN)
        await self.progress.wait(self.index - self.ahead(self.index) - 1, Stage.DONE)
        self.tidy()

    async def may_draw(self) -> None:
        """Call it when L of this iteration is decided. If L became less, wait until the iteration L + 1 before is done."""
        await self.reach(Stage.DECIDED)
        await self.progress.wait(self.index - self.ahead(self.index) - 1, Stage.DONE)

    async def may_join(self) -> None:
        """Wait until the previous iteration has generated, and its deferred groups are known."""
        await self.progress.wait(self.index - 1, Stage.GENERATED)

    async def may_evaluate(self) -> None:
        """Wait until engines serve the weights that this iteration starts with. It must end before its own weights are synced."""
        await self.progress.wait(self.index - 1, Stage.SERVED)

    async def may_train(self) -> None:
        """Wait until the trainer is done with the previous iteration."""
        await self.progress.wait(self.index - 1, Stage.LEFT_TRAINER)

    async def may_sync(self) -> None:
        """Wait until engines may get this iteration's weights: the previous one's evaluation is over.

        With pipeline.on_update=finish it also waits until iterations ahead have generated, so that one version generates all of
        an iteration.
        """
        await self.progress.wait(self.index - 1, Stage.LEFT_ENGINES)
        if self.finish:
            for later in range(self.index + 1, min(self.index + self.most, self.last) + 1):
                if not self._is_ahead(later):
                    # this iteration must be done before the next one draws, and so before later ones draw
                    break
                await self.progress.wait(later, Stage.DECIDED)
                if not self._is_ahead(later):
                    break
                await self.progress.wait(later, Stage.GENERATED)

    def _is_ahead(self, later: int) -> bool:
        """Whether a later iteration draws before this one is done, as decided so far: its L may still be lowered."""
        return later - self.ahead(later) <= self.index

    async def may_publish(self) -> None:
        """Wait until the previous iteration is done: manifests are written in order."""
        await self.progress.wait(self.index - 1, Stage.DONE)

    async def reach(self, stage: Stage) -> None:
        """Note how far this iteration is."""
        await self.progress.reach(self.index, stage)


class Work(Protocol):
    """Does the work of an iteration."""

    def __call__(self, index: int, slot: IterationSlot) -> Coroutine[Any, Any, None]: ...


async def run_iterations(
    work: Work, flow_name: str, config: RunConfig, first: int, ahead_of: AheadOf | None = None
) -> None:
    """Run every iteration of the run from index `first` on, each as a flow run of the flow `flow_name`.

    ahead_of: how many iterations may be open before an iteration; by default pipeline.ahead, which it may not exceed.

    Raises the error of the iteration that fails; a flow run created after it ends too, with nothing done.
    """
    progress, ahead, last = (
        Progress(first, config.run_limit),
        config.pipeline.ahead,
        config.run.iterations - 1,
    )
    finish = config.pipeline.on_update == "finish"

    async with together() as group:
        for index in range(first, last + 1):
            slot = IterationSlot(
                index,
                progress,
                ahead=ahead_of or (lambda _: ahead),
                most=ahead,
                last=last,
                finish=finish,
                tidy=partial(collect_between_iterations, index - first - ahead),
            )
            group.create_task(_run_flow(work, slot, _flow(config, flow_name, index)))
            await progress.wait(index - ahead, Stage.TRAINED)


_work: ContextVar[Callable[[int], Coroutine[Any, Any, None]]] = ContextVar("work of an iteration")


async def _iteration(index: int) -> None:
    """An iteration, as its flow run calls it. Prefect sends the function to Ray with each task: by its name, if it has one."""
    with untagged():
        await _work.get()(index)


async def _run_flow(work: Work, slot: IterationSlot, flow: Flow[[int], Coroutine[Any, Any, None]]) -> None:
    """Run one iteration as a Prefect flow whose only parameter is the index.

    Prefect serialises a flow's parameters and keeps them whole with the flow run, which a slot and a runtime cannot be:
    they are bound to the context instead.
    """
    _work.set(partial(_in_turn, work, slot))
    await flow(slot.index)


async def _in_turn(work: Work, slot: IterationSlot, index: int) -> None:
    await slot.may_work()
    await work(index, slot)
    await slot.reach(Stage.DONE)


def begin_subflows(attempt: int) -> None:
    """Number this attempt's subflows, so that Prefect does not reuse subflows of an earlier attempt."""
    count_apart(_iteration, attempt)


def _flow(config: RunConfig, name: str, index: int) -> Flow[[int], Coroutine[Any, Any, None]]:
    runner: dict[str, Any] = {"task_runner": JoinedRayTaskRunner()} if in_shards(config) else {}
    run_name = f"{config.run.name}, iteration {iteration_number(index)}"
    return Flow(_iteration, name=name, flow_run_name=run_name, **runner)


EvaluateTask = Task[[IterationContext], Coroutine[Any, Any, EvaluateRecord]]


async def evaluate_untrained(runtime: Runtime) -> None:
    """Held-out accuracy of the untrained policy, kept in the first iteration's folder."""
    if runtime.config.evaluation.sets and not runtime.config.evaluates_in_background:
        record = await _evaluate(IterationContext(runtime, 0), evaluate_before)
        await report.evaluation(runtime, record)


async def evaluate_if_due(ctx: IterationContext) -> None:
    """Evaluate the weights that this iteration made, before the run goes on."""
    if evaluates_after(ctx.config, ctx.index + 1):
        await _evaluate(ctx, evaluate)


async def evaluate_beside(ctx: IterationContext, slot: IterationSlot) -> None:
    """Evaluate the weights that this iteration starts with, if that is due and the previous iteration has not."""
    config = ctx.config
    if not config.evaluates_in_background or not config.evaluation.sets:
        return
    await slot.may_evaluate()
    if due(ctx.index, config.evaluation.every) and not await asyncio.to_thread(is_evaluated_by, ctx):
        await report.evaluation(ctx.runtime, await _evaluate(ctx, evaluate_before))


async def _evaluate(ctx: IterationContext, task: EvaluateTask) -> EvaluateRecord:
    return await run_recorded(task, await with_evaluation_shards(ctx))


log = logging.getLogger(__name__)
ESS = "train/ess"


async def lower_ahead(runtime: Runtime, index: int) -> None:
    """Decide how far ahead iteration `index` may be, from committed iterations. A drawn iteration keeps its setting."""
    bound, prompts = runtime.config.pipeline.min_ess, runtime.prompts
    if bound is None:
        return
    decided = await asyncio.to_thread(_decide, runtime, index, bound)
    if decided == prompts.ahead:
        return
    await asyncio.to_thread(_record, runtime, decided)
    log.warning(
        "%s was below pipeline.min_ess=%g in %d iterations in a row: from iteration %d on %d may be open ahead, not %d",
        ESS,
        bound,
        LOW_IN_A_ROW,
        iteration_number(index),
        decided.at(index),
        prompts.ahead.at(index),
    )
    prompts.use_ahead(decided)


def _decide(runtime: Runtime, index: int, bound: float) -> Ahead:
    folder, ahead = runtime.run_folder, runtime.prompts.ahead
    if not ahead.at(index) or folder.iteration(index).exists(DRAWN):
        return ahead
    first = max(0, index - ahead.at(index) - LOW_IN_A_ROW)
    manifests = {at: folder.manifest(at) for at in range(first, index - ahead.at(index))}
    ess = {at: made.tasks["metrics"].get(ESS) for at, made in manifests.items() if made}
    return lowered(ahead, index, ess, bound)


def _record(runtime: Runtime, ahead: Ahead) -> None:
    store = runtime.run_folder.store
    record = store.read_sealed("run.json")
    record["ahead"] = spans_of(ahead)
    store.write_sealed("run.json", record)
