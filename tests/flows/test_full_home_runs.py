"""A disk of MILLRACE_HOME that fills up amid a run: the run stops and names the folder, and goes on when there is room."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace, final_weights, make_workplace, output_of, trained, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk of a given size"),
]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Workplace]:
    """A workplace whose MILLRACE_HOME is a disk of its own, of 256 MiB."""
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "tmpfs", str(home)], check=True)
    place = make_workplace(tmp_path)
    yield place
    place.call("server", "stop")
    subprocess.run(["umount", "--lazy", str(home)], check=True)


def fill(file: Path) -> None:
    """Take what room a disk has."""
    while shutil.disk_usage(file.parent).free:
        with contextlib.suppress(OSError), file.open("ab", buffering=0) as out:
            out.write(bytes(1 << 20))


def test_a_run_stops_where_the_disk_of_its_home_is_full_and_goes_on_when_there_is_room(
    small: Workplace, whole: Path
) -> None:
    root, filler = small.folder / "runs", small.folder / "home" / "filler"
    process = small.start("train", "run.yaml", f"storage.root={root}")
    wait_until(
        lambda: (
            (root / "a" / "iterations" / "000001" / "manifest.json").exists() or process.poll() is not None
        )
    )
    fill(filler)
    out = output_of(process)
    assert process.returncode == 2, out
    assert f"MILLRACE_HOME = {small.folder}/home: the disk is full; free space there" in " ".join(out.split())
    assert "Traceback" not in out
    filler.unlink()
    assert "3 iterations complete" in small.train(root)
    assert trained(root / "a") == trained(whole)
    assert final_weights(root / "a") == final_weights(whole)
    assert "nothing is wrong" in small.call("verify", "a", "--root", str(root))
