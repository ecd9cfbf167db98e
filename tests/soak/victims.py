"""Find the processes of a run by their part in it, and kill or interrupt them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from millrace.connectors.host.process_identity import find_process


def kill(victim: str, driver: int, home: Path, nodes: Sequence[int] = ()) -> list[int]:
    """`kill -9` a part of the run; returns the processes killed, none if the part does not run. nodes: as of `processes`."""
    killed = []
    for pid in processes(victim, driver, home, nodes):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed.append(pid)
    return killed


def interrupt(driver: int) -> int:
    """Send Ctrl-C as a terminal does: to every process of the driver's group. Returns how many there were."""
    group = [process for process in psutil.process_iter() if _is_in_group(process.pid, driver)]
    os.killpg(driver, signal.SIGINT)
    return len(group)


def _is_in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def processes(victim: str, driver: int, home: Path, nodes: Sequence[int] = ()) -> list[int]:
    """Process ids of a part of the run that `driver` drives, with MILLRACE_HOME at `home`.

    nodes: processes that hold the nodes of the cluster, where its user started it; else the run has a head of its own.
    """
    if victim == "driver":
        return [driver]
    if victim == "prefect":
        record = json.loads((home / "prefect-server.json").read_text())
        server = find_process(record["pid"], record["created"])
        return [server.pid, *(child.pid for child in _below(server.pid))] if server else []
    heads = list(nodes) or _heads(home)
    if victim == "scorer":
        parents = [psutil.Process(driver), *_shards(heads)]
        return [child.pid for parent in parents for child in parent.children() if _is_worker(child)]
    if victim == "ray":
        return heads
    if victim == "shard":
        return [process.pid for process in _shards(heads)]
    hosts = [process for pid in heads for process in _below(pid) if _is_actor(process)]
    servers = {host: host.children() for host in hosts}
    if victim in ("trainer", "board"):  # neither has a server; the board computes nothing
        alone = [host for host, children in servers.items() if not children]
        return [host.pid for host in alone if _has_torch(host) == (victim == "trainer")]
    return [child.pid for children in servers.values() for child in children]


def _heads(home: Path) -> list[int]:
    record = json.loads((home / "ray.json").read_text())
    living = map(find_process, record["pids"], record["created"])
    return [process.pid for process in living if process]


def _shards(heads: list[int]) -> list[psutil.Process]:
    """Processes in which a shard is at work."""
    return [process for pid in heads for process in _below(pid) if "_shard" in _title(process)]


def _has_torch(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("libtorch" in mapped.path for mapped in process.memory_maps())
    return False


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.spawn" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _is_actor(process: psutil.Process) -> bool:
    return _title(process).startswith("ray::Host")


def _title(process: psutil.Process) -> str:
    try:
        return process.cmdline()[0]
    except (psutil.NoSuchProcess, IndexError):
        return ""
