"""Kernels that Triton, SGLang, FlashInfer, DeepGEMM and PyTorch compile on this host: their folders, and what each entry is.

Owns which variable moves a compiler's folder, when an entry is whole, the key of hosts whose kernels are alike, and what has to
change in an entry that moves to another host: paths in Triton's groups, times that ninja compares. Knows nothing of storage.
"""

import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from millrace.connectors.host.local_files import PRIVATE_FILE, PRIVATE_FOLDER, home

FOLDER = "kernels"  # in MILLRACE_HOME
# their versions decide the code of kernels, or whether a library with them can be loaded
PACKAGES = (
    "torch",
    "triton",
    "sglang",
    "sglang-kernel",
    "apache-tvm-ffi",
    "flashinfer-python",
    "sgl-deep-gemm",
)
ASK_GPUS = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
PATIENCE_S = 20.0
GROUP = "__grp__"  # begins the name of Triton's file that lists the others of a kernel
NINJA_LOG, NINJA_DEPS = ".ninja_log", ".ninja_deps"
DEPS_HEAD = b"# ninjadeps\n" + struct.pack("<i", 4)
IS_DEPS = 1 << 31


class Compiler(NamedTuple):
    """What keeps compiled kernels in a folder."""

    name: str  # of its folder here
    variable: str  # that names the folder to it
    entries: tuple[str, ...]  # patterns of what is shipped as one, below its folder
    whole: Callable[[Path], bool]  # whether an entry is no longer being written


def _triton_whole(entry: Path) -> bool:
    """A kernel's group is written after its files. Entries without a group hold one library or one result of tuning."""
    names = [path.name for path in entry.iterdir()]
    if any(name.startswith(GROUP) for name in names):
        return True
    return bool(names) and all(name.endswith((".so", ".autotune.json")) for name in names)


def _built(entry: Path) -> bool:
    """Whether ninja has finished a library. It adds a line to its log when a command has ended."""
    log = entry / NINJA_LOG
    if not log.is_file():
        return False
    outputs = [line.split("\t")[3] for line in log.read_text().splitlines() if line.count("\t") == 4]
    return any(output.endswith(".so") and (entry / Path(output).name).is_file() for output in outputs)


def _flashinfer_whole(entry: Path) -> bool:
    """A library that was built, or a generated source that is older than one: ninja starts when all sources are written."""
    if entry.is_dir():
        return _built(entry)
    arch = next(path.parent for path in entry.parents if path.name == "generated")
    libraries = [path for path in arch.glob("cached_ops/*/*.so") if _built(path.parent)]
    return any(entry.stat().st_mtime_ns <= library.stat().st_mtime_ns for library in libraries)


COMPILERS = (
    Compiler("triton", "TRITON_CACHE_DIR", ("*/",), _triton_whole),
    Compiler("tvm-ffi", "TVM_FFI_CACHE_DIR", ("*/",), _built),
    Compiler(
        "flashinfer",
        "FLASHINFER_WORKSPACE_BASE",
        (".cache/flashinfer/*/*/cached_ops/*/", ".cache/flashinfer/*/*/generated/**/*"),
        _flashinfer_whole,
    ),
    Compiler(
        "deep-gemm", "SGLANG_DG_CACHE_DIR", ("cache/*/",), lambda entry: (entry / "kernel.cubin").is_file()
    ),
    Compiler("torch-extensions", "TORCH_EXTENSIONS_DIR", ("*/",), _built),
    # PyTorch writes each file aside and renames it
    Compiler(
        "inductor", "TORCHINDUCTOR_CACHE_DIR", ("fxgraph/*/*/", "aotautograd/*/*/", "??/*.py"), Path.exists
    ),
)
"""In the order of the page of documentation that names them."""


class KernelKey(NamedTuple):
    """Hosts with the same key compile the same kernels."""

    name: str  # for a folder
    parts: Mapping[str, Any]  # what it was made of


def kernel_key(python_path: Sequence[str] = ()) -> KernelKey:
    """The key of this host. python_path: folders in which packages are found before this process's."""
    path = [*python_path, *sys.path]
    versions = {
        name: next((found.version for found in distributions(name=name, path=path)), None)
        for name in PACKAGES
    }
    gpus = sorted(set(_lines(ASK_GPUS)))
    parts = {
        "gpus": gpus,
        "nvcc": next((line for line in _lines((_nvcc(), "--version")) if "release" in line), None),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        **versions,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    words = "".join(letter if letter.isalnum() else "-" for letter in (gpus[0] if gpus else "no-gpu").lower())
    return KernelKey(f"{words}-{digest}".replace("--", "-"), parts)


def _nvcc() -> str:
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return f"{root}/bin/nvcc" if root else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def _lines(command: Sequence[str]) -> list[str]:
    """The lines that a command prints; none if the host does not have it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def kernel_folder(key: KernelKey) -> Path:
    """This host's folder of kernels of a key. FlashInfer builds again under another path, so it is the same on like hosts."""
    folder = home().absolute() / FOLDER / key.name
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    return folder


def kernel_environment(folder: Path) -> dict[str, str]:
    """Variables by which the compilers keep their kernels in this folder."""
    return {compiler.variable: str(folder / compiler.name) for compiler in COMPILERS}


def whole_entries(folder: Path) -> Iterator[str]:
    """Names of the entries that can be shipped: paths below the folder, of folders or files."""
    for compiler in COMPILERS:
        root = folder / compiler.name
        for pattern in compiler.entries:
            for entry in sorted(root.glob(pattern)):
                wanted = entry.is_dir() == pattern.endswith("/") and not entry.is_symlink()
                if wanted and compiler.whole(entry):
                    yield entry.relative_to(folder).as_posix()


def entry_files(folder: Path, entry: str) -> Iterator[tuple[str, bytes]]:
    """The files of an entry, by their paths below the folder, in a form that is the same on every host."""
    path = folder / entry
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink() and not _passing(file.relative_to(folder)):
            data = file.read_bytes()
            yield file.relative_to(folder).as_posix(), _grouped(file.name, data, lambda name: Path(name).name)


def _passing(file: Path) -> bool:
    """Locks and files that are still being written."""
    return (
        file.name == "lock"
        or file.suffix == ".lock"
        or any(part.startswith("tmp.pid_") for part in file.parts)
    )


def _grouped(name: str, data: bytes, place: Callable[[str], str]) -> bytes:
    """The content of a file; in Triton's list of a kernel's files their paths are replaced."""
    if not name.startswith(GROUP):
        return data
    group = json.loads(data)
    group["child_paths"] = {child: place(path) for child, path in group["child_paths"].items()}
    return json.dumps(group, sort_keys=True).encode()


def put_entry(folder: Path, entry: str, files: Mapping[str, bytes], aside: Path) -> None:
    """Write an entry of another host. aside: an empty folder on the same disk.

    An entry is there as a whole or not. One that is there already stays.
    """
    target = folder / entry
    for name, data in files.items():
        at = aside / name
        at.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        at.write_bytes(_grouped(at.name, data, lambda child: str(target / Path(child).name)))
        at.chmod(PRIVATE_FILE)
        os.utime(at, (0, 0))  # a source must not be newer than what was made of it
    if (aside / entry / NINJA_LOG).is_file():
        leave_ninja_idle(aside / entry)
    target.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    try:
        (aside / entry).rename(target)
    except OSError:
        if not target.exists():  # else a compiler made it in the meantime
            raise


def leave_ninja_idle(folder: Path) -> None:
    """Set the times of a finished build so that ninja finds nothing to do, though this host's headers were installed later.

    ninja compares an output's time with its inputs' times, with the time in its log, and with the time in its record of headers
    (the formats of ninja's build_log.cc and deps_log.cc). It still builds again if a command has changed.
    """
    now = int(time.time()) * 10**9
    log = folder / NINJA_LOG
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    log.write_text(
        "".join(
            "\t".join([*(line[:2]), str(now), *line[3:]] if len(line) == 5 else line) + "\n" for line in lines
        )
    )
    deps = folder / NINJA_DEPS
    if deps.is_file():
        deps.write_bytes(_deps_of(deps.read_bytes(), now))
    for file in folder.rglob("*"):
        os.utime(file, ns=(now, now))


def _deps_of(data: bytes, mtime_ns: int) -> bytes:
    """ninja's record of headers with another time of its outputs. Of another version it is returned unchanged."""
    if not data.startswith(DEPS_HEAD):
        return data
    changed, at = bytearray(data), len(DEPS_HEAD)
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if size & IS_DEPS:  # number of the output, its time, numbers of its inputs
            struct.pack_into("<Q", changed, at + 8, mtime_ns)
        at += 4 + (size & ~IS_DEPS)
    return bytes(changed)
