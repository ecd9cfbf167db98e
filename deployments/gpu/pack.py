"""Wheels for a GPU host without a network, as archives of a bounded size.

    python deployments/gpu/pack.py build PACK millrace --lock requirements.lock --host host.txt [--part-mib 55]
    python deployments/gpu/pack.py build PACK NAME==VERSION ...
    python deployments/gpu/pack.py unpack PACK DEST          # on the host, standard library only; prints DEST/site

`build` downloads wheels for Python 3.12 on x86-64: the named versions, or with --lock the named packages and all they
need, at the versions of a constraints file, except what the host has (--host, its `pip freeze`).
millrace itself is not packed: copy its checkout to the host. `unpack` also compiles to bytecode. SGLang needs a separate
pack, since it pins other versions than millrace: name its folder in MILLRACE_SGLANG_PYTHONPATH, and only the server's
process sees it.
"""

from __future__ import annotations

import argparse
import compileall
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 16, -1)] + ["manylinux2014_x86_64"]
UNUSED = (  # neither millrace nor SGLang (triton attention) imports these
    "ray/jars",
    "ray/dashboard/client",
    "ray/rllib",
    "ray/serve",
    "ray/cpp",
    "ray/core/src/ray/cpp",
    "mlflow/server/js",
    "sgl_kernel/flash_ops*.so",
    "sgl_kernel/flashmla_ops*.so",
    "sgl_kernel/infllm_ops*.so",
    "sgl_kernel/sm100",
    "sglang/test",
    "xgrammar/**/*.a",
    "torch_memory_saver*cu12*.so",
    "flashinfer/data/cutlass/examples",
    "flashinfer/data/cutlass/python",
    "flashinfer/data/cutlass/test",
)
STRIP_BYTES = 200_000  # larger binaries lose their symbols, which halves Ray


def main() -> None:
    """Build or unpack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    build.add_argument("pack", type=Path)
    build.add_argument("names", nargs="+")
    build.add_argument("--lock", type=Path, help="constraints file: also take what the names need")
    build.add_argument("--host", type=Path, help="what the host has: its `pip freeze`")
    build.add_argument("--part-mib", type=int, default=55)
    unpack = commands.add_parser("unpack")
    unpack.add_argument("pack", type=Path)
    unpack.add_argument("dest", type=Path)
    given = parser.parse_args()
    if given.command == "unpack":
        print(_unpack(given.pack, given.dest))
        return
    _build(given.pack, given.names, given.lock, _frozen(given.host) if given.host else {}, given.part_mib)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def _frozen(path: Path) -> dict[str, str | None]:
    """Versions by package, from the output of `pip freeze`; None if it names a path or URL instead."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    found = [re.match(r"([\w.-]+)(?:==(\S+))?", line) for line in lines if not line.startswith(("#", "-"))]
    return {_plain(match[1]): match[2] for match in found if match}


def _build(
    pack: Path, names: list[str], lock: Path | None, has: dict[str, str | None], part_mib: int
) -> None:
    site = pack / "site"
    shutil.rmtree(site, ignore_errors=True)
    for old in pack.glob("part-*"):
        old.unlink()
    wheels = pack / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(wheels),
    ]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    command += [x for platform in PLATFORMS for x in ("--platform", platform)]
    wanted = _closure(names, lock, has) if lock else names
    subprocess.run([*command, *wanted], check=True)
    chosen = {_plain(name.split("==")[0]) for name in wanted}
    for wheel in sorted(wheels.glob("*.whl")):
        if _plain(wheel.name.split("-")[0]) in chosen:
            _extract(wheel, site)
    for data in list(site.glob("*.data")):
        for kind in ("purelib", "platlib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, site, dirs_exist_ok=True)
        shutil.rmtree(data)
    for pattern in UNUSED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _strip(site)
    _archive(pack, part_mib * 2**20)


def _extract(wheel: Path, site: Path) -> None:
    """Extract a wheel's files and keep the execute permission of programs, which zipfile drops."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = archive.extract(member, site)
            if not member.is_dir() and member.external_attr >> 16 & 0o111:
                os.chmod(path, 0o755)


def _closure(names: list[str], lock: Path, has: dict[str, str | None]) -> list[str]:
    """The named packages and all they need, at locked versions, by the metadata installed in this environment.

    Leaves out packages that the host has at a suitable version. A package that the host has at another version is packed, and
    found before the host's.
    """
    from importlib import metadata

    from packaging.markers import default_environment
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    locked = {
        _plain(line.split("==")[0]): line.split("==")[1].strip()
        for line in lock.read_text().splitlines()
        if "==" in line
    }
    environment: dict[str, Any] = {
        **default_environment(),
        "python_version": "3.12",
        "python_full_version": "3.12.3",
    }
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()  # a package may be needed again with other extras

    def visit(name: str, extras: Iterable[str], wanted: SpecifierSet) -> None:
        plain = _plain(name)
        key = (plain, frozenset(extras))
        there = plain in has and (has[plain] is None or wanted.contains(has[plain] or "", prereleases=True))
        if key in seen or there or (plain not in locked and name not in names):
            return
        if plain in has:
            print(f"packed though the host has {has[plain]}, and {wanted} is needed: {plain}")
        seen.add(key)
        if plain in locked:
            found[plain] = locked[plain]
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            marks = (
                [need.marker.evaluate({**environment, "extra": e}) for e in ("", *extras)]
                if need.marker
                else [True]
            )
            if any(marks):
                visit(need.name, need.extras, need.specifier)

    for name in names:
        visit(name, (), SpecifierSet())
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _strip(site: Path) -> None:
    """Strip symbols from large binaries that this machine's strip can read, and delete type stubs."""
    for stub in site.rglob("*.pyi"):
        stub.unlink()
    if shutil.which("strip"):
        for path in site.rglob("*"):
            if path.is_file() and path.suffix != ".py" and path.stat().st_size > STRIP_BYTES:
                with path.open("rb") as stream:
                    binary = stream.read(4) == b"\x7fELF"
                if binary:
                    subprocess.run(["strip", "--strip-unneeded", str(path)], check=False, capture_output=True)


def _archive(pack: Path, part: int) -> None:
    whole = pack / "pack.tar.xz"
    subprocess.run(
        f"tar -C '{pack}' -cf - site | xz -T2 -9 --lzma2=dict=128MiB > '{whole}'", shell=True, check=True
    )
    with whole.open("rb") as stream:
        for number in range(-(-whole.stat().st_size // part)):
            path = pack / f"part-{number:02d}"
            path.write_bytes(stream.read(part))
            print(path, f"{path.stat().st_size / 2**20:.1f} MiB")
    whole.unlink()


class _Chain(io.RawIOBase):
    """The parts of an archive as one stream."""

    def __init__(self, files: list[Path]) -> None:
        self._files = iter(files)
        self._current: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._current is None:
                path = next(self._files, None)
                if path is None:
                    return 0
                self._current = path.open("rb")
            read = int(self._current.readinto(buffer))
            if read:
                return read
            self._current = None


def _unpack(pack: Path, dest: Path) -> Path:
    dest.mkdir(parents=True, exist_ok=True)
    stream = io.BufferedReader(_Chain(sorted(pack.glob("part-*"))), 1 << 20)
    with lzma.open(stream) as raw, tarfile.open(fileobj=raw, mode="r|") as archive:
        archive.extractall(dest, filter="data")
    site = dest / "site"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        # containers often tell Python to write no bytecode, and then every start would compile all imports again
        compileall.compile_dir(site, quiet=2, workers=0)
    return site


if __name__ == "__main__":
    main()
