"""The sandbox's fence: what the filter of system calls refuses on each architecture, and that the reward `code` does without it only if told.

It ran programs with no fence and no word where a container or an old kernel lacked a layer, and on every aarch64 host.
"""

from __future__ import annotations

import platform
import struct
import subprocess
import sys

import pytest

from millrace.connectors.user_code.sandbox import FENCE, LAYERS
from millrace.connectors.user_code.sandboxed import (
    ALLOW,
    KILL_PROCESS,
    MACHINES,
    REFUSE,
    REFUSED,
    instructions,
)
from millrace.connectors.user_code.sandboxed import (
    LAYERS as TAKEN,
)

PID = 4711
# Linux's own numbers: x86-64 has arch/x86/entry/syscalls/syscall_64.tbl, aarch64 include/uapi/asm-generic/unistd.h.
NUMBERS = {
    "x86_64": {
        "read": 0, "write": 1, "mmap": 9, "openat": 257, "exit_group": 231, "getpid": 39, "futex": 202,
        "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "clone3": 435, "socket": 41, "socketpair": 53,
        "io_uring_setup": 425, "ptrace": 101, "setpriority": 141, "process_vm_readv": 310, "process_vm_writev": 311,
        "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "chmod": 90, "fchmodat": 268, "fchownat": 260,
        "utimensat": 280, "setxattr": 188, "shmget": 29, "memfd_create": 319, "chroot": 161, "mount": 165, "unshare": 272,
        "setns": 308, "bpf": 321, "keyctl": 250, "userfaultfd": 323, "open_by_handle_at": 304,
        "kill": 62, "tkill": 200, "tgkill": 234, "prlimit64": 302, "fcntl": 72,
    },
    "aarch64": {
        "read": 63, "write": 64, "mmap": 222, "openat": 56, "exit_group": 94, "getpid": 172, "futex": 98,
        "clone": 220, "execve": 221, "execveat": 281, "clone3": 435, "socket": 198, "socketpair": 199,
        "io_uring_setup": 425, "ptrace": 117, "setpriority": 140, "process_vm_readv": 270, "process_vm_writev": 271,
        "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "fchmodat": 53, "fchownat": 54,
        "utimensat": 88, "setxattr": 5, "shmget": 194, "memfd_create": 279, "chroot": 51, "mount": 40, "unshare": 97,
        "setns": 268, "bpf": 280, "keyctl": 219, "userfaultfd": 282, "open_by_handle_at": 265,
        "kill": 129, "tkill": 130, "tgkill": 131, "prlimit64": 261, "fcntl": 25,
    },
}  # fmt: skip
ALLOWED = ("read", "write", "mmap", "openat", "exit_group", "getpid", "futex")
OF_ITSELF = {"kill": PID, "tkill": PID, "tgkill": PID, "prlimit64": 0}  # and the argument that means it
F_SETOWN, F_SETOWN_EX, F_GETFL = 8, 15, 3


def answer(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel does with a call: the filter, run as the kernel runs it (linux/filter.h, struct seccomp_data)."""
    given = MACHINES[machine][1] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, given, 0, *arguments, *[0] * (6 - len(arguments)))
    program = [struct.unpack("HBBI", step) for step in instructions(PID, machine)]
    at, loaded = 0, 0
    while True:
        code, then, other, value = program[at]
        if code == 0x20:  # load a word
            (loaded,) = struct.unpack_from("<I", data, value)
            at += 1
        elif code == 0x06:  # return
            return int(value)
        else:
            assert code in (0x15, 0x35)  # equal; at least
            at += 1 + (then if (loaded == value if code == 0x15 else loaded >= value) else other)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_calls_by_the_numbers_of_the_architecture(machine: str) -> None:
    for name, number in NUMBERS[machine].items():
        if name in OF_ITSELF:
            assert answer(machine, number, OF_ITSELF[name]) == ALLOW, name
            assert answer(machine, number, 1) == REFUSE, name
        elif name == "fcntl":
            found = [answer(machine, number, 0, what) for what in (F_GETFL, F_SETOWN, F_SETOWN_EX)]
            assert found == [ALLOW, REFUSE, REFUSE]
        else:
            assert answer(machine, number, 1) == (ALLOW if name in ALLOWED else REFUSE), name
    (other,) = set(MACHINES) - {machine}
    assert answer(machine, 0, architecture=MACHINES[other][1]) == KILL_PROCESS
    assert answer(machine, 0x40000000) == REFUSE  # x32


def test_every_call_that_is_refused_has_a_number_on_each_architecture_that_has_it() -> None:
    """aarch64 has none of the calls that newer ones replace."""
    replaced = {"fork", "vfork", "chmod", "chown", "lchown", "utime", "utimes", "futimesat"}
    calls = {name: numbers for group in REFUSED.values() for name, numbers in group.items()}
    assert {name for name, numbers in calls.items() if numbers[MACHINES["aarch64"][0]] is None} == replaced
    for machine, (column, _) in MACHINES.items():
        numbers = [each[column] for each in calls.values() if each[column] is not None]
        assert len(numbers) == len(set(numbers)), machine
        named = {name: number for name, number in NUMBERS[machine].items() if name in calls}
        assert {name: calls[name][column] for name in named} == named


def test_the_fence_is_made_of_layers_that_there_are() -> None:
    assert set(FENCE) < set(LAYERS) == {*TAKEN, "seccomp"}


WITHOUT = {
    "landlock": (444, None),
    "seccomp": (157, 22),
}  # the call that takes it on x86-64, and its first argument
LACKING = """
import ctypes, struct, sys
number, first, unfenced = {number}, {first}, {unfenced}
def step(code, value, then=0, other=0):
    return struct.pack("HBBI", code, then, other, value)
rule = [step(0x20, 0), step(0x15, number, 0, 3 if first is not None else 1)]
if first is not None:
    rule += [step(0x20, 16), step(0x15, first, 0, 1)]
program = ctypes.create_string_buffer(b"".join([*rule, step(6, 0x00050001), step(6, 0x7FFF0000)]))
header = struct.pack("HxxxxxxP", (len(program) - 1) // 8, ctypes.addressof(program))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, header) == 0
import json
from millrace.core.rewards.trial import try_reward
tests = json.dumps({{"tests": [{{"input": "", "output": "3"}}]}})
for response in ("", "```python\\nprint(3)\\n```"):  # check tries an empty text
    row = dict(prompt='"?"', response=response, label=None, metadata=tests, response_length=1, status="completed")
    row |= dict(dialogue=None, session_reward=None, session_parts=None, session_texts=None, session_answer=None)
    options = dict(timeout_s=60, total_s=60, unfenced=unfenced)
    tried = try_reward("millrace.connectors.user_code.code_reward:code", options, row)
    print(tried["problem"] or tried["reward"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
@pytest.mark.parametrize("layer", FENCE)
def test_without_a_layer_programs_of_the_policy_run_only_if_the_option_says_so(layer: str) -> None:
    """As in a container that blocks it: a filter that this process cannot take off refuses the call."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86-64")
    number, first = WITHOUT[layer]
    said = {}
    for unfenced in (False, True):
        script = LACKING.format(number=number, first=first, unfenced=unfenced)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        said[unfenced] = done.stdout + done.stderr
    lines = said[False].splitlines()
    assert len(lines) == 2, said
    for line in lines:
        assert FENCE[layer].split(" (")[0] in line
        assert "unfenced: true" in line
    assert said[True] == "0.0\n1.0\n"
