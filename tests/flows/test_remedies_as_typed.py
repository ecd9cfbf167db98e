"""A command that a message advises does what the message says, typed as it stands there, from any folder."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.errors import DEFAULT_ROOT, MillraceError, of_run
from millrace.flows.commands import app
from millrace.flows.commands.discard import discard_iterations
from millrace.flows.commands.ledger import accounts_of_run
from millrace.flows.driver.same_run import check_resume
from millrace.flows.driver.stored_run import run_record
from tests.flows.test_remedies import sentences
from tests.support.stored_run import CONFIG, write_run

ADVISED = re.compile(r"`millrace ([^`]*)`")
FILLED = {"NEW": "b", "ITERATION": "0"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with two committed iterations and an open one, under a root with a space; another folder is the working one."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = write_run(str(tmp_path / "my runs"))
    (entry,) = [folder.iteration(2).entry("prompts.parquet")]
    record = {"result": f'{{"files": [{entry.model_dump_json()}], "groups": 2, "by_source": {{}}}}'}
    folder.iteration(2).write_sealed(record_path("sample_prompts"), record)
    return folder


def root(folder: RunFolder) -> str:
    return str(Path(folder.store.root).parent)


def advised(raised: Callable[[], object]) -> list[str]:
    """The arguments of the command that a call's error advises."""
    with pytest.raises(MillraceError) as caught:
        raised()
    (found,) = ADVISED.findall(str(caught.value))
    return [FILLED.get(word, word) for word in shlex.split(found)]


def typed(words: list[str]) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


def test_where_a_committed_file_is_gone_a_branch_goes_on(folder: RunFolder) -> None:
    folder.iteration(1).remove("batch.parquet")
    words = advised(lambda: IterationFiles(folder, 1).read_table("batch"))
    assert words[:3] == ["branch", "a", "b"]
    typed(words)
    assert run_record(root(folder), "b")["parent"]["run"] == "a"


def test_where_a_manifest_is_gone_a_branch_goes_on(folder: RunFolder) -> None:
    folder.iteration(0).remove("manifest.json")
    typed(advised(lambda: RunFolder(root(folder), "a").manifests()))


def test_where_a_file_of_an_open_iteration_is_gone_it_is_given_up(folder: RunFolder) -> None:
    folder.iteration(2).remove("prompts.parquet")
    words = advised(lambda: IterationFiles(folder, 2).read_table("prompts"))
    assert words[:4] == ["discard", "a", "--from", "3"]
    typed(words)
    assert folder.iteration(2).list() == []


def test_discard_advises_what_it_takes(folder: RunFolder) -> None:
    folder.iteration(3).write("prompts.parquet", b"")
    words = advised(lambda: discard_iterations(root(folder), "a", 2))
    assert words[:4] == ["discard", "a", "--from", "3"]
    typed(words)
    typed(advised(lambda: discard_iterations(root(folder), "a", 1)))
    assert run_record(root(folder), "b")["parent"]["at"] == 0


def test_a_field_that_a_resume_may_not_change_is_changed_in_a_branch(folder: RunFolder) -> None:
    values = {**CONFIG, "storage": {"root": root(folder)}}
    before = RunConfig.model_validate(values)
    now = RunConfig.model_validate({**values, "trainer": {"optimizer": {"lr": 1e-9}}})
    typed(advised(lambda: check_resume(before, now)))


def test_where_no_such_run_is_the_runs_are_listed(folder: RunFolder) -> None:
    assert "a" in typed(advised(lambda: run_record(root(folder), "none"))).split()


def test_of_a_supervised_run_the_iterations_are_shown(folder: RunFolder) -> None:
    record = run_record(root(folder), "a")
    record["config"] |= {"algorithm": {"loss": {"kind": "sft"}}}
    folder.store.write_sealed("run.json", record)
    typed(advised(lambda: accounts_of_run(root(folder), "a")))


def test_the_root_is_named_unless_commands_take_it_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert of_run("a", f"{tmp_path}/{DEFAULT_ROOT}/a") == "a"
    assert of_run("a", "s3://bucket/runs/a", "NEW") == "a NEW --root s3://bucket/runs"
    said = of_run("a", "/my runs/a")
    assert subprocess.run(
        ["sh", "-c", f"printf '%s|' {said}"], capture_output=True, text=True, check=True
    ).stdout == ("a|--root|/my runs|")


def test_every_command_about_a_run_that_a_message_advises_names_its_root() -> None:
    """From another storage root than `runs` it was another run, or none."""
    anywhere = re.compile(r"`millrace (branch|discard|verify|show|stop) (?!RUN)[^`]*`")
    found = [(place, found[0]) for place, text in sentences() for found in anywhere.finditer(text)]
    assert len(found) > 5
    assert [item for item in found if "--root" not in item[1]] == []
