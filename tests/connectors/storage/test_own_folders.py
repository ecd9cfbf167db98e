"""Folders that end with their process: which are removed, and which never."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.connectors.host.own_folders import (
    own_folder,
    remove_dead_folders,
    remove_own_folder,
    temporary_folder,
)

MAKER = """
import sys
from millrace.connectors.host.own_folders import own_folder
print(own_folder("millrace-a-engine-0", sys.argv[1]), flush=True)
sys.stdin.read()
"""


def _maker(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_when_its_process_has_died_and_not_before(tmp_path: Path) -> None:
    process, folder = _maker(tmp_path)
    (folder / "weights").write_text("x")
    assert remove_dead_folders(tmp_path) == []
    process.kill()
    process.communicate()
    mine = Path(own_folder("millrace-b", str(tmp_path)))  # whoever makes one removes the dead ones
    assert list(tmp_path.iterdir()) == [mine]
    remove_own_folder(str(mine))
    assert list(tmp_path.iterdir()) == []


def test_a_living_folder_stays_where_its_pid_means_nothing(tmp_path: Path) -> None:
    """As from another container: the name holds the pid of a process that this one cannot see."""
    process, folder = _maker(tmp_path)
    try:
        hidden = folder.rename(tmp_path / "millrace-a-engine-0-999999999.abcdefgh")
        assert remove_dead_folders(tmp_path) == []
        assert hidden.is_dir()
    finally:
        process.communicate("")
    assert remove_dead_folders(tmp_path) == [hidden]


def test_a_folder_goes_although_its_pid_is_anothers_now(tmp_path: Path) -> None:
    folder = tmp_path / f"millrace-a-{os.getpid()}.abcdefgh"
    folder.mkdir()
    assert (
        remove_dead_folders(tmp_path) == []
    )  # without a lock, as an earlier version of this process would make it
    before = psutil.Process().create_time() - 60
    os.utime(folder, (before, before))
    assert remove_dead_folders(tmp_path) == [folder]


@pytest.mark.parametrize("name", ["millrace-notes", "millrace-a-x.abcdefgh", "other-a-999999999.abcdefgh"])
def test_nothing_else_is_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert remove_dead_folders(tmp_path) == []


def test_a_temporary_folder_leaves_nothing_and_no_descriptor(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    for _ in range(3):
        with temporary_folder("millrace-export", str(tmp_path)) as folder:
            (Path(folder) / "file").write_text("x")
            assert remove_dead_folders(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().num_fds() == before
