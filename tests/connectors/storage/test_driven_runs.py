"""Which records of driven runs name orphans: their driver is dead, and nobody goes on with their actors."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.connectors.storage.driven_runs import DrivenRun, driven_runs, forget_driven, note_driven
from millrace.connectors.storage.store import Store
from millrace.flows.commands.server import server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def dead() -> ProcessIdentity:
    code = "from millrace.connectors.host.process_identity import ProcessIdentity as P; print(P.own().model_dump_json())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ProcessIdentity.model_validate_json(done.stdout)


def driven(
    folder: Path, driver: ProcessIdentity, run_id: str | None = "1", identity: str = "a-1"
) -> DrivenRun:
    return DrivenRun(
        identity=identity, name="a", url=str(folder), run_id=run_id, ray_address=None, driver=driver, flow_run_id=None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("record", "orphaned"),
    [
        ({"id": "1"}, False),  # killed: the same command takes the actors over
        ({"id": "1", "completed": "2026-01-01"}, True),  # killed after it was complete
        ({"id": "2"}, True),  # another run began in the folder
        (None, True),  # removed, or moved
    ],
)
def test_a_dead_drivers_actors_are_orphans_unless_the_run_goes_on(
    tmp_path: Path, dead: ProcessIdentity, record: dict[str, str] | None, orphaned: bool
) -> None:
    if record:
        Store(str(tmp_path / "a")).write_sealed("run.json", record)
    assert driven(tmp_path / "a", dead).is_orphaned() is orphaned
    assert not driven(tmp_path / "a", ProcessIdentity.own()).is_orphaned()  # its driver lives
    elsewhere = dead.model_copy(update={"boot": "another machine"})
    assert not driven(tmp_path / "a", elsewhere).is_orphaned()  # nobody here can know


def test_a_folder_that_cannot_be_read_makes_no_orphan_and_a_command_leaves_one(
    tmp_path: Path, dead: ProcessIdentity
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("torn")
    assert not driven(tmp_path / "a", dead).is_orphaned()
    assert driven(
        tmp_path / "a", dead, run_id=None
    ).is_orphaned()  # of `replay`, say: nobody takes its ranks over


def test_records_are_kept_by_identity_whatever_it_holds_and_broken_ones_go(
    tmp_path: Path, home: Path, dead: ProcessIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    assert driven_runs() == []
    names = ["a/../b", "x" * 400, "日本", "a b", ""]
    for name in names:
        note_driven(driven(tmp_path, dead, identity=name))
        note_driven(driven(tmp_path, dead, identity=name))  # written again by the next start
    assert sorted(run.identity for run in driven_runs()) == sorted(names)
    for name in names[1:]:
        forget_driven(name)
        forget_driven(name)
    (home / "driven" / "broken.json").write_text("{")
    (home / "driven" / "other.json").write_text('{"pid": 1}')
    with caplog.at_level(logging.WARNING):
        assert [run.identity for run in driven_runs()] == names[:1]
    assert caplog.text.count("is no record of a driven run") == 2
    assert len(list((home / "driven").iterdir())) == 1


def test_servers_stop_under_no_driven_run_unless_asked_twice(tmp_path: Path, dead: ProcessIdentity) -> None:
    """`server stop` ended Prefect and Ray from under a run, which started Ray again."""
    elsewhere = dead.model_copy(update={"namespaces": "of a container"})
    note_driven(driven(tmp_path / "a", dead, identity="of a killed one"))
    assert CliRunner().invoke(server_commands(), ["stop"]).exit_code == 0
    for driver in (ProcessIdentity.own(), elsewhere):
        note_driven(driven(tmp_path / "a", driver))
        refused = CliRunner().invoke(server_commands(), ["stop"])
        assert refused.exit_code == 2
        said = refused.output
        assert f"a ({tmp_path}/a) by {driver}" in said
        assert f"millrace stop a --root {tmp_path}" in said
        assert "Prefect server" not in said
    done = CliRunner().invoke(server_commands(), ["stop", "--force"])
    assert done.exit_code == 0
    assert "Ray head: none runs" in done.output


def server_commands() -> typer.Typer:
    app = typer.Typer()
    app.command()(server)
    return app
