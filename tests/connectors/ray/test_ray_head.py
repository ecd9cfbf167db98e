"""The local Ray head, half dead or without its record: stopping ends it whole, and starting leaves nothing of the one before."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.connectors.ray import cluster, head
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, MillraceError
from millrace.flows.preflight.check_machine import check_machine

ODD_RECORDS = [
    b"",
    b"{}",
    b"[]",
    b'{"address": "127.0.0.1:1", "pids": [1',
    b'{"address": "127.0.0.1:1", "pids": [1], "created": [1.0]}',
    b'{"address": "127.0.0.1:1", "pids": [1, 2], "created": [1.0], "folder": "/tmp/millrace-ray-0-x"}',
    b'{"address": "127.0.0.1:1", "pids": ["x"], "created": [1.0], "folder": "/tmp/millrace-ray-0-x"}',
    b'{"address": "127.0.0.1:1", "pids": [1], "created": [1.0], "folder": "/"}',
    b'{"address": "127.0.0.1:1", "pids": [1], "created": [1.0], "folder": "millrace-ray-0-x"}',
    b"\xff\x00",
    b"[" * 10_000,
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # short: sockets lie in it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield tmp_path
        cluster.stop_local_head()


@pytest.mark.parametrize("content", ODD_RECORDS)
def test_what_is_no_record_of_a_head_is_told_and_taken_for_none(
    content: bytes, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "ray.json").write_bytes(content)
    assert not cluster.head_lives()
    assert not cluster.stop_local_head()
    assert str(home / "ray.json") in caplog.text
    assert not (home / "ray.json").exists()


def test_a_record_that_cannot_be_read_is_named_and_its_remedy_works(home: Path) -> None:
    (home / "ray.json").mkdir()
    with pytest.raises(MillraceError, match="ray.json: cannot be read: .*; remove it") as raised:
        cluster.stop_local_head()
    Path(raised.value.where).rmdir()
    assert not cluster.stop_local_head()


def test_a_pager_of_a_heads_log_and_anothers_folder_stay(home: Path) -> None:
    folder = Path(os.environ["RAY_TMPDIR"])
    log, other = folder / f"{head.prefix()}abc" / "raylet.out", folder / "millrace-ray-0-other"
    log.parent.mkdir()
    other.mkdir()
    log.touch()
    pager = psutil.Popen(["tail", "-f", str(log)])
    try:
        assert not cluster.stop_local_head()
        assert pager.poll() is None
        assert list(folder.iterdir()) == [other]
    finally:
        pager.kill()
        pager.wait()


@pytest.mark.slow
def test_a_head_that_lost_a_part_or_its_record_is_ended_whole_with_its_folder(home: Path) -> None:
    folder = Path(os.environ["RAY_TMPDIR"])
    cluster.local_head()
    (made,) = folder.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700  # Ray opens its own folder to every user
    first = _pids(home)
    (gcs,) = [psutil.Process(pid) for pid in first if psutil.Process(pid).name() == "gcs_server"]
    assert gcs.environ()[cluster.KEPT_CALLS] == "1000"  # its memory would grow with each call otherwise
    for pid in first:
        if psutil.Process(pid).name() == "raylet":
            os.kill(pid, signal.SIGKILL)
    assert cluster.stop_local_head()
    assert not any(_lives(pid) for pid in first)
    assert list(folder.iterdir()) == []

    address = cluster.local_head()
    second = _pids(home)
    (home / "ray.json").write_text((home / "ray.json").read_text()[:30])
    assert cluster.local_head() != address
    assert not any(_lives(pid) for pid in second)
    assert len(list(folder.iterdir())) == 1
    assert cluster.stop_local_head()
    assert list(folder.iterdir()) == []


def _pids(home: Path) -> list[int]:
    pids: list[int] = json.loads((home / "ray.json").read_text())["pids"]
    return pids


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_ray_folder_too_long_for_its_sockets_is_named_before_anything_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own refusal came after half a start, and named a file that nobody knows."""
    values = {
        "run": {"name": "a", "iterations": 1},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "t"}]},
    }
    config = RunConfig.model_validate(values)
    most = head.SOCKET_BYTES - len(f"/{head.prefix()}0000{head.SOCKET}")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short + "/" + "x" * (most - len(short) - 1))
        head.check_length()
        assert not [problem for problem in check_machine(config) if problem.field == "RAY_TMPDIR"]
        long = os.environ["RAY_TMPDIR"] + "x"
        monkeypatch.setenv("RAY_TMPDIR", long)
        with pytest.raises(
            ConfigError, match=f"RAY_TMPDIR = {long}: has {most + 1} bytes.*at most {most} bytes"
        ):
            cluster.local_head()
        assert not Path(long).exists()
        assert not (home / "ray.json").exists()
        (problem,) = [problem for problem in check_machine(config) if problem.field == "RAY_TMPDIR"]
        assert "or unset it" in problem.remedy
