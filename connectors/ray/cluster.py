"""Joining a Ray cluster, or a local one that outlives this process.

The local head is a process of its own, bound to loopback and found again through a record in MILLRACE_HOME, so that
actors survive the driver that made them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NotRequired

import psutil
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from millrace.connectors.ray import client, head_folder, head_token, head_watch, task_processes
from millrace.connectors.storage.exclusive.recorded_processes import (
    find_process,
    is_alive,
    read_record,
    send_signal,
)
from millrace.connectors.storage.local import (
    PRIVATE_UMASK,
    home,
    library_log,
    locked,
    write_whole,
)
from millrace.core.contracts.progress import starting
from millrace.core.errors import ActorLostError, MillraceError

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120
KEPT_CALLS = "RAY_task_events_max_num_task_in_gcs"  # whose states a head keeps for `ray list tasks`
TRIES = "RAY_gcs_server_port_wait_time_s"  # that many tries, about one a second where an answer comes at once
LOG_BYTES = str(16 * 2**20)  # of each of Ray's logs, which otherwise grow to 512 MiB
STARTS = 3  # of a head that is killed again and again while it starts, or while a run joins it
RAYLET = "raylet"
ADDRESS_FILE = "ray_current_cluster"  # where Ray notes a cluster's address, in its folder
# Keeps Ray from replacing 127.0.0.1 by the address of a network card, and so from listening to the network.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class HeadRecord(TypedDict):
    """The local head as ray.json knows it: its processes by pid and when each was created; none while it starts."""

    address: str
    pids: list[int]
    created: list[float]
    folder: str
    token: NotRequired[bool]  # whether it asks for the token in MILLRACE_HOME; earlier ones did not
    ports: NotRequired[list[int]]  # where its raylet answers


_record = TypeAdapter(HeadRecord)
_watch: head_watch.Watch | None = None  # of the local head that this process has joined


def start_or_join(address: str | None, namespace: str) -> None:
    """Connect this process to Ray under a namespace; starts the local head if none is configured or running.

    A local head that dies meanwhile, or does not answer, is started again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray
    from ray._private import auto_init_hook, ray_constants, worker

    # Else whatever asks Ray for something while a head is replaced starts another, which no record knows.
    auto_init_hook.enable_auto_connect = False
    # Ray's thread that prints what nodes report, beside what is raised of it. It begins by asking the head; where that dies
    # meanwhile, leaving waits for the thread, and Ray ends the process after a minute.
    worker.listen_error_messages = lambda worker, threads_stopped: None
    # The constant that LOOPBACK_ONLY sets was read when ray was first imported, before the address was known.
    if address is None:
        ray_constants.ENABLE_RAY_CLUSTER = False
    if ray.is_initialized():
        if not lost(address) and client.namespace() == namespace:
            return
        leave()
    client.drop()
    for attempt in range(1, STARTS + 1):
        head = address or local_head()
        record = _read() if address is None else None
        head_token.bring(bool(record.get("token")) if record else None)
        try:
            with _one_try() if address is None else contextlib.nullcontext():
                _connect(head, namespace)
            if record:
                _watch_head(record)
            return
        except Exception as error:  # noqa: BLE001 - Ray raises many types; whether the head lives decides
            if address is not None or head_lives() or attempt == STARTS:
                raise
            leave()
            log.warning(
                "the local Ray head died or stood still while the run joined it (%s): starting it again; what Ray printed is in %s",
                type(error).__name__,
                library_log(),
            )


def _connect(address: str, namespace: str) -> None:
    import ray

    with client.joining(address):
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": _python_path()}, **task_processes.SET_UP},
        )
    task_processes.reach_nodes_directly()


@contextlib.contextmanager
def _one_try() -> Iterator[None]:
    """Within, joining a cluster that does not answer fails after one of Ray's tries, some 40 s long, instead of 20."""
    before = os.environ.get(TRIES)
    os.environ[TRIES] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRIES]
        else:
            os.environ[TRIES] = before


def give_back_sigterm() -> None:
    """Put Python's handler of SIGTERM back, for which Ray has put one that prints a stack and aborts 3 s later.

    To be called after joining. Python allows it in the main thread alone: elsewhere this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def joined() -> bool:
    """Whether this process has joined a cluster."""
    import ray

    return bool(ray.is_initialized())


def node_address() -> str:
    """Address of the node that this process has joined."""
    import ray

    return str(ray.util.get_node_ip_address())


@contextlib.contextmanager
def asked(what: str) -> Iterator[None]:
    """Within, Ray is asked for something.

    Raises ActorLostError where this process has left its cluster, as to join a new one, or stands outside and is cut off from it,
    and where its local head has died or does not answer: Ray would block the thread for a minute, and then end the process.
    """
    from ray.exceptions import RaySystemError

    left = f"{what}: the Ray cluster was left meanwhile"
    if not joined():
        raise ActorLostError(left)
    if head_died() or (_watch and _watch.look()):
        raise ActorLostError(f"{what}: the local Ray head {_how()}")
    try:
        yield
    except RaySystemError:
        if joined():
            raise
        raise ActorLostError(left) from None
    except client.BROKEN as error:
        raise ActorLostError(f"{what}: {client.CUT_OFF}: {client.first_line(error)}") from None


def head_died() -> bool:
    """Whether this process is connected to a local head that is recorded and has lost a process, or answers no more."""
    record = None if client.connection() else _read()
    return bool(record and record["address"] == gcs_address() and not _works(record))


def _works(record: HeadRecord) -> bool:
    """Whether every process of the head that this process has joined lives and answers, as far as was seen until now."""
    return _alive(record) and not (_watch and _watch.reason)


def _how() -> str:
    """What became of the head that this process had joined, for a message."""
    return f"does not answer ({_watch.reason})" if _watch and _watch.reason else "died"


def _watch_head(record: HeadRecord | None) -> None:
    """Watch this head from now on, and none before; None: none at all."""
    global _watch
    if _watch:
        _watch.end()
    _watch = None
    if record:
        end = partial(_end_at, record["address"])
        _watch = head_watch.Watch(_addresses(record), record["pids"], end)


def _addresses(record: HeadRecord) -> list[str]:
    """Where the head is asked whether it answers."""
    return [record["address"], *(f"127.0.0.1:{port}" for port in record.get("ports", []))]


def gcs_address() -> str | None:
    """Of the cluster that this process has joined as one of its nodes; None where it has left it, or leaves it just now."""
    import ray

    try:
        return str(ray.get_runtime_context().gcs_address) if joined() else None
    except AttributeError:  # Ray takes what it has of a cluster away piece by piece
        return None


def lost(address: str | None) -> bool:
    """Whether the local head that this process is connected to has died; a configured cluster looks after itself."""
    if address is not None or not joined():
        return False
    record = _read()
    return not (record and record["address"] == gcs_address() and _works(record))


def what_happened() -> str:
    """What is told of a local head that was lost: what became of it, and that another one is started."""
    return f"the local Ray head {_how()}: starting it again; what Ray printed is in {library_log()}"


def leave() -> None:
    """Disconnect; detached actors stay. What Ray prints meanwhile, the last lines of a part that died, goes to the log.

    Ray ends the process, without a word, where another thread frees a reference while its core goes down, which can take
    seconds. So the core is hidden first: a reference that finds none is freed all the same.
    """
    import ray
    from ray._private.worker import SCRIPT_MODE, global_worker

    _watch_head(None)
    core = vars(global_worker).pop("core_worker", None) if global_worker.mode == SCRIPT_MODE else None
    with library_log().open("a") as file, contextlib.redirect_stdout(file):
        ray.shutdown()
        if core is not None:
            core.shutdown_driver()


def local_head() -> str:
    """Address of the local head, started if it does not run and answer. What an earlier one left ends and goes first."""
    with locked(_path().with_suffix(".lock")):
        record = _read()
        if record and _alive(record):
            reason = head_watch.stays_silent(_addresses(record), record["pids"])
            if reason is None:
                return str(record["address"])
            log.warning(
                "the local Ray head does not answer (%s): it is ended, and another one starts; what its actors held is built again",
                reason,
            )
        _end(record)
        with starting(log, "Ray"):
            for _ in range(STARTS - 1):
                try:
                    return _start()
                except _HeadDiedError as error:
                    log.warning("%s\nStarting it again", error)
            return _start()


class _HeadDiedError(MillraceError):
    """A part of the head ended while it started, by itself or killed."""


def head_lives() -> bool:
    """Whether a local head is recorded, every process of it lives, and it answers."""
    record = _read()
    return bool(
        record and _alive(record) and head_watch.stays_silent(_addresses(record), record["pids"]) is None
    )


def _end_at(address: str) -> None:
    """End the local head that does not answer here: Ray goes on waiting for one that stands still."""
    with locked(_path().with_suffix(".lock")):
        record = _read()
        if record and record["address"] == address:
            _end(record)


def stop_local_head() -> bool:
    """End the local head, or what is left of one, with its folder; False if nothing of one runs."""
    with locked(_path().with_suffix(".lock")):
        ended = _end(_read(), patience_s=5)
        _path().unlink(missing_ok=True)
    return ended


def _end(record: HeadRecord | None, patience_s: float = 0, *, keep_folders: bool = False) -> bool:
    """End every process of this home's heads, and remove their folders; whether any ran.

    record: of the last one, which may have lost some of its processes, or whose start was interrupted.
    patience_s: that long they may end by themselves.
    """
    folders = {str(folder) for folder in head_folder.parent().glob(f"{head_folder.prefix()}*")}
    marks = set(folders)
    left: set[psutil.Process] = set()
    if record:
        folders.add(record["folder"])
        # Ray's server for remote clients, which may have died alone and so is not in the record, is known by the address
        marks |= {record["folder"], *([f"--address={record['address']}"] if record["address"] else [])}
        left |= {process for process in map(find_process, record["pids"], record["created"]) if process}
    left |= {process for process in psutil.process_iter() if any(_belongs(process, mark) for mark in marks)}
    left |= {child for process in left for child in _below(process)}
    if patience_s:
        for process in left:
            send_signal(process, signal.SIGTERM)
        psutil.wait_procs(left, timeout=patience_s)
    for process in left:
        send_signal(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=5)
    for folder in [] if keep_folders else folders:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(left)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _start() -> str:
    folder = head_folder.make()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1"]
    command += [
        "--port=0",  # Ray binds the port that it picks: one picked here might be another's by then
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--temp-dir={folder / head_folder.RAYS}",
    ]
    command += [
        "--num-cpus=1024",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]  # what runs where is placed by hand
    environment = {
        **os.environ,
        **LOOPBACK_ONLY,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": _python_path(),
    }
    environment.pop("RAY_RAYLET_PID", None)  # a driver's, see millrace/__init__.py
    environment = head_token.added(environment)
    environment.setdefault("RAY_ROTATION_MAX_BYTES", LOG_BYTES)
    environment.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    environment.setdefault(KEPT_CALLS, "1000")  # of 100,000, by which the head grew by 22 KiB an iteration
    environment["RAY_prestart_worker_first_driver"] = "0"
    environment["RAY_enable_worker_prestart"] = "0"
    record: HeadRecord = {"address": "", "pids": [], "created": [], "folder": str(folder), "token": True}
    # before it starts: whoever comes after a start that was interrupted ends what is left of it
    _write(record)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            env=environment,
            umask=PRIVATE_UMASK,
            check=False,
        )
    except subprocess.TimeoutExpired:
        _end(record, keep_folders=True)
        raise MillraceError(f"Ray did not start within {START_TIMEOUT_S} s; its log: {folder}") from None
    if done.returncode:
        _end(record)
        raise _HeadDiedError(f"Ray did not start:\n{(done.stdout + done.stderr)[-2000:]}")
    found = [process for process in psutil.process_iter() if _belongs(process, str(folder))]
    record["pids"] = [process.pid for process in found]
    record["created"] = [process.create_time() for process in found]
    record["address"] = (folder / head_folder.RAYS / ADDRESS_FILE).read_text()
    record["ports"] = [
        port for process in found for port in _ports(process) if head_watch.answers(f"127.0.0.1:{port}")
    ]
    _write(record)
    return str(record["address"])


def _ports(process: psutil.Process) -> list[int]:
    """Where a raylet listens."""
    try:
        if process.name() != RAYLET:
            return []
        open_ = process.net_connections("tcp")
        return [each.laddr.port for each in open_ if each.status == psutil.CONN_LISTEN]
    except psutil.Error:  # it died just now, which whoever joins it sees
        return []


def _belongs(process: psutil.Process, mark: str) -> bool:
    """Whether it is a process of Ray's, of this user, with a mark among its arguments. A pager that shows a log is none."""
    try:
        arguments = process.cmdline()
        ours = process.uids().real == os.getuid() and any("/ray/" in a or "ray." in a for a in arguments)
        return ours and any(mark in argument for argument in arguments)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _alive(record: HeadRecord) -> bool:
    """Whether every process of the head is the one that was started."""
    return bool(record["pids"]) and all(map(is_alive, record["pids"], record["created"]))


def _path() -> Path:
    return home() / "ray.json"


def _write(record: HeadRecord) -> None:
    write_whole(_path(), [json.dumps(record).encode()])


def _read() -> HeadRecord | None:
    """The record of the local head; None if there is none, or it holds something else: then no head is known.

    Raises MillraceError if the file cannot be read.
    """
    text = read_record(_path())
    if text is None:
        return None
    try:
        record = _record.validate_json(text)
    except ValidationError:
        record = None
    if (
        not record
        or len(record["pids"]) != len(record["created"])
        or not head_folder.is_heads(record["folder"])
    ):
        log.warning("%s is no record of a Ray head: what it was about, if anything, is ended", _path())
        return None
    return record


def _python_path() -> str:
    """Where actors find millrace and what the driver's PYTHONPATH names; they add folders of the user's that the settings name.

    millrace comes last: from a wheel its folder is site-packages, whose other packages must not hide a user's.
    """
    package = str(Path(__file__).parents[3])
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([*inherited, package]))
