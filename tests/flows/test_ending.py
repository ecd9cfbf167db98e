"""What a command says when its run has ended: the export, the best evaluation of each set, and commands that are there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.flows.commands import command_of
from millrace.flows.driver.ending import ending
from tests.support.stored_run import CONFIG, write_run


def config(root: str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({**CONFIG, "storage": {"root": root}, **sections})


def test_the_end_names_the_newest_export_the_best_of_each_set_and_the_commands(tmp_path: Path) -> None:
    root = f"{tmp_path}/my runs"
    folder = write_run(root)
    for number in (1, 2):
        folder.store.write(f"exports/{number:06d}/config.json", b"{}")
    lines = ending(config(root))
    assert lines == [
        f"export   {root}/a/exports/000002",
        "best     easy 1.000 after iteration 2; 0.500 before training",
        "best     hard 0.500 before training",
        f"look     millrace show a --root '{root}'",
        f"curves   millrace ui a --root '{root}'",
    ]
    for line in lines[-2:]:
        program, command, *arguments = shlex.split(line)[1:]
        assert program == "millrace"
        assert arguments == ["a", "--root", root]
        assert {"run", "root"} <= {option.name for option in command_of(command).params}


def test_what_a_run_does_not_have_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("runs")
    tracking = {"uri": "https://mlflow.my.org"}
    lines = ending(config("runs", evaluation={"sets": []}, tracking=tracking))
    assert lines == ["look     millrace show a", "curves   https://mlflow.my.org"]


def test_of_many_sets_three_are_shown(tmp_path: Path) -> None:
    write_run(str(tmp_path))
    names = ["easy", "hard", "easy", "hard", "easy"]
    sets = [{"name": name, "path": "p"} for name in names]
    lines = [
        line
        for line in ending(config(str(tmp_path), evaluation={"sets": sets}))
        if "best" in line or "more" in line
    ]
    assert len(lines) == 4
    assert lines[-1] == "         and 2 more evaluation sets"
