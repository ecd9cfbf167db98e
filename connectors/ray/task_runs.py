"""Prefect tasks on Ray: submitted to a node, and awaited without a thread.

Owns how a task of the flow becomes a Ray task, and which of Ray's errors mean that its process is gone, or that Prefect could not
start it there. Knows nothing of what tasks do.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextvars import Context
from typing import Any, Self, TypeVar

# before prefect_ray, whose lazy import would run ray.exceptions twice: Ray's errors would be of classes that nobody catches
import ray  # noqa: F401
from prefect import Task
from prefect.client.schemas import State
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.exceptions import RayError, RayTaskError

from millrace.connectors.ray.answers import in_cluster
from millrace.connectors.ray.client import BROKEN, CUT_OFF, awaited, first_line
from millrace.connectors.ray.cluster import asked
from millrace.connectors.ray.task_processes import task_options
from millrace.core.errors import ActorLostError, MillraceError

Argument = TypeVar("Argument")
Result = TypeVar("Result")


REMEDY = (
    "set PREFECT_API_URL to the address of a Prefect server that every node reaches, or placement.task_runner=local, and start the "
    "same command again"
)


class JoinedRayTaskRunner(RayTaskRunner):  # type: ignore[misc]
    """Prefect's task runner on the joined cluster. Never starts Ray, not even while a dead head is being replaced."""

    def __enter__(self) -> Self:
        """Enter as a plain task runner, without RayTaskRunner's start of Ray."""
        super(RayTaskRunner, self).__enter__()
        return self


class NotBegunError(MillraceError):
    """Prefect could not start a task on a node: its server cannot be reached there, or the node has other code."""


async def run_on_ray(
    task: Task[[Argument], Coroutine[Any, Any, Result]],
    argument: Argument,
    flow: Context,
    node: str | None,
    imports: Sequence[str],
) -> Result:
    """Run a task in one of Ray's worker processes, on `node` while it lives. Returns its result, or raises its error.

    flow: the context of the flow run with a RayTaskRunner, taken outside of its tasks, since a task's arguments would be sent
    along. imports: modules that processes for such tasks load at their start. Raises ActorLostError if the process or its node
    died (Ray does not retry it), and NotBegunError.
    """

    def submit() -> Any:
        with asked(f"{task.name} cannot be submitted"), remote_options(**task_options(node, imports)):
            return task.submit(argument)

    future = await asyncio.to_thread(flow.copy().run, submit)
    try:
        state: State[Result] = await in_cluster("its process", awaited(future.wrapped_future))
    except RayTaskError as error:  # not the task's own error, which is in its state
        raise NotBegunError(f"{type(error.cause).__name__}: {error.cause}", remedy=REMEDY) from None
    except RayError as error:
        raise ActorLostError(f"its process died: {first_line(error)}") from None
    except BROKEN:
        raise ActorLostError(CUT_OFF) from None
    if state.is_crashed():
        raise ActorLostError(f"its process was ended: {state.message}")
    return await state.aresult()
