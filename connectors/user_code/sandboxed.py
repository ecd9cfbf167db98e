"""The process of a sandboxed program: it gives up its rights, then runs the program. Linux only.

Started by its path, as `python -I -S sandboxed.py SETTINGS`. It imports nothing of millrace: SETTINGS holds all it needs.
A process can add each layer without being root, and can never remove it. A layer that the kernel refuses is left out; a line
of JSON on a pipe names the layers that hold, before the program starts.
"""

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
MEMORY = b"memory\n"  # sent on the pipe if the program ran out of memory

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
CAPABILITY_VERSION_3 = 0x20080522

# Landlock: the same numbers on every architecture
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
LEAST_ABI = 3  # older versions do not stop a program from truncating files
EXECUTE, WRITE, READ, READ_FOLDER, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
IOCTL = 1 << 15  # from ABI 5
ALL_BUT_IOCTL = (1 << 15) - 1
TCP = 0b11  # bind and connect, from ABI 4
SCOPES = 0b11  # abstract sockets and signals, from ABI 6

# System calls by number, on x86-64 and on aarch64, which lacks the older ones. Refused outright:
REFUSED: dict[str, dict[str, tuple[int, int | None]]] = {
    "processes": {
        "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "clone3": (435, 435),
    },
    "sockets": {"socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425)},
    "others": {
        "ptrace": (101, 117), "rt_sigqueueinfo": (129, 138), "setpriority": (141, 140), "sched_setparam": (142, 118),
        "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
        "move_pages": (279, 239), "rt_tgsigqueueinfo": (297, 240), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "kcmp": (312, 272), "sched_setattr": (314, 274), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
        "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    },
    "attributes": {
        "chmod": (90, None), "fchmod": (91, 52), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "utime": (132, None),
        "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
        "fremovexattr": (199, 16), "utimes": (235, None), "fchownat": (260, 54), "futimesat": (261, None), "fchmodat": (268, 53),
        "utimensat": (280, 88), "fchmodat2": (452, 452), "setxattrat": (463, 463), "removexattrat": (466, 466),
        "file_setattr": (469, 469),
    },
    "memory": {  # memory that no process's limit counts: shared memory, queues, files without a name
        "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
    },
    "kernel": {
        "pivot_root": (155, 41), "chroot": (161, 51), "mount": (165, 40), "umount2": (166, 39), "add_key": (248, 217),
        "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "perf_event_open": (298, 241),
        "open_by_handle_at": (304, 265), "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282), "open_tree": (428, 428),
        "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    },
}  # fmt: skip
# Allowed on the process itself; of fcntl all but the owner of a file's signals.
KILL, TKILL, TGKILL, PRLIMIT, FCNTL = (62, 129), (200, 130), (234, 131), (302, 261), (72, 25)
CAPSET = (126, 91)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of these tables, AUDIT_ARCH
F_SETOWN, F_SETOWN_EX = 8, 15
X32 = 0x40000000
ALLOW, KILL_PROCESS, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06

libc: Any = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Limit this process, report the layers that hold, and run the program."""
    settings = json.loads(sys.argv[1])
    report = int(settings["report"])
    with open("program.py", encoding="utf-8") as file:
        code = file.read()
    os.unlink("program.py")
    die_with(int(settings["parent"]))
    wanted = settings["layers"]
    held = [name for name, take in LAYERS.items() if name in wanted and take()]
    # after the namespaces, since creating one needs memory
    set_limits(settings)
    if "seccomp" in wanted and filter_calls():
        held.append("seccomp")
    os.write(report, json.dumps(held).encode() + b"\n")
    sys.argv = ["program.py", *settings["arguments"]]
    sys.exit(run(code, report))


def run(code: str, report: int) -> Any:
    """Run the program as a script, and return its exit code."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "program.py", "exec"), names)  # noqa: S102 - the purpose of this process
    except SystemExit as ended:
        return ended.code
    except BaseException as error:  # noqa: BLE001 - an untrusted program raises anything
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            os.write(report, MEMORY)
        ours = error.__traceback__
        sys.__excepthook__(type(error), error.with_traceback(ours.tb_next if ours else None), None)
        return 1
    return 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; allow no core dump and no debugger."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    libc.prctl(PR_SET_DUMPABLE, 0)


def set_limits(settings: dict[str, Any]) -> None:
    """Set the kernel's hard limits for this process."""
    # two seconds more than the deadline: the kernel's limit acts only if the parent that keeps the deadline is gone
    seconds = int(settings["timeout_s"]) + 2
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
    """Move to a new network without devices, and to a user that has no rights outside."""
    return bool(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0)


def take_landlock() -> bool:
    """Allow writes only in this folder, and reads only here and in Python's and the system's libraries."""
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
    """Allow these rights below a path, if the path exists."""
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
    """Drop all capabilities of root: a new user namespace grants all of them inside it."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    if platform.machine() not in MACHINES:
        return False
    return bool(libc.syscall(CAPSET[MACHINES[platform.machine()][0]], header, bytes(24)) == 0)


def filter_calls() -> bool:
    """Have the kernel refuse system calls: no process, no socket, no signal or attribute of anything else."""
    if platform.machine() not in MACHINES:
        return False
    program = b"".join(instructions(os.getpid(), platform.machine()))
    memory = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.prctl(PR_SET_SECCOMP, 2, header) == 0)


def instructions(pid: int, machine: str) -> list[bytes]:
    """The filter's instructions: each rule jumps over the return after it, unless the rule applies."""
    column, architecture = MACHINES[machine]

    def step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, other, value)

    made = [step(LOAD, 4), step(EQUAL, architecture, 1), step(RETURN, KILL_PROCESS)]
    made += [step(LOAD, 0), step(AT_LEAST, X32, 0, 1), step(RETURN, REFUSE)]
    for numbers in (numbers for calls in REFUSED.values() for numbers in calls.values()):
        number = numbers[column]
        if number is not None:
            made += [step(EQUAL, number, 0, 1), step(RETURN, REFUSE)]
    for numbers, own in ((KILL, pid), (TKILL, pid), (TGKILL, pid), (PRLIMIT, 0)):
        made += [step(EQUAL, numbers[column], 0, 4), step(LOAD, 16), step(EQUAL, own, 1)]
        made += [step(RETURN, REFUSE), step(RETURN, ALLOW)]
    made += [
        step(EQUAL, FCNTL[column], 0, 4),
        step(LOAD, 24),
        step(EQUAL, F_SETOWN, 1),
        step(EQUAL, F_SETOWN_EX, 0, 1),
    ]
    return [*made, step(RETURN, REFUSE), step(RETURN, ALLOW)]


LAYERS = {"namespaces": take_namespaces, "landlock": take_landlock, "capabilities": drop_capabilities}

if __name__ == "__main__":
    main()
