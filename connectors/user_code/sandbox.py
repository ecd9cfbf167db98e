"""Runs an untrusted Python program, such as a policy's answer, and bounds what it can do.

Protects, as far as the kernel supports it (`protections` and each outcome say how far):

- reads: files outside the program's folder cannot be read, except Python's library and the system's libraries.
- writes: nothing outside the folder can be written, created, renamed or deleted. The folder is deleted at the end.
- attributes: modes, owners and times of files cannot be changed, not even of files in the folder.
- network: no socket can be created.
- processes: no process, thread or other program can be started. So nothing outlives the deadline.
- others: no signal, limit or priority reaches another process.

Always, on Linux: a deadline by the clock, kept by SIGKILL; limits of memory, file size and output; no environment variables;
no packages but the standard library.

Does not protect against:

- reading the standard library's folder and /usr/lib, or learning whether a file exists and how large it is;
- a flaw of the kernel: the program runs as the same user on the same kernel, not in a virtual machine;
- many small files in its folder until the deadline, or a busy core;
- a program that lies: it controls its output, its channel and its exit code, so it can fool a test in the same process.
  Compare its output with values that only the caller has.

Linux only. System calls are filtered on x86-64 and aarch64; on other machines `protections` is False for what needs the filter.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from millrace.connectors.user_code import sandboxed
from millrace.core.errors import ConfigError, MillraceError

LAYERS = ("namespaces", "landlock", "capabilities", "seccomp")
FENCE = {  # without these layers a program could read your files, or reach the network
    "landlock": "Landlock (Linux 6.2 or later, in the kernel's list of security modules)",
    "seccomp": "filter of system calls (seccomp, on x86-64 or aarch64)",
}
CHUNK = 1 << 16  # bytes per read
REPORT_BYTES = 4096


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use."""

    timeout_s: float = 5.0  # by the clock, from the start of its process
    memory_mb: int = 256  # of address space; the interpreter takes some 30 of it
    output_bytes: int = 1 << 16  # of stdout, and again of stderr
    file_mb: int = 16  # of each file that it writes


@dataclass(frozen=True)
class SandboxProtections:
    """What holds on this host. A False entry is not enforced."""

    reads: bool
    writes: bool
    attributes: bool
    network: bool
    processes: bool
    others: bool
    layers: tuple[str, ...] = ()  # the LAYERS that this kernel accepted


@dataclass(frozen=True)
class SandboxOutcome:
    """How a program ended.

    ended: "exited", with `exit_code`; "signalled", by a `signal` that it caused; "timed_out", at its deadline;
    "out_of_memory", if it asked for more than its limit; "too_much_output", if it printed more than is kept.
    """

    ended: Literal["exited", "signalled", "timed_out", "out_of_memory", "too_much_output"]
    exit_code: int | None
    signal: int | None
    stdout: str  # the first limits.output_bytes
    stderr: str
    seconds: float
    protections: SandboxProtections
    channel: str = ""  # the first limits.output_bytes that it wrote there

    @property
    def succeeded(self) -> bool:
        """True if it exited by itself with code 0."""
        return self.ended == "exited" and self.exit_code == 0

    @property
    def timed_out(self) -> bool:
        """True if it was killed at its deadline."""
        return self.ended == "timed_out"

    @property
    def out_of_memory(self) -> bool:
        """True if it asked for more memory than its limit."""
        return self.ended == "out_of_memory"


def run_python(
    code: str,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    *,
    layers: Collection[str] = LAYERS,
    channel: bool = False,
) -> SandboxOutcome:
    """Run a program and wait for its end. May be called from many threads at once.

    channel: open a second output beside stdout, with its descriptor's number in sys.argv[1], for results apart from prints.
    layers: use only these LAYERS, as far as the kernel has them.
    Errors: MillraceError if no process can be started, or on another system than Linux.
    """
    if sys.platform != "linux":
        raise MillraceError("the sandbox needs Linux", remedy="run it in a container or a virtual machine")
    limits = limits or SandboxLimits()
    with _folder() as folder, _input(stdin) as given:
        (folder / "program.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        return _Run(limits, folder, given, layers, channel).outcome()


def protections() -> SandboxProtections:
    """What this host enforces, found by running an empty program."""
    return run_python("").protections


def _protections(held: Collection[str]) -> SandboxProtections:
    landlock, seccomp = "landlock" in held, "seccomp" in held
    return SandboxProtections(
        reads=landlock,
        writes=landlock,
        attributes=seccomp,
        network=seccomp or "namespaces" in held,
        # without the filter only RLIMIT_NPROC stops new processes, and it does not bind root
        processes=seccomp or os.getuid() != 0,
        others=seccomp,
        layers=tuple(layer for layer in LAYERS if layer in held),
    )


@cache
def missing_layers() -> tuple[str, ...]:
    """The layers of the fence that this host lacks. Tested once per process."""
    held = protections().layers
    return tuple(layer for layer in FENCE if layer not in held)


def check_fence(where: str, remedy: str) -> None:
    """Raise ConfigError if this host lacks a layer of the fence. remedy: how to continue without it."""
    missing = missing_layers()
    if missing:
        raise ConfigError(
            f"this host has no {' and no '.join(FENCE[layer] for layer in missing)}: programs of the policy would run as you, without "
            "the sandbox's fence",
            where=where,
            remedy=f"run it on a host, or in a container, whose kernel permits it; {remedy}",
        )


class _Run:
    """One process, its pipes, and its deadline."""

    def __init__(
        self,
        limits: SandboxLimits,
        folder: Path,
        given: IO[bytes],
        layers: Collection[str],
        channel: bool,
    ) -> None:
        self._limits = limits
        self._started = time.monotonic()
        self._report, theirs = os.pipe()
        self._channel, their_channel = os.pipe()
        settings = {
            "report": theirs,
            "arguments": [str(their_channel)] if channel else [],
            "parent": os.getpid(),
            "layers": sorted(layers),
            "timeout_s": limits.timeout_s,
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.file_mb << 20,
        }
        command = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-X",
            "utf8",
            "-X",
            "int_max_str_digits=0",
            sandboxed.__file__,
            json.dumps(settings),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={},
                pass_fds=[theirs, *([their_channel] if channel else [])],
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._report)
            os.close(self._channel)
            raise MillraceError(
                f"no process could be started: {error}",
                where="the sandbox",
                remedy="free memory or processes on this host",
            ) from error
        finally:
            os.close(theirs)
            os.close(their_channel)

    def outcome(self) -> SandboxOutcome:
        """Wait for the process to end, and return its outcome."""
        process = self._process
        deadline = self._started + self._limits.timeout_s
        try:
            with process, contextlib.closing(_Pipes(process, self._report, self._channel)) as pipes:
                try:
                    broken = pipes.read_until(deadline, self._limits.output_bytes)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(
                            process.pid, signal.SIGKILL
                        )  # the process has not been waited for, so no other one has its number
        finally:
            os.close(self._report)
            os.close(self._channel)
        return self._judged(broken, *pipes.texts(self._limits.output_bytes))

    def _judged(
        self,
        broken: Literal["timed_out", "too_much_output"] | None,
        out: str,
        err: str,
        report: str,
        channel: str,
    ) -> SandboxOutcome:
        first, _, note = report.partition("\n")
        code = self._process.wait()
        if not first and not broken:
            raise MillraceError(
                f"the process ended before the program began, with {code}: {err.strip() or 'no word'}",
                where="the sandbox",
                remedy="give it more memory_mb, or look at this host's memory",
            )
        held = json.loads(first) if first else []
        ended: Literal["exited", "signalled", "timed_out", "out_of_memory", "too_much_output"]
        if broken:
            ended = broken
        elif note.startswith("memory"):
            ended = "out_of_memory"
        else:
            ended = "exited" if code >= 0 else "signalled"
        return SandboxOutcome(
            ended=ended,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=out,
            stderr=err,
            seconds=time.monotonic() - self._started,
            protections=_protections(held),
            channel=channel,
        )


class _Pipes:
    """stdout, stderr, the report, the channel and the exit of a process. Keeps only a bounded part of each pipe in memory."""

    def __init__(self, process: subprocess.Popen[bytes], report: int, channel: int) -> None:
        assert process.stdout
        assert process.stderr
        self._kept = {process.stdout.fileno(): b"", process.stderr.fileno(): b"", report: b"", channel: b""}
        self._report = report
        self._end = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        for pipe in (*self._kept, self._end):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ)

    def read_until(self, deadline: float, most: int) -> Literal["timed_out", "too_much_output"] | None:
        """Read until the process and all pipes have ended, the deadline passes, or one pipe holds more than `most` bytes."""
        while self._selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return "timed_out"
            for key, _ in self._selector.select(left):
                if not self._read(key.fd):
                    continue
                if len(self._kept[key.fd]) > (REPORT_BYTES if key.fd == self._report else most):
                    return "too_much_output"
        return None

    def _read(self, pipe: int) -> bool:
        data = b"" if pipe == self._end else os.read(pipe, CHUNK)
        if data:
            self._kept[pipe] += data
        if not data:
            self._selector.unregister(pipe)
        return bool(data)

    def texts(self, most: int) -> list[str]:
        """The text of each pipe, cut to `most` bytes."""
        return [data[:most].decode("utf-8", "replace") for data in self._kept.values()]

    def close(self) -> None:
        """Stop reading."""
        self._selector.close()
        os.close(self._end)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yield an empty folder, and delete it with its contents at the end."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-sandbox-"))
    try:
        yield folder
    finally:
        try:
            folder.rmdir()
        except OSError:  # the program may nest folders deeper than shutil.rmtree can follow
            subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
            subprocess.run(["rm", "-rf", str(folder)], check=True)


@contextlib.contextmanager
def _input(text: str) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        yield file
