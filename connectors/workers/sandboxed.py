"""The process in which a sandboxed program runs: it gives up what it may do, and then runs the program. Linux only.

Started by its path, as `python -I -S sandboxed.py SETTINGS`, and imports nothing of millrace: what it knows is in SETTINGS.
Each layer is one that the kernel lets a process take on without being root, and that nothing can take off again. Those that
the kernel refuses are left out; a line of JSON on a pipe says which hold, before the program begins.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

SYSTEM = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom"]
OPEN_FILES = 64
MEMORY = b"memory\n"  # what the pipe says of a program that asked for more

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
CAPSET, CAPABILITY_VERSION_3 = 126, 0x20080522

# Landlock: the same numbers on every architecture
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
LEAST_ABI = 3  # before it, a file can be truncated all the same
EXECUTE, WRITE, READ, READ_FOLDER, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
IOCTL = 1 << 15  # from ABI 5
ALL_BUT_IOCTL = (1 << 15) - 1
TCP = 0b11  # bind and connect, from ABI 4
SCOPES = 0b11  # abstract sockets and signals, from ABI 6

# System calls of x86-64 by number. Refused outright:
REFUSED = {
    "processes": [56, 57, 58, 59, 322, 435],  # clone, fork, vfork, execve, execveat, clone3
    "sockets": [41, 53, 425],  # socket, socketpair, io_uring_setup
    "others": [101, 129, 141, 142, 144, 203, 251, 256, 279, 297, 310, 311, 312, 314, 424, 434, 438, 440, 448],
    "attributes": [90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466, 469],
    "memory": [29, 64, 68, 240, 319, 447],  # of no process: shared memory, queues, files without a name
    "kernel": [155, 161, 165, 166, 248, 249, 250, 272, 298, 304, 308, 321, 323, 428, 429, 430, 432],
}  # fmt: skip
KILL, TKILL, TGKILL, PRLIMIT, FCNTL = 62, 200, 234, 302, 72
F_SETOWN, F_SETOWN_EX = 8, 15
X32 = 0x40000000
AUDIT_ARCH_X86_64 = 0xC000003E
ALLOW, KILL_PROCESS, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06

libc: Any = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Limit this process, say what holds, run the program."""
    settings = json.loads(sys.argv[1])
    report = int(settings["report"])
    with open("program.py", encoding="utf-8") as file:
        code = file.read()
    os.unlink("program.py")
    die_with(int(settings["parent"]))
    wanted = settings["layers"]
    held = [name for name, take in LAYERS.items() if name in wanted and take()]
    set_limits(settings)  # after namespaces, which are made of memory
    if "seccomp" in wanted and filter_calls():
        held.append("seccomp")
    os.write(report, json.dumps(held).encode() + b"\n")
    sys.argv = ["program.py", *settings["arguments"]]
    sys.exit(run(code, report))


def run(code: str, report: int) -> Any:
    """Run the program as a script; what it exits with."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "program.py", "exec"), names)  # noqa: S102 - what this process is there for
    except SystemExit as ended:
        return ended.code
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is its end
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            os.write(report, MEMORY)
        ours = error.__traceback__
        sys.__excepthook__(type(error), error.with_traceback(ours.tb_next if ours else None), None)
        return 1
    return 0


def die_with(parent: int) -> None:
    """End when the thread that started this process ends; leave no memory to look at."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    libc.prctl(PR_SET_DUMPABLE, 0)


def set_limits(settings: dict[str, Any]) -> None:
    """Hard limits of the kernel for one process."""
    seconds = int(settings["timeout_s"]) + 2  # the deadline comes first, unless whoever keeps it is gone
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_AS: settings["memory_bytes"],
    }
    for which, limit in limits.items():
        _, most = resource.getrlimit(which)
        least = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(which, (least, least))


def take_namespaces() -> bool:
    """A network of its own, without devices, and a user who is nobody outside."""
    return bool(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0)


def take_landlock() -> bool:
    """Only this folder can be written, and only it and Python's and the system's libraries can be read."""
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
    if abi < LEAST_ABI:
        return False
    handled = ALL_BUT_IOCTL | (IOCTL if abi >= 5 else 0)
    rules = struct.pack("QQQ", handled, TCP, SCOPES)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = libc.syscall(CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0:
        return False
    folder = os.getcwd()
    allow(ruleset, folder, ALL_BUT_IOCTL & ~EXECUTE)
    for path in [*SYSTEM, *sys.path]:
        allow(ruleset, path, EXECUTE | READ | READ_FOLDER)
    for path in DEVICES:
        allow(ruleset, path, READ | WRITE | TRUNCATE)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    held = libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(held)


def allow(ruleset: int, path: str, rights: int) -> None:
    """Allow something beneath a path, if it is there."""
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= EXECUTE | WRITE | READ | TRUNCATE
    if libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, at), 0):
        raise OSError(ctypes.get_errno(), "landlock refuses a rule", path)
    os.close(at)


def drop_capabilities() -> bool:
    """Keep none of what root may do; user namespaces give all of it inside of them."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    number = CAPSET if platform.machine() == "x86_64" else 91
    return bool(libc.syscall(number, header, bytes(24)) == 0)


def filter_calls() -> bool:
    """Have the kernel refuse system calls: no process, no socket, no signal or attribute of anything else."""
    if platform.machine() != "x86_64":
        return False
    program = b"".join(instructions(os.getpid()))
    memory = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.prctl(PR_SET_SECCOMP, 2, header) == 0)


def instructions(pid: int) -> list[bytes]:
    """The filter: each rule jumps over the return that follows it, unless it applies."""

    def step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, other, value)

    made = [step(LOAD, 4), step(EQUAL, AUDIT_ARCH_X86_64, 1), step(RETURN, KILL_PROCESS)]
    made += [step(LOAD, 0), step(AT_LEAST, X32, 0, 1), step(RETURN, REFUSE)]
    for number in (number for numbers in REFUSED.values() for number in numbers):
        made += [step(EQUAL, number, 0, 1), step(RETURN, REFUSE)]
    for number, own in ((KILL, pid), (TKILL, pid), (TGKILL, pid), (PRLIMIT, 0)):
        made += [step(EQUAL, number, 0, 4), step(LOAD, 16), step(EQUAL, own, 1), step(RETURN, REFUSE)]
        made += [step(RETURN, ALLOW)]
    made += [
        step(EQUAL, FCNTL, 0, 4),
        step(LOAD, 24),
        step(EQUAL, F_SETOWN, 1),
        step(EQUAL, F_SETOWN_EX, 0, 1),
    ]
    return [*made, step(RETURN, REFUSE), step(RETURN, ALLOW)]


LAYERS = {"namespaces": take_namespaces, "landlock": take_landlock, "capabilities": drop_capabilities}

if __name__ == "__main__":
    main()
