"""Joining a Ray cluster, or a local one that outlives this process.

The local head is a process of its own, bound to loopback and found again through a record in MILLRACE_HOME, so that
actors survive the driver that made them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from millrace.connectors.storage.local import library_log, locked
from millrace.core.errors import MillraceError

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120
TRIES = "RAY_gcs_server_port_wait_time_s"  # that many tries, about one a second where an answer comes at once
STARTS = 3  # of a head that is killed again and again while a run joins it
ADDRESS_FILE = "ray_current_cluster"  # where Ray notes a cluster's address, in its folder
# Keeps Ray from replacing 127.0.0.1 by the address of a network card, and so from listening to the network.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def start_or_join(address: str | None, namespace: str) -> None:
    """Connect this process to Ray under a namespace; starts the local head if none is configured or running.

    A local head that dies meanwhile is started again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray
    from ray._private import ray_constants

    # The constant that LOOPBACK_ONLY sets was read when ray was first imported, before the address was known.
    if address is None:
        ray_constants.ENABLE_RAY_CLUSTER = False
    if ray.is_initialized():
        if not lost(address) and ray.get_runtime_context().namespace == namespace:
            return
        leave()
    for attempt in range(1, STARTS + 1):
        head = address or local_head()
        try:
            with _one_try() if address is None else contextlib.nullcontext():
                _connect(head, namespace)
            return
        except Exception as error:  # noqa: BLE001 - Ray raises many types; whether the head lives decides
            if address is not None or head_lives() or attempt == STARTS:
                raise
            leave()
            log.warning(
                "the local Ray head died while the run joined it (%s): starting it again; what Ray printed is in %s",
                type(error).__name__,
                library_log(),
            )


def _connect(address: str, namespace: str) -> None:
    import ray

    ray.init(
        address=address,
        namespace=namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
    )


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


def lost(address: str | None) -> bool:
    """Whether the local head that this process is connected to has died; a configured cluster looks after itself."""
    if address is not None or not joined():
        return False
    import ray

    record = _read()
    return not (record and record["address"] == ray.get_runtime_context().gcs_address and _alive(record))


def leave() -> None:
    """Disconnect; detached actors stay. What Ray prints meanwhile, the last lines of a part that died, goes to the log."""
    import ray

    library_log().parent.mkdir(parents=True, exist_ok=True)
    with library_log().open("a") as file, contextlib.redirect_stdout(file):
        ray.shutdown()


def local_head() -> str:
    """Address of the local head, started if it does not run."""
    with locked(_path().with_suffix(".lock")):
        record = _read()
        if record and _alive(record):
            return str(record["address"])
        if record:
            _end_rest(record)
        return _start()


def head_lives() -> bool:
    """Whether a local head is recorded and every process of it lives."""
    record = _read()
    return bool(record and _alive(record))


def stop_local_head() -> bool:
    """End the local head and all its processes; False if none runs."""
    record = _read()
    if not record or not _alive(record):
        return False
    processes = [psutil.Process(pid) for pid in record["pids"] if psutil.pid_exists(pid)]
    # Ray's server for remote clients, which may have died alone and so is not in the record.
    served = f"--address={record['address']}"
    processes += [process for process in psutil.process_iter() if _belongs(process, served)]
    everything = {child for process in processes for child in process.children(recursive=True)} | set(
        processes
    )
    for process in everything:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(everything, timeout=5)
    for process in alive:
        _signal(process, signal.SIGKILL)
    _path().unlink(missing_ok=True)
    return True


def _end_rest(record: dict[str, Any]) -> None:
    """End what is left of a head that lost one of its processes, or whose start was interrupted."""
    left = {process for process in psutil.process_iter() if _belongs(process, record["folder"])}
    for pid, created in zip(record["pids"], record["created"], strict=True):
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - created) < 1:
                left |= {*process.children(recursive=True), process}
        except psutil.NoSuchProcess:
            continue
    for process in left:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=5)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _start() -> str:
    parent = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"millrace-ray-{os.getuid()}-", dir=parent))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1"]
    command += [
        "--port=0",  # Ray binds the port that it picks: one picked here might be another's by then
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--temp-dir={folder}",
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
    environment.setdefault("RAY_AUTH_MODE", "disabled")  # drivers find a token only by an explicit mode
    environment["RAY_prestart_worker_first_driver"] = "0"
    environment["RAY_enable_worker_prestart"] = "0"
    record: dict[str, Any] = {"address": "", "pids": [], "created": [], "folder": str(folder)}
    # before it starts: whoever comes after a start that was interrupted ends what is left of it
    _write(record)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        _end_rest(record)
        raise MillraceError(f"Ray did not start within {START_TIMEOUT_S} s; its log: {folder}") from None
    if done.returncode:
        _end_rest(record)
        raise MillraceError(f"Ray did not start:\n{(done.stdout + done.stderr)[-2000:]}")
    found = [process for process in psutil.process_iter() if _belongs(process, str(folder))]
    record["pids"] = [process.pid for process in found]
    record["created"] = [process.create_time() for process in found]
    record["address"] = (folder / ADDRESS_FILE).read_text()
    _write(record)
    return str(record["address"])


def _belongs(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in argument for argument in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _alive(record: dict[str, Any]) -> bool:
    """Whether every process of the head is the one that was started."""
    try:
        found = [psutil.Process(pid) for pid in record["pids"]]
        return bool(found) and all(
            p.status() != psutil.STATUS_ZOMBIE and abs(p.create_time() - created) < 1
            for p, created in zip(found, record["created"], strict=True)
        )
    except psutil.NoSuchProcess:
        return False


def _path() -> Path:
    return Path(os.environ.get("MILLRACE_HOME", "~/.millrace")).expanduser() / "ray.json"


def _write(record: dict[str, Any]) -> None:
    _path().parent.mkdir(parents=True, exist_ok=True)
    _path().write_text(json.dumps(record))


def _read() -> dict[str, Any] | None:
    path = _path()
    return json.loads(path.read_text()) if path.exists() else None


def _python_path() -> str:
    """Where actors find what the driver imports: its PYTHONPATH, its working folder, and millrace itself.

    millrace comes last: from a wheel its folder is site-packages, whose other packages must not hide a user's.
    """
    package = str(Path(__file__).parents[3])
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([*inherited, os.getcwd(), package]))
