"""Find the processes of a run by their part in it, and kill or interrupt them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil


def kill(victim: str, driver: int, home: Path) -> list[int]:
    """`kill -9` a part of the run; returns the processes killed, none if the part does not run."""
    killed = []
    for pid in processes(victim, driver, home):
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


def processes(victim: str, driver: int, home: Path) -> list[int]:
    """Process ids of a part of the run that `driver` drives, with MILLRACE_HOME at `home`."""
    if victim == "driver":
        return [driver]
    if victim == "prefect":
        server = psutil.Process(json.loads((home / "prefect-server.json").read_text())["pid"])
        return [server.pid, *(child.pid for child in server.children(recursive=True))]
    if victim == "scorer":
        return [child.pid for child in psutil.Process(driver).children() if _is_worker(child)]
    heads = [int(pid) for pid in json.loads((home / "ray.json").read_text())["pids"]]
    if victim == "ray":
        return heads
    hosts = [process for pid in heads for process in _below(pid) if _is_actor(process)]
    servers = {host.pid: host.children() for host in hosts}
    if victim == "trainer":
        return [pid for pid, children in servers.items() if not children]
    return [child.pid for children in servers.values() for child in children]


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
    try:
        return process.cmdline()[0].startswith("ray::Host")
    except (psutil.NoSuchProcess, IndexError):
        return False
