"""What asks Ray for something after its head died, and after the process left the cluster to join another."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import ray

from millrace.connectors.host.local_files import home
from millrace.connectors.ray import actors, cluster, placement
from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError
from tests.support.flow_runs import wait_until
from tests.support.held_parts import Counter

SETTINGS = {"start": 1}
CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "a", "iterations": 1},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "d.jsonl"}]},
    }
)
ASKS: dict[str, Callable[[actors.ActorGroup[Counter]], Any]] = {
    "actors.make": lambda group: actors.make("counter", 1, 2, Counter, SETTINGS),
    "actors.find": lambda group: actors.find("counter", 0, Counter),
    "actors.find_alive": lambda group: actors.find_alive("counter", 0, Counter),
    "actors.find_group": lambda group: actors.find_group("counter", 1, Counter),
    "actors.end_others": lambda group: actors.end_others(SETTINGS),
    "actors.end": lambda group: actors.end(),
    "actors.gpus_busy": lambda group: actors.gpus_busy(0.0, 1.0),
    "actors.end_namespace": lambda group: actors.end_namespace("another"),
    "actors.kill_all": lambda group: actors.kill_all(),
    "actors.Actor.call": lambda group: group.actors[0].call(Counter.add, 1),
    "actors.Actor.unwatched": lambda group: group.actors[0].unwatched(Counter.add, 1),
    "actors.Actor.state": lambda group: group.actors[0].state(),
    "actors.Actor.gpu_busy": lambda group: group.actors[0].gpu_busy(0.0, 1.0),
    "actors.Actor.kill": lambda group: group.actors[0].kill(),
    "actors.ActorGroup.call": lambda group: group.call(Counter.add, 1),
    "actors.ActorGroup.call_together": lambda group: group.call_together(1, Counter.add, 1),
    "actors.ActorGroup.states": lambda group: group.states(),
    "placement.here": lambda group: placement.here(),
    "placement.release": lambda group: placement.release(),
    "placement.release_of": lambda group: placement.release_of("another"),
    "placement.Reservation.places": lambda group: placement.Reservation(CONFIG).places("engine"),
}
ASK_NOTHING = {
    "actors.digest",
    "actors.passed_environment",
    "actors.storage_environment",
    "actors.while_moving",  # watches calls that were made
}


def _public(module: ModuleType) -> set[str]:
    """Functions that a module defines for others, and methods of its classes but of those that run in actors."""
    short = module.__name__.rpartition(".")[2]
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    functions = {name for name, value in own.items() if inspect.isfunction(value)}
    methods = {
        f"{name}.{method}"
        for name, value in own.items()
        if inspect.isclass(value) and name != "HeldPart"
        for method, function in vars(value).items()
        if not method.startswith("_") and inspect.isfunction(function)
    }
    return {f"{short}.{name}" for name in functions | methods}


async def _raised(
    ask: Callable[[actors.ActorGroup[Counter]], Any], group: actors.ActorGroup[Counter]
) -> type[Exception] | None:
    """What asking raises, in a time in which Ray would still wait for a head that is gone."""
    try:
        answer = ask(group)
        if inspect.isawaitable(answer):
            await asyncio.wait_for(answer, 20)
    except (ActorLostError, TimeoutError) as error:
        return type(error)
    return None


def kill_head() -> None:
    for pid in json.loads((home() / "ray.json").read_text())["pids"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.lost(None))


def test_everything_that_asks_is_in_the_table() -> None:
    assert _public(actors) | _public(placement) == {*ASKS, *ASK_NOTHING}


@pytest.mark.slow
async def test_where_the_head_died_it_is_told_so_and_nobody_waits_for_ray(joined: str) -> None:
    group = actors.ActorGroup([actors.make("counter", 0, 1, Counter, SETTINGS)])
    assert await group.call(Counter.add, 4) == [5]
    kill_head()
    for name, ask in ASKS.items():
        if not name.startswith("actors.Actor"):  # an actor may live and answer a moment longer
            assert await _raised(ask, group) is ActorLostError, name
    cluster.start_or_join(None, joined)
    assert actors.find("counter", 0, Counter) is None


class Starting:
    """Never made: its constructor takes longer than any test."""

    def __init__(self, config: Any, index: int, count: int) -> None:
        time.sleep(600)

    def state(self) -> Any:
        raise AssertionError


@pytest.mark.slow
async def test_a_call_of_an_actor_that_still_starts_ends_when_the_head_dies(joined: str) -> None:
    """Ray says nothing of it, and would end this process after a minute."""
    call = asyncio.create_task(actors.make("starting", 0, 1, Starting, SETTINGS).call(Starting.state))
    await asyncio.sleep(0.2)  # as a rule its process has not begun to make it: else Ray does say something
    kill_head()
    with pytest.raises(ActorLostError, match="actor starting-0 died"):
        await asyncio.wait_for(call, 30)
    cluster.start_or_join(None, joined)


async def test_it_is_told_that_the_part_is_lost_and_starts_no_other_ray(joined: str) -> None:
    group = actors.ActorGroup([actors.make("counter", 0, 1, Counter, SETTINGS)])
    assert await group.call(Counter.add, 4) == [5]
    cluster.leave()
    for name, ask in ASKS.items():
        assert await _raised(ask, group) is ActorLostError, name
        assert not ray.is_initialized(), name
    cluster.start_or_join(None, joined)
    assert actors.find("counter", 0, Counter)
    await actors.end()


FREES = """
import threading, time
import ray
from millrace.connectors.ray import cluster

cluster.start_or_join(None, "frees")
for _ in range(2):
    references = [ray.put(number) for number in range(4000)]

    def free():
        while references:
            references.pop()
            time.sleep(0.0002)

    freeing = threading.Thread(target=free)
    freeing.start()
    time.sleep(0.05)
    cluster.leave()
    freeing.join()
    cluster.start_or_join(None, "frees")
    assert ray.get(ray.put(1)) == 1
cluster.leave()
print("left twice")
"""


@pytest.mark.slow
def test_a_process_may_free_references_while_it_leaves(ray_home: Path) -> None:
    """Ray would end it with 1 and no word, at the first reference that goes while its core goes down."""
    done = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "left twice"), done.stderr


ORPHAN = """
import contextlib, json, os, signal, time
from millrace.connectors.ray import cluster
from millrace.connectors.host.local_files import home

deadline = time.monotonic() + 30
while os.getppid() != 1 and time.monotonic() < deadline:
    time.sleep(0.05)
cluster.start_or_join(None, "orphan")
for pid in json.loads((home() / "ray.json").read_text())["pids"]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
while not cluster.lost(None):
    time.sleep(0.05)
cluster.start_or_join(None, "orphan")
cluster.leave()
print("joined again, parent", os.getppid())
"""


@pytest.mark.slow
def test_a_process_whose_shell_has_ended_outlives_the_head(ray_home: Path, tmp_path: Path) -> None:
    """A run in the background: Ray would end it with 1 and no word as it leaves the dead head."""
    said = tmp_path / "said"
    start = f"{shlex.join([sys.executable, '-c', ORPHAN])} > {shlex.quote(str(said))} 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", start], capture_output=True, text=True, check=True).stdout)
    wait_until(lambda: not psutil.pid_exists(pid), pause_s=0.1)
    assert "joined again, parent 1\n" in said.read_text(), said.read_text()
