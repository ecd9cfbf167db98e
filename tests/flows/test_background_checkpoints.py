"""Runs that go on while their checkpoints are written: the same weights, whatever dies amid the write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from tests.support.flow_runs import Workplace, final_weights, output_of, trained, wait_until

ON = ["checkpoint.background=true", "checkpoint.every=1", "checkpoint.keep_last=3"]


def records(root: str) -> list[dict[str, Any]]:
    """What the checkpoint task of each iteration of the run `a` recorded."""
    found = [IterationFiles(RunFolder(root, "a"), index).record("checkpoint") for index in range(3)]
    return [record for record in found if record is not None]


def held_at(workplace: Workplace, root: Path, point: str, reached: Path) -> subprocess.Popen[str]:
    """A run that waits at a point."""
    held = {"MILLRACE_KILL_POINT": point, "MILLRACE_KILL_POINT_FILE": str(reached)}
    process = workplace.start("train", "run.yaml", f"storage.root={root}", *ON, **held)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process


def the_writer(workplace: Workplace) -> psutil.Process:
    """The process that writes a checkpoint of a run there, or waits for one."""
    (writer,) = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "write_process" in " ".join(each.info["cmdline"] or ())
        and each.environ().get("MILLRACE_HOME") == workplace.environment["MILLRACE_HOME"]
    ]
    return writer


def assert_the_same_run(workplace: Workplace, root: Path, whole: Path) -> None:
    assert trained(root / "a") == trained(whole)
    assert final_weights(root / "a") == final_weights(whole)
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(root))


@pytest.mark.slow
def test_each_checkpoint_counts_from_the_iteration_that_finds_it_written(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    workplace.train(tmp_path, *ON)
    assert_the_same_run(workplace, tmp_path, whole)
    store = Store(str(tmp_path / "a"))
    first, second, last = records(str(tmp_path))
    assert first["begun"] == "checkpoints/000001"
    assert (first["saved"], "committed" in first) == (None, False)
    assert (second["begun"], second["committed"]) == ("checkpoints/000002", "checkpoints/000001")
    assert second["write_s"] > 0
    assert (last["saved"], last["committed"]) == ("checkpoints/000003", "checkpoints/000002")
    for done, record in ((1, second["committed_marker"]), (2, last["committed_marker"]), (3, last["marker"])):
        marker = f"checkpoints/{done:06d}/complete.json"
        assert record["path"] == marker
        assert store.entry(marker).sha256 == record["sha256"]
        assert store.read_sealed(marker)["version"] == 2 * done
    marker = tmp_path / "a" / "checkpoints" / "000001" / "complete.json"
    marker.write_text(marker.read_text().replace('"version": 2', '"version": 4'))
    out = workplace.call("verify", "a", "--root", str(tmp_path), expect=1)
    assert "checkpoints/000001/complete.json" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["1/checkpoint/in", "2/checkpoint/committed"])
def test_a_driver_that_is_killed_amid_a_write_goes_on_with_it(
    workplace: Workplace, whole: Path, tmp_path: Path, point: str
) -> None:
    process = held_at(workplace, tmp_path, point, tmp_path / "reached")
    os.kill(process.pid, signal.SIGKILL)
    output_of(process)
    workplace.train(tmp_path, *ON)
    assert_the_same_run(workplace, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["writer", "trainer"])
def test_what_dies_amid_a_write_costs_that_checkpoint_alone(
    workplace: Workplace, whole: Path, tmp_path: Path, victim: str
) -> None:
    """The run goes on from the checkpoint before, with replay; nothing that was promised is lost."""
    reached = tmp_path / "reached"
    process = held_at(workplace, tmp_path, "1/checkpoint/in", reached)
    writer = the_writer(workplace)
    killed = writer if victim == "writer" else writer.parent()
    assert killed is not None
    killed.kill()
    reached.unlink()
    out = output_of(process)
    assert process.returncode == 0, out
    assert_the_same_run(workplace, tmp_path, whole)
    last = records(str(tmp_path))[2]
    assert last["saved"] == "checkpoints/000003"
    assert "committed" not in last
    assert not (tmp_path / "a" / "checkpoints" / "000002").exists()  # what was left of it


@pytest.mark.slow
def test_what_a_kill_left_of_a_checkpoint_is_gone_when_the_next_is_written(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    """A large model's disk has no room for both."""
    reached, checkpoints = tmp_path / "reached", tmp_path / "a" / "checkpoints"
    process = held_at(workplace, tmp_path, "1/publish/in", reached)
    trainer = the_writer(workplace).parent()
    assert trainer is not None
    trainer.kill()
    os.kill(process.pid, signal.SIGKILL)
    output_of(process)
    assert (checkpoints / "000002").exists()
    reached.unlink()
    process = held_at(workplace, tmp_path, "2/checkpoint/in", reached)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000001", "000003"]
    reached.unlink()
    out = output_of(process)
    assert process.returncode == 0, out
    assert records(str(tmp_path))[2]["dropped"] == ["checkpoints/000002"]
    assert_the_same_run(workplace, tmp_path, whole)


@pytest.mark.slow
def test_checkpoints_are_written_to_a_bucket(workplace: Workplace, whole: Path, s3_bucket: str) -> None:
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    workplace.environment.update({name: here for name, here in os.environ.items() if name.startswith("AWS_")})
    workplace.train(root, *ON)
    store = Store(root).child("a")
    _, second, last = records(root)
    assert (second["committed"], last["committed"]) == ("checkpoints/000001", "checkpoints/000002")
    steps = [json.loads(store.read(f"iterations/{index:06d}/step.json"))["steps"] for index in range(3)]
    wanted = [
        json.loads((whole / "iterations" / f"{index:06d}" / "step.json").read_text())["steps"]
        for index in range(3)
    ]
    assert [[step["loss"] for step in each] for each in steps] == [
        [step["loss"] for step in each] for each in wanted
    ]
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", root)
