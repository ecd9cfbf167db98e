"""Creates, finds, calls and ends named, detached actors around plain classes.

Owns names (`<role>-<index>` within the run's namespace), resources and errors; knows nothing of what the classes do.
Health checks have separate threads, so that a busy actor still answers them. During a call the caller asks the actor for its
progress, and ends the actor if there is none.
"""

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import ray
from ray import cloudpickle

from millrace.connectors.host.gpu_busy import Busy, visible_meter
from millrace.connectors.host.local_files import keep_private
from millrace.connectors.host.own_addresses import reach_own_directly
from millrace.connectors.ray.answers import answer
from millrace.connectors.ray.client import connection
from millrace.connectors.ray.cluster import asked
from millrace.connectors.ray.placement import ActorPlacement
from millrace.core.contracts.references import variables
from millrace.core.errors import ActorLostError, ActorStalledError, StalledError
from millrace.core.hooks.loading import EXPECTED, expected
from millrace.core.plain_text import take_any_text
from millrace.core.waits import USUAL, Limit, beat, progressing, pulse

log = logging.getLogger(__name__)
PING_TIMEOUT_S = 20.0
START_TIMEOUT_S = 300.0  # a new process imports gigabytes, perhaps on a node that starts many at once
IN_TIME = 0.8  # share of the time between two progress checks that an actor has to answer
NAME_TIMEOUT_S = 60.0  # a cluster takes some 15 s to notice that a node died
STORAGE_PREFIXES = ("AWS_", "GOOGLE_", "GCS_", "AZURE_", "FSSPEC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
TOOL_PREFIXES = (
    "MILLRACE_STORAGE_",
    "MILLRACE_FINISHED_LOG",
    "MILLRACE_KILL_POINT",
)  # for tests, in every process


class HeldPart(Protocol):
    """The object inside an actor, which can report its state while it works."""

    def state(self) -> Any:
        """The object's state, as a mapping."""
        ...


T = TypeVar("T", bound=HeldPart)
P = ParamSpec("P")
R = TypeVar("R")


@ray.remote(max_restarts=0, concurrency_groups={"health": 2})  # type: ignore[call-overload]  # its stubs lack the groups
class Host:
    """The actor: holds one object of a plain class."""

    def __init__(
        self,
        pickled: bytes,
        config: Mapping[str, Any],
        index: int,
        count: int,
        environment: Mapping[str, str],
        node: str | None,
        made_by: str,
    ) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        # Ray moved the actor, and its GPU numbers are for another node
        if node and node != self._node:
            raise ActorLostError(f"node {node} died before the actor was made")
        keep_private()  # the user's cluster may have another umask
        take_any_text()
        os.environ.update(environment)
        reach_own_directly()
        os.environ["RAY_NODE_IP_ADDRESS"] = ray.util.get_node_ip_address()
        os.environ["MILLRACE_RUN"] = ray.get_runtime_context().namespace
        self._made_by = made_by
        self._meter = visible_meter()
        # Only now, since modules of a class may look for GPUs when they are imported: CUDA reads once which ones it may see
        cls: Callable[[Mapping[str, Any], int, int], HeldPart] = cloudpickle.loads(pickled)
        self._held = cls(config, index, count)

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call the held object's method of this name: `method` is its class's, or a Protocol's that the class implements."""
        own: Callable[..., Any] = getattr(self._held, method.__name__)
        beat()
        try:
            return own(*args)
        finally:
            beat()

    @ray.method(concurrency_group="health")
    def state(self) -> dict[str, Any]:
        """The held object's state, with the actor's place and progress."""
        where = {"node": self._node, "address": os.environ["RAY_NODE_IP_ADDRESS"]}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {
            **self._held.state(),
            **where,
            "gpus": seen,
            "actor_pid": os.getpid(),
            "made_by": self._made_by,
            "pulse": pulse(),
        }

    @ray.method(concurrency_group="health")
    def gpu_busy(self, start: float, end: float) -> dict[str, Busy] | None:
        """How busy the actor's GPUs were between two moments, by UUID; None if it has none that can be read."""
        return self._meter.between(start, end) if self._meter else None


class Actor(Generic[T]):
    """A handle for one actor, which holds an object of class T."""

    def __init__(self, name: str, handle: Any, limit: Limit = USUAL, *, starts: bool = False) -> None:
        """limit: how long a call may make no progress. starts: the actor is new, and its process may still be starting."""
        self.name = name
        self.limit = limit
        self._starts = starts
        self._handle = handle
        self._connection = connection()

    async def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of T on the held object, as in `actor.call(Rank.save, url)`, and wait.

        Raises ActorLostError if the actor died, ActorStalledError if it made no progress and was ended, otherwise the method's error.
        """
        assert not kwargs, "actors take positional arguments"
        return await while_moving([self], method, self.unwatched(method, *args))

    async def unwatched(self, method: Callable[..., R], *args: Any) -> R:
        """The same without the progress check, for callers that check several actors together."""
        result: R = await self._result(lambda: self._handle.call.remote(method, *args))
        beat()
        return result

    async def state(self, patience_s: float | None = None) -> dict[str, Any]:
        """The held object's state, the actor's place (node, address, gpus, actor_pid), made_by and its pulse.

        patience_s: how long the actor has to answer; by default PING_TIMEOUT_S, and START_TIMEOUT_S for the first answer.
        Raises ActorLostError if the actor is dead or does not answer.
        """
        if patience_s is None:
            patience_s = START_TIMEOUT_S if self._starts else PING_TIMEOUT_S
        try:
            async with asyncio.timeout(patience_s):
                state: dict[str, Any] = await self._result(lambda: self._handle.state.remote())
                return state
        except TimeoutError:
            raise ActorLostError(f"actor {self.name} does not answer for {patience_s:g} s") from None

    async def gpu_busy(self, start: float, end: float) -> dict[str, Busy] | None:
        """How busy its GPUs were between two moments, seconds of the epoch, by UUID; None if it has none that can be read.

        Raises ActorLostError as `state` does.
        """
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                found: dict[str, Busy] | None = await self._result(
                    lambda: self._handle.gpu_busy.remote(start, end)
                )
                return found
        except TimeoutError:
            raise ActorLostError(f"actor {self.name} does not answer for {PING_TIMEOUT_S:g} s") from None

    async def _result(self, submit: Callable[[], Awaitable[Any]]) -> Any:
        result = await answer(self.name, submit, self._connection)
        self._starts = False
        return result

    def kill(self) -> None:
        """End the actor's process. Raises ActorLostError if this process has left the cluster, as all calls to Ray here do."""
        with asked(f"actor {self.name}"):
            ray.kill(self._handle, no_restart=True)


class _Pulses:
    """The progress of several actors. Progress of one counts for all, since the others may wait for it."""

    def __init__(self, actors: Sequence[Actor[Any]]) -> None:
        self._actors = actors
        self._known: dict[str, object] = {}  # the newest pulse of each actor
        self._silent: list[str] = []  # actors that did not answer the last time

    async def __call__(self) -> object:
        """All newest pulses. An actor that does not answer keeps its last one; if it died, its call raises."""
        answers = await asyncio.gather(*map(self._state, self._actors))
        named = {actor.name: answer for actor, answer in zip(self._actors, answers, strict=True)}
        self._silent = [name for name, answer in named.items() if answer is None]
        self._known |= {name: answer["pulse"] for name, answer in named.items() if answer}
        return dict(self._known)

    async def _state(self, actor: Actor[Any]) -> dict[str, Any] | None:
        try:
            return await actor.state(min(IN_TIME * actor.limit.pause_s, PING_TIMEOUT_S))
        except ActorLostError:
            return None

    def described(self) -> str:
        """The result of the last reading, for a message."""
        if self._silent:
            return f"{', '.join(self._silent)} did not answer"
        return "all answered, and none got anything done"


async def while_moving(actors: Sequence[Actor[Any]], method: Callable[..., Any], awaited: Awaitable[R]) -> R:
    """Await a call to these actors. If none of them makes progress, end all and raise ActorStalledError."""
    pulses, limit = _Pulses(actors), actors[0].limit
    names = actors[0].name if len(actors) == 1 else f"{actors[0].name} to {actors[-1].name}"
    what = f"{method.__name__} of {names}"
    try:
        return await progressing(awaited, what, limit, pulses)
    except StalledError as error:
        if error.where != what:
            raise  # the method raised it, about something that it waited for
        log.warning("nothing moved in %s for %g s: ending all", what, limit.seconds)
        for actor in actors:
            actor.kill()
        verdict = limit.verdict(what, pulses.described())
        raise ActorStalledError(verdict.reason, where=what, remedy=verdict.remedy) from None


class ActorGroup(Generic[T]):
    """A group of actors: every call goes to all of them."""

    def __init__(self, actors: list[Actor[T]]) -> None:
        self.actors = actors

    async def call(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call all; the results in order. After a failure, does not wait for the others. Raises the errors of `Actor.call`."""
        assert not kwargs, "actors take positional arguments"
        calls = asyncio.gather(*(actor.unwatched(method, *args) for actor in self.actors))
        return list(await while_moving(self.actors, method, calls))

    async def call_together(
        self, patience_s: float, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call all with a method in which they wait for each other; the results in order, or the first error.

        If all raise an error, they can be called again. If an actor is still in the call `patience_s` after the first error, it
        waits for the failed one for ever; then all are killed, and the caller creates new ones.
        """
        assert not kwargs, "actors take positional arguments"
        calls = [asyncio.ensure_future(actor.unwatched(method, *args)) for actor in self.actors]
        try:
            first = asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            done, waiting = await while_moving(self.actors, method, first)
            error = next((call.exception() for call in calls if call in done and call.exception()), None)
            if error is None:
                return [call.result() for call in calls]
            # if an actor is lost, all are created again, so there is no need to wait
            if waiting and not isinstance(error, ActorLostError):
                _, waiting = await asyncio.wait(waiting, timeout=patience_s)
                if waiting:
                    log.warning(
                        "%d of %d actors wait for one that failed: ending all", len(waiting), len(calls)
                    )
                    for actor in self.actors:
                        actor.kill()
            raise error
        finally:
            for call in calls:
                if not call.cancel() and not call.cancelled():
                    call.exception()  # asyncio reports exceptions that nobody retrieved

    async def states(self) -> list[dict[str, Any]]:
        """All states in order."""
        return list(await asyncio.gather(*(actor.state() for actor in self.actors)))


def make(
    role: str,
    index: int,
    count: int,
    cls: Callable[[Any, int, int], T],
    config: Mapping[str, Any],
    place: ActorPlacement | None = None,
    limit: Limit = USUAL,
    threads: int = 1,
) -> Actor[T]:
    """Create an actor in its place, or on any node; its constructor runs in the background.

    limit: how long a call may make no progress. threads: number of calls that run at once.
    """
    name = f"{role}-{index}"
    options = {**(place.options if place else {}), **({"max_concurrency": threads} if threads > 1 else {})}
    environment = {**passed_environment(config), **(place.environment if place else {})}
    host = Host.options(name=name, lifetime="detached", num_cpus=0, **options)  # type: ignore[attr-defined]
    try:
        node = place.node if place else None
        with asked(f"actor {name} cannot be made"):
            handle = host.remote(
                cloudpickle.dumps(cls), dict(config), index, count, environment, node, digest(config)
            )
    except ValueError as error:  # the cluster has not yet noticed that the node of the name's actor died
        raise ActorLostError(f"actor {name} cannot be made yet: {error}") from None
    return Actor(name, handle, limit, starts=True)


def passed_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """This process's environment variables that the run's other processes need: storage, the configuration's secrets, code hashes."""
    secrets = {name: os.environ[name] for name in variables(config) if name in os.environ}
    code = {EXPECTED: os.environ[EXPECTED]} if EXPECTED in os.environ else {}
    return {**storage_environment(), **secrets, **code}


def storage_environment() -> dict[str, str]:
    """This process's environment variables for object stores and storage tests, since actors use the same storage.

    Passed to an actor as an argument, since Ray shows and logs a runtime environment.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith((*STORAGE_PREFIXES, *TOOL_PREFIXES))
    }


def find(role: str, index: int, cls: Callable[[Any, int, int], T], limit: Limit = USUAL) -> Actor[T] | None:
    """An existing actor of this namespace, created by this process or an earlier one; it holds an object of `cls`."""
    name = f"{role}-{index}"
    try:
        with asked(f"actor {name} cannot be found"):
            return Actor(name, ray.get_actor(name), limit)
    except ValueError:
        return None


async def find_alive(
    role: str, index: int, cls: Callable[[Any, int, int], T], limit: Limit = USUAL
) -> Actor[T] | None:
    """An existing actor, if it answers. If it does not answer, it is killed."""
    actor = find(role, index, cls, limit)
    if actor is None:
        return None
    try:
        await actor.state()
    except ActorLostError:
        await _end([actor.name])
        return None
    return actor


def find_group(
    role: str, count: int, cls: Callable[[Any, int, int], T], limit: Limit = USUAL
) -> ActorGroup[T] | None:
    """All actors of a role, or None if one is missing."""
    actors = [actor for index in range(count) if (actor := find(role, index, cls, limit)) is not None]
    return ActorGroup(actors) if len(actors) == count else None


def digest(config: Mapping[str, Any]) -> str:
    """A hash of a configuration, the code of its loss and its trainer, and the secrets that its actors use.

    A living actor has the code and secrets of the start that created it, so a changed hash means that it must be replaced.
    """
    loss = (config.get("algorithm") or {}).get("loss") or {}
    paths = (loss.get("function"), (config.get("trainer") or {}).get("rank"))
    code = [expected().get((path or "").partition(":")[0]) for path in paths]
    secrets = {name: os.environ.get(name) for name in variables([loss, config.get("engines")])}
    return hashlib.sha256(json.dumps([config, secrets, code], sort_keys=True).encode()).hexdigest()[:16]


async def end_others(config: Mapping[str, Any]) -> int:
    """End this namespace's actors that have another configuration or do not answer; returns the number."""
    wanted, names = digest(config), []
    for name in _names():
        try:
            with asked(f"actor {name} cannot be found"):
                handle = ray.get_actor(name)
            state = await Actor[HeldPart](name, handle).state()
        except (ActorLostError, ValueError):
            names.append(name)
            continue
        if state["made_by"] != wanted:
            names.append(name)
    if names:
        log.warning("ending %s: created for another configuration, or not answering", ", ".join(names))
    return await _end(names)


async def gpus_busy(start: float, end: float) -> dict[str, Busy] | None:
    """How busy the GPUs of this namespace's actors were between two moments, by UUID; None if no actor has any that can be read.

    An actor that is lost, or does not answer, is left out. GPUs that two actors share are counted once.
    """

    async def of(name: str) -> dict[str, Busy] | None:
        try:
            with asked(f"actor {name} cannot be found"):
                handle = ray.get_actor(name)
            return await Actor[HeldPart](name, handle).gpu_busy(start, end)
        except (ActorLostError, ValueError):
            return None

    readings = [busy for busy in await asyncio.gather(*map(of, _names())) if busy is not None]
    return {uuid: one for busy in reversed(readings) for uuid, one in busy.items()} if readings else None


async def end_namespace(namespace: str) -> int:
    """End all actors of another namespace of this cluster; returns the number."""

    def names() -> list[str]:
        with asked(f"the actors of {namespace} cannot be listed"):
            found = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in found if actor["namespace"] == namespace]

    chosen = names()
    ended = _kill(chosen, namespace)
    await _until_unnamed(names, chosen)
    return ended


async def end(role: str | None = None) -> int:
    """End this namespace's actors, of one role or all; returns the number."""
    return await _end([name for name in _names() if role is None or name.rsplit("-", 1)[0] == role])


def kill_all() -> int:
    """Kill this namespace's actors at once, without waiting for their end; returns the number."""
    return _kill(_names())


def _names() -> list[str]:
    with asked("the run's actors cannot be listed"):
        return list(ray.util.list_named_actors())


def _kill(names: list[str], namespace: str | None = None) -> int:
    """namespace: by default this process's."""
    killed = 0
    for name in names:
        try:
            with asked(f"actor {name} cannot be ended"):
                ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
            killed += 1
        except ValueError:
            continue
    return killed


async def _end(chosen: list[str]) -> int:
    ended = _kill(chosen)
    await _until_unnamed(_names, chosen)
    return ended


async def _until_unnamed(names: Callable[[], list[str]], chosen: list[str]) -> None:
    """Wait until the names are free, which means that the actors are gone."""
    deadline = time.monotonic() + NAME_TIMEOUT_S
    while left := set(names()) & set(chosen):
        if time.monotonic() > deadline:
            log.warning("%s: ended, and still named", ", ".join(sorted(left)))
            break
        await asyncio.sleep(0.05)
