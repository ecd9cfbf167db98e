"""A program in the sandbox does what programs do, and nothing of what the sandbox says that it prevents."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.user_code.sandbox import (
    LAYERS,
    SandboxLimits,
    SandboxOutcome,
    protections,
    run_python,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
PATIENT = SandboxLimits(timeout_s=60)
DEADLINE = SandboxLimits(timeout_s=4)
LATE_S = 8.0  # that an end may take on a busy machine after the deadline


def run(code: str, *, limits: SandboxLimits = PATIENT, layers: tuple[str, ...] = LAYERS) -> SandboxOutcome:
    return run_python(textwrap.dedent(code), limits=limits, layers=layers)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of this user outside of any sandbox."""
    path = tmp_path / "secret.txt"
    path.write_text("sesame")
    path.chmod(0o600)
    return path


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this user."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_program_reads_its_input_and_prints() -> None:
    code = "import json, re, decimal, hashlib\nprint(json.dumps([int(x) for x in input().split()]))"
    outcome = run_python(code, "1 2\n", PATIENT)
    assert outcome.succeeded
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("exited", 0, None)
    assert (outcome.stdout, outcome.stderr) == ("[1, 2]\n", "")
    assert 0 < outcome.seconds < PATIENT.timeout_s


def test_a_program_works_in_a_folder_of_its_own_that_is_deleted() -> None:
    outcome = run("""
        import os
        open('a', 'w').write('b')
        print(os.getcwd(), os.listdir(), open('a').read())
    """)
    folder, _, rest = outcome.stdout.partition(" ")
    assert rest == "['a'] b\n"
    assert not Path(folder).exists()


def test_a_program_sees_no_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sesame")
    assert "sesame" not in run("import os; print(os.environ)").stdout


@pytest.mark.parametrize(
    ("code", "exit_code", "last"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("1 +", 1, "SyntaxError: invalid syntax"),
        ("import numpy", 1, "ModuleNotFoundError: No module named 'numpy'"),
        ("import sys; sys.exit('no')", 1, "no"),
    ],
)
def test_what_a_program_raises_is_in_stderr(code: str, exit_code: int, last: str) -> None:
    outcome = run(code)
    assert (outcome.ended, outcome.exit_code) == ("exited", exit_code)
    assert (outcome.stderr.splitlines() or [""])[-1] == last
    assert "sandboxed" not in outcome.stderr
    assert not outcome.succeeded


def test_a_program_may_end_itself_by_a_signal() -> None:
    outcome = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("signalled", None, signal.SIGKILL)


# What each protection refuses: the program says "refused" and why, or "done". With what it would do, to be looked for outside.
ATTEMPTS = {
    "reads": ["open(SECRET).read()", "open('/etc/passwd').read()", "os.listdir(os.path.dirname(SECRET))", "open('/proc/self/environ').read()"],
    "writes": ["open(SECRET, 'a').write('x')", "os.truncate(SECRET, 0)", "open(SECRET + '2', 'w')", "os.mkdir(SECRET + '3')", "os.remove(SECRET)", "os.rename(SECRET, SECRET + '4')", "os.link(SECRET, 'hard')"],
    "attributes": ["os.chmod(SECRET, 0o777)", "os.utime(SECRET, (0, 0))", "os.setxattr(SECRET, 'user.a', b'b')"],
    "network": ["socket.create_connection(('127.0.0.1', PORT), 2)"],
    "processes": ["os.fork()", "subprocess.run([sys.executable, '-c', ''])", "os.posix_spawn('/bin/true', ['true'], {})"],
    "others": ["os.kill(OTHER, signal.SIGTERM)", "resource.prlimit(OTHER, resource.RLIMIT_CORE, (0, 0))", "os.setpriority(os.PRIO_PROCESS, OTHER, 19)"],
}  # fmt: skip
TRY = """
import os, resource, signal, socket, subprocess, sys
SECRET, PORT, OTHER = {secret!r}, {port}, {other}
try:
    {attempt}
except OSError as error:
    print("refused", error)
else:
    print("done")
"""


@pytest.mark.parametrize(
    "layers", [LAYERS, (), *((layer,) for layer in LAYERS)], ids=lambda found: "+".join(found) or "none"
)
@pytest.mark.parametrize("kind", ATTEMPTS)
def test_what_is_said_to_be_prevented_is(
    kind: str, layers: tuple[str, ...], secret: Path, bystander: subprocess.Popen[bytes]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for attempt in ATTEMPTS[kind] if layers == LAYERS else ATTEMPTS[kind][:1]:
            code = TRY.format(secret=str(secret), port=port, other=bystander.pid, attempt=attempt)
            outcome = run(code, layers=layers)
            prevented = getattr(outcome.protections, kind)
            if prevented:
                assert outcome.stdout.startswith("refused"), (attempt, outcome)
                assert secret.read_text() == "sesame"
                assert secret.stat().st_mode & 0o777 == 0o600
                assert [path.name for path in secret.parent.iterdir()] == ["secret.txt"]
                assert bystander.poll() is None
            elif not layers:  # nothing else prevents it, so that the attempt is one
                assert outcome.stdout.startswith("done"), (attempt, outcome)


def test_this_kernel_has_every_layer_that_it_says() -> None:
    found = protections()
    assert found == run("").protections
    none = run("", layers=()).protections
    by_limit = os.getuid() != 0
    assert dataclasses.asdict(none) == {
        **dict.fromkeys(ATTEMPTS, False),
        "processes": by_limit,
        "layers": (),
    }


# What takes too much of something: how it ends, and what it may have printed.
GREEDY = {
    "an endless loop": ("while True: pass", "timed_out"),
    "a wait": ("import time; time.sleep(600)", "timed_out"),
    "a hang in C": ("import re; re.match('(a+)+$', 'a' * 100 + 'b')", "timed_out"),
    "a number that fills a core in C": ("10 ** 10 ** 8", "timed_out"),
    "signals ignored": (
        "import signal, time\nfor n in (1, 2, 3, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timed_out",
    ),
    "closed pipes": ("import os, time\nfor n in range(64):\n  try: os.close(n)\n  except OSError: pass\ntime.sleep(600)", "timed_out"),
    "10 GB of output": ("import sys\nfor _ in range(10_000): sys.stdout.write('x' * 1_000_000)", "too_much_output"),
    "10 GB of errors": ("import sys\nfor _ in range(10_000): sys.stderr.write('x' * 1_000_000)", "too_much_output"),
    "64 GiB at once": ("bytearray(64 << 30)", "out_of_memory"),
    "64 GiB by and by": ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", "out_of_memory"),
    "64 GiB mapped": ("import mmap; mmap.mmap(-1, 64 << 30)", "out_of_memory"),
    "a file of 1 GiB": ("file = open('a', 'wb')\nfor _ in range(1024): file.write(bytes(1 << 20))", "exited"),
    "1,000 open files": ("kept = [open('a', 'w') for _ in range(1000)]", "exited"),
}  # fmt: skip


def test_programs_that_take_too_much_are_ended() -> None:
    """Some at a time: most of them only wait for their deadline."""

    def ended(name: str) -> tuple[Any, float]:
        code, wanted = GREEDY[name]
        started = time.monotonic()
        outcome = run_python(code, limits=DEADLINE if wanted == "timed_out" else PATIENT)
        return outcome, time.monotonic() - started

    with ThreadPoolExecutor(max_workers=6) as pool:
        found = dict(zip(GREEDY, pool.map(ended, GREEDY), strict=True))
    for name, (outcome, seconds) in found.items():
        limits = DEADLINE if GREEDY[name][1] == "timed_out" else PATIENT
        assert outcome.ended == GREEDY[name][1], (name, outcome)
        assert not outcome.succeeded, name
        assert seconds < limits.timeout_s + LATE_S, name
        assert len(outcome.stdout) <= limits.output_bytes, name
        assert len(outcome.stderr) <= limits.output_bytes, name


def test_ten_thousand_processes_are_none() -> None:
    outcome = run("""
        import os
        refused = 0
        for _ in range(10_000):
            try:
                if os.fork() == 0:
                    os._exit(0)
            except OSError:
                refused += 1
        print(refused)
    """)
    assert outcome.protections.processes
    assert outcome.stdout == "10000\n"


def test_nothing_outlives_the_deadline_in_a_session_of_its_own() -> None:
    outcome = run(
        """
        import os, time
        try:
            pid = os.fork()
        except OSError:
            pid = 0
        if pid == 0:
            try:
                os.setsid()
            except OSError:
                pass
            time.sleep(600)
        """,
        limits=DEADLINE,
    )
    assert outcome.protections.processes
    assert outcome.timed_out
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f'"parent": {os.getpid()},' not in listed


def test_a_folder_too_deep_or_closed_for_python_is_deleted() -> None:
    outcome = run("""
        import os
        print(os.getcwd(), flush=True)
        os.mkdir('closed', 0)
        for _ in range(1500):
            os.mkdir('d')
            os.chdir('d')
    """)
    assert outcome.succeeded, outcome
    assert not Path(outcome.stdout.strip()).exists()


def test_a_process_ends_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    code = "import pathlib, time\nwhile True: pathlib.Path('beat').write_text(str(time.time())); time.sleep(0.05)"
    waiting = "from millrace.connectors.user_code.sandbox import *\nimport sys\nrun_python(sys.argv[1], limits=SandboxLimits(timeout_s=600))"
    caller = subprocess.Popen(
        [sys.executable, "-c", waiting, code], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        deadline = time.monotonic() + 60
        while not (beats := list(tmp_path.glob("*/beat"))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    time.sleep(1)
    last = beats[0].stat().st_mtime_ns
    time.sleep(1)
    assert beats[0].stat().st_mtime_ns == last


def test_many_threads_run_programs_side_by_side() -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: run_python(f"print({n} ** 2)", limits=PATIENT).stdout, range(16)))
    assert found == [f"{n * n}\n" for n in range(16)]
