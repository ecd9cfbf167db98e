"""Whether the local head answers: asked at its addresses, since its processes may live with their ports shut or stand still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from millrace.connectors.ray import head
from millrace.connectors.ray.head import HeadWatch, answers, silent, stays_silent

SLEEPS = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "ASK_S", 0.2)
    monkeypatch.setattr(head, "PAUSE_S", 0.01)


@pytest.fixture
def served() -> Iterator[str]:
    """A server of gRPC, as Ray's are."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_server_answers_and_a_shut_port_or_one_that_takes_and_says_nothing_does_not(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(head, "ASK_S", 60)  # one look is enough for a server, however busy the host
        assert answers(served)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # as the kernel does for a process that stands still
        assert not answers(f"127.0.0.1:{deaf.getsockname()[1]}")
        shut = f"127.0.0.1:{deaf.getsockname()[1]}"
    assert not answers(shut)
    assert silent([shut], []) == f"nothing answers at {shut}"


def test_a_process_that_is_stopped_is_named_and_one_that_goes_on_in_time_is_not(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stays_silent([], [sleeper.pid]) is None
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert f"(process {sleeper.pid}) is stopped" in (stays_silent([], [sleeper.pid]) or "")
    monkeypatch.setattr(head.time, "sleep", lambda _: os.kill(sleeper.pid, signal.SIGCONT))
    monkeypatch.setattr(head, "LOOKS", 10_000)
    assert stays_silent([], [sleeper.pid]) is None


def test_a_watched_head_is_ended_once_it_is_silent_and_no_other(sleeper: subprocess.Popen[bytes]) -> None:
    ended = threading.Event()
    watch = HeadWatch([], [sleeper.pid], ended.set)
    left = HeadWatch([], [sleeper.pid], lambda: pytest.fail("it was left"))
    left.end()
    assert watch.reason is None
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert ended.wait(60)
    assert watch.reason
    assert watch.look() == watch.reason
    assert left.reason is None
