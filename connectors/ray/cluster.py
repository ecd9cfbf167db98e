"""Joins a configured Ray cluster, or a local head that outlives this process.

The local head is a separate process, bound to loopback and found again through a record in MILLRACE_HOME, so that actors
survive the driver that created them.
"""

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

from millrace.connectors.host.local_files import (
    PRIVATE_UMASK,
    home,
    library_log,
    locked,
    write_whole,
)
from millrace.connectors.host.process_identity import (
    find_process,
    is_alive,
    read_record,
    send_signal,
    wait_ended,
)
from millrace.connectors.ray import client, head, task_processes
from millrace.core.contracts.progress import starting
from millrace.core.errors import ActorLostError, MillraceError

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120
KEPT_CALLS = "RAY_task_events_max_num_task_in_gcs"  # number of calls that `ray list tasks` can show
TRIES = "RAY_gcs_server_port_wait_time_s"  # used by Ray as a number of tries, not of seconds
LOG_BYTES = str(16 * 2**20)  # of each of Ray's logs, which by default grow to 512 MiB
STARTS = 3  # attempts if the head is killed while it starts, or while a run joins it
RAYLET = "raylet"
ADDRESS_FILE = "ray_current_cluster"  # Ray writes a cluster's address to it, in the cluster's folder
# Keeps Ray from replacing 127.0.0.1 by a network card's address, which would make it listen on the network.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class HeadRecord(TypedDict):
    """The content of ray.json: the local head's processes by pid and creation time. None while the head starts."""

    address: str
    pids: list[int]
    created: list[float]
    folder: str
    ports: NotRequired[list[int]]  # of its raylet


_record = TypeAdapter(HeadRecord)
_watch: head.HeadWatch | None = None  # watches the local head that this process has joined


def start_or_join(address: str | None, namespace: str) -> None:
    """Connect this process to Ray under a namespace. Without an address, starts the local head if none runs.

    A local head that dies meanwhile, or does not answer, is started again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray
    from ray._private import auto_init_hook, ray_constants, worker

    # By default any call to Ray while a head is being replaced would start another head, without a record.
    auto_init_hook.enable_auto_connect = False
    # Replaces Ray's thread that prints errors of nodes, which are raised as well. The thread first asks the head. If the head
    # dies meanwhile, leaving the cluster waits for the thread, and Ray ends the process after a minute.
    worker.listen_error_messages = lambda worker, threads_stopped: None
    # Ray read the constant that LOOPBACK_ONLY sets when it was first imported, before the address was known.
    if address is None:
        ray_constants.ENABLE_RAY_CLUSTER = False
    if ray.is_initialized():
        if not lost(address) and client.namespace() == namespace:
            return
        leave()
    client.drop()
    for attempt in range(1, STARTS + 1):
        joined = address or local_head()
        record = _read() if address is None else None
        head.present_token(local=address is None)
        try:
            with _one_try() if address is None else contextlib.nullcontext():
                _connect(joined, namespace)
            if record:
                _watch_head(record)
            return
        except Exception as error:  # noqa: BLE001 - Ray raises many types; what counts is whether the head lives
            if address is not None or head_lives() or attempt == STARTS:
                raise
            leave()
            log.warning(
                "the local Ray head died or hung while the run joined it (%s): starting it again; Ray's output is in %s",
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
    """A context in which joining a silent cluster fails after one try of Ray's, some 40 s, instead of 20 tries."""
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
    """Restore Python's handler of SIGTERM. The handler that Ray sets prints a stack and aborts 3 s later.

    Call it after joining. Outside the main thread it does nothing, since Python allows handlers only there.
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
    """A context for calls to Ray, which raises ActorLostError if the cluster is gone.

    That is so if this process has left its cluster, for example to join a new one, if it is a client whose connection broke, or if
    its local head has died or does not answer. Ray would block the thread for a minute, and then end the process.
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
    """Whether this process is connected to the recorded local head, and that head lost a process or does not answer."""
    record = None if client.connection() else _read()
    return bool(record and record["address"] == gcs_address() and not _works(record))


def _works(record: HeadRecord) -> bool:
    """Whether all processes of the joined head live, and the watch has seen none that does not answer."""
    return _alive(record) and not (_watch and _watch.reason)


def _how() -> str:
    """What happened to the head that this process had joined, for a message."""
    return f"does not answer ({_watch.reason})" if _watch and _watch.reason else "died"


def _watch_head(record: HeadRecord | None) -> None:
    """Watch this head from now on instead of the previous one; None ends the watch."""
    global _watch
    if _watch:
        _watch.end()
    _watch = None
    if record:
        end = partial(_end_at, record["address"])
        _watch = head.HeadWatch(_addresses(record), record["pids"], end)


def _addresses(record: HeadRecord) -> list[str]:
    """The addresses at which the head must answer."""
    return [record["address"], *(f"127.0.0.1:{port}" for port in record.get("ports", []))]


def gcs_address() -> str | None:
    """Address of the cluster that this process has joined on a node; None if it has left the cluster, or is just leaving."""
    import ray

    try:
        return str(ray.get_runtime_context().gcs_address) if joined() else None
    except AttributeError:  # another thread is leaving, and Ray removes its state bit by bit
        return None


def lost(address: str | None) -> bool:
    """Whether the local head that this process is connected to has died. Always False for a configured cluster."""
    if address is not None or not joined():
        return False
    record = _read()
    return not (record and record["address"] == gcs_address() and _works(record))


def what_happened() -> str:
    """The message about a local head that was lost: what happened to it, and that another is started."""
    return f"the local Ray head {_how()}: starting it again; Ray's output is in {library_log()}"


def leave() -> None:
    """Disconnect; detached actors stay. Ray's output meanwhile, such as the last lines of a dead part, goes to the log.

    Ray silently ends the process if another thread frees a reference while Ray's core shuts down, which can take seconds. So the
    core is hidden first: without it a reference is freed in another way.
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
    """Address of the local head. If none runs and answers, removes what is left of an earlier head and starts a new one."""
    with locked(_path().with_suffix(".lock")):
        record = _read()
        if record and _alive(record):
            reason = head.stays_silent(_addresses(record), record["pids"])
            if reason is None:
                return str(record["address"])
            log.warning(
                "the local Ray head does not answer (%s): ending it and starting another; its actors are rebuilt",
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
    """A part of the head exited or was killed during the start."""


def head_lives() -> bool:
    """Whether a local head is recorded, all of its processes live, and it answers."""
    record = _read()
    return bool(record and _alive(record) and head.stays_silent(_addresses(record), record["pids"]) is None)


def _end_at(address: str) -> None:
    """End the local head at this address, which does not answer: Ray would wait for a hanging head."""
    with locked(_path().with_suffix(".lock")):
        record = _read()
        if record and record["address"] == address:
            _end(record)


def stop_local_head() -> bool:
    """End the local head, or what is left of it, and remove its folder; False if nothing of it runs."""
    with locked(_path().with_suffix(".lock")):
        ended = _end(_read(), patience_s=5)
        _path().unlink(missing_ok=True)
    return ended


def _end(record: HeadRecord | None, patience_s: float = 0, *, keep_folders: bool = False) -> bool:
    """End all processes of this home's heads, and remove their folders; returns whether any ran.

    record: of the last head, which may have lost some processes, or whose start may have been interrupted.
    patience_s: how long they may take to end by themselves.
    """
    folders = {str(folder) for folder in head.parent().glob(f"{head.prefix()}*")}
    marks = set(folders)
    left: set[psutil.Process] = set()
    if record:
        folders.add(record["folder"])
        # Ray's client server may have died and been restarted, and then is not in the record: its argument names the address
        marks |= {record["folder"], *([f"--address={record['address']}"] if record["address"] else [])}
        left |= {process for process in map(find_process, record["pids"], record["created"]) if process}
    left |= {process for process in psutil.process_iter() if any(_belongs(process, mark) for mark in marks)}
    left |= {child for process in left for child in _below(process)}
    if patience_s:
        for process in left:
            send_signal(process, signal.SIGTERM)
        wait_ended(left, patience_s)
    for process in left:
        send_signal(process, signal.SIGKILL)
    wait_ended(left, 5)
    for folder in [] if keep_folders else folders:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(left)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _start() -> str:
    folder = head.make()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1"]
    command += [
        "--port=0",  # Ray picks and binds a port in one step; a port picked here could be taken before
        "--include-dashboard=false",
        "--disable-usage-stats",
        # nothing scales this head, and drivers do not ask for its processes' logs: two processes fewer to start
        "--no-monitor",
        "--include-log-monitor=false",
        f"--temp-dir={folder / head.RAYS}",
    ]
    command += [
        "--num-cpus=1024",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]  # millrace places actors and tasks, so Ray's count of CPUs must not limit them
    environment = {
        **os.environ,
        **LOOPBACK_ONLY,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": _python_path(),
    }
    environment.pop("RAY_RAYLET_PID", None)  # for drivers only, see millrace/__init__.py
    environment = head.with_token(environment)
    environment.setdefault("RAY_ROTATION_MAX_BYTES", LOG_BYTES)
    environment.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    # with the default of 100,000 the head grew by 22 KiB per iteration
    environment.setdefault(KEPT_CALLS, "1000")
    environment["RAY_prestart_worker_first_driver"] = "0"
    environment["RAY_enable_worker_prestart"] = "0"
    record: HeadRecord = {"address": "", "pids": [], "created": [], "folder": str(folder)}
    # written before the start: if the start is interrupted, the next one finds and ends what is left of it
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
    record["address"] = (folder / head.RAYS / ADDRESS_FILE).read_text()
    record["ports"] = [
        port for process in found for port in _ports(process) if head.answers(f"127.0.0.1:{port}")
    ]
    _write(record)
    return str(record["address"])


def _ports(process: psutil.Process) -> list[int]:
    """The ports of a raylet; none for another process."""
    try:
        if process.name() != RAYLET:
            return []
        open_ = process.net_connections("tcp")
        return [each.laddr.port for each in open_ if each.status == psutil.CONN_LISTEN]
    except psutil.Error:  # it just died, which shows when the head is joined
        return []


def _belongs(process: psutil.Process, mark: str) -> bool:
    """Whether it is one of this user's Ray processes with the mark among its arguments. A pager that shows Ray's log is not."""
    try:
        arguments = process.cmdline()
        ours = process.uids().real == os.getuid() and any("/ray/" in a or "ray." in a for a in arguments)
        return ours and any(mark in argument for argument in arguments)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _alive(record: HeadRecord) -> bool:
    """Whether all recorded processes of the head live."""
    return bool(record["pids"]) and all(map(is_alive, record["pids"], record["created"]))


def _path() -> Path:
    return home() / "ray.json"


def _write(record: HeadRecord) -> None:
    write_whole(_path(), [json.dumps(record).encode()])


def _read() -> HeadRecord | None:
    """The record of the local head; None, for no known head, if there is no file or it is not a record.

    Raises MillraceError if the file cannot be read.
    """
    text = read_record(_path())
    if text is None:
        return None
    try:
        record = _record.validate_json(text)
    except ValidationError:
        record = None
    if not record or len(record["pids"]) != len(record["created"]) or not head.is_heads(record["folder"]):
        log.warning("%s is no record of a Ray head: any such head is ended", _path())
        return None
    return record


def _python_path() -> str:
    """PYTHONPATH of actors: the driver's, then millrace's folder. Actors add the user's folders from the settings.

    millrace comes last: installed from a wheel, its folder is site-packages, whose packages must not hide the user's.
    """
    package = str(Path(__file__).parents[3])
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([*inherited, package]))
