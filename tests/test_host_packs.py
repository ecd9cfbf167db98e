"""Packs for a host without a network: what goes in comes out there, programs as programs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACK = Path(__file__).parents[1] / "deployments" / "gpu" / "pack.py"
PROGRAM = b"#!/bin/sh\necho started\n"


def wheel(folder: Path, name: str, files: dict[str, tuple[bytes, int]]) -> None:
    """A wheel of version 1.0 with files by path: their bytes and modes."""
    info = f"{name}-1.0.dist-info"
    said = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in said.items():
            archive.writestr(path, text)
        for path, (content, mode) in files.items():
            member = zipfile.ZipInfo(path)
            member.external_attr = (0o100000 | mode) << 16
            archive.writestr(member, content)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What a host unpacks of a pack of two packages, one of which asks for room in three parts."""
    wheels, pack = tmp_path / "offered", tmp_path / "pack"
    wheel(wheels, "engine", {"engine/server": (PROGRAM, 0o755), "engine/__init__.py": (b"x = 1\n", 0o644)})
    bulk = os.urandom(2_500_000)
    wheel(wheels, "bulk", {"bulk-1.0.data/purelib/bulk/data.bin": (bulk, 0o644)})
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    build = [sys.executable, str(PACK), "build", str(pack), "engine==1.0", "bulk==1.0", "--part-mib", "1"]
    subprocess.run(build, env=environment, check=True)
    assert sorted(path.name for path in pack.glob("part-*")) == ["part-00", "part-01", "part-02"]
    unpack = [sys.executable, "-S", str(PACK), "unpack", str(pack), str(tmp_path / "there")]
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    said = subprocess.run(unpack, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    assert (Path(said) / "bulk" / "data.bin").read_bytes() == bulk
    return Path(said)


@pytest.mark.slow
def test_a_pack_gives_a_host_what_the_wheels_hold(site: Path) -> None:
    ran = subprocess.run([site / "engine" / "server"], check=True, capture_output=True, text=True)
    assert ran.stdout == "started\n"
    assert not os.access(site / "engine" / "__init__.py", os.X_OK)
    assert (site / "engine-1.0.dist-info" / "METADATA").exists()
    assert list(site.glob("engine/__pycache__/__init__.*.pyc"))  # else every start of an engine compiles it
