"""`millrace stop` of a run that works, and what its start and its iterations said until then."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.core.errors import LeaseHeldError
from millrace.flows.commands import stop
from tests.support.flow_runs import PATIENCE_S, Workplace, output_of, wait_until

CONSTANT = "def score(sample):\n    return 0.5\n"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_stop_ends_a_living_driver_with_its_actors_and_the_same_command_goes_on(
    workplace: Workplace, tmp_path: Path
) -> None:
    (workplace.folder / "constant.py").write_text(CONSTANT)
    held = tmp_path / "held"
    command = ["train", "run.yaml", f"storage.root={tmp_path}", "reward.function=constant:score"]
    command += ["evaluation.sets=[]"]
    points = {"MILLRACE_KILL_POINT": "1/rollout/in", "MILLRACE_KILL_POINT_FILE": str(held)}
    driver = workplace.start(*command, **points)
    wait_until(lambda: held.exists() or driver.poll() is not None)
    assert driver.poll() is None, driver.communicate()[0]
    began = time.monotonic()
    said = workplace.call("stop", "a", "--root", str(tmp_path), COLUMNS="400")
    assert re.search(
        rf"process {driver.pid} on \S+, which drove a, ended; its flow run is cancelled; \d actors of a ended",
        said,
    )
    (shown,) = workplace.ask(
        "/flow_runs/filter",
        {"sort": "START_TIME_DESC", "limit": 1, "flow_runs": {"parent_task_run_id": {"is_null_": True}}},
    )
    assert (shown["state_type"], shown["state"]["message"]) == (
        "CANCELLED",
        "Ended by millrace stop. What finished is kept.",
    )
    out = output_of(driver)
    assert driver.returncode == 128 + signal.SIGTERM
    lines = out.splitlines()
    assert lines[-1].endswith(f", and the same command goes on: millrace {shlex.join(command)}") or (
        "what libraries logged meanwhile is in " in lines[-1]
    )
    assert lines[-1].startswith("Ended by SIGTERM; what finished is kept,")
    assert "Traceback" not in out
    assert time.monotonic() - began < PATIENCE_S
    assert "0 actors of a ended" in workplace.call("stop", "a", "--root", str(tmp_path))

    for part in ("the trainer (1 rank of model)", "engine-0", "scoring workers (1)"):
        assert f"starting {part}" in out
        assert re.search(rf"{re.escape(part)}: there after \d+\.\d s", out)

    (warning,) = [line for line in lines if "has no gradient of its rewards" in line]
    assert "iteration 1 of 3 has no gradient of its rewards: all 32 advantages are 0" in warning
    query = shlex.split(warning.partition("millrace ")[2])
    answer = workplace.call(*query, "--csv").splitlines()
    assert answer[0] == "group_id,samples,least,most,prompt"
    assert [line.split(",")[1:4] for line in answer[1:]] == 8 * [["4", "0.5", "0.5"]]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def identity(pid: int) -> ProcessIdentity:
    started = float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ProcessIdentity.own().model_copy(update={"pid": pid, "started": started})


@pytest.mark.skipif(sys.platform != "linux", reason="processes are known exactly on Linux alone")
def test_a_signal_reaches_the_very_process_and_no_other(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = identity(sleeper.pid)
    another = driver.model_copy(update={"started": driver.started - 1})  # whose pid was given again
    assert not stop.end_driver(another, "a", "runs/a")
    for elsewhere in ({"boot": "another"}, {"namespaces": "of a container"}):
        remedy = rf"`millrace stop a` or `kill {driver.pid}` ends it"
        with pytest.raises(LeaseHeldError, match=rf"on another host or in another container.*{remedy}"):
            stop.end_driver(driver.model_copy(update=elsewhere), "a", "runs/a")
    assert sleeper.poll() is None
    monkeypatch.setattr(stop, "PROMISED_S", 0.3)
    with pytest.raises(LeaseHeldError, match=rf"did not end within 0.3 s of SIGTERM; `kill -9 {driver.pid}`"):
        stop.end_driver(driver, "a", "runs/a")
    sleeper.kill()
    assert sleeper.wait() == -signal.SIGKILL
    assert not stop.end_driver(driver, "a", "runs/a")
