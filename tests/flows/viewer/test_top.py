"""`millrace top`: what a look says of a run, and that no text of a model acts on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.core.plain_text import CONTROL
from millrace.flows.commands import app
from tests.support.attacks import ATTACKS
from tests.support.viewed_run import NAME, write_viewed_run


def looked(root: Path, *arguments: str) -> str:
    ended = CliRunner().invoke(app, ["top", NAME, "--once", "--root", str(root), *arguments])
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_a_look_says_where_a_run_is(tmp_path: Path) -> None:
    write_viewed_run(str(tmp_path))
    said = looked(tmp_path)
    assert "2 of 3 iterations" in said
    assert "iteration 2: reward 0.75" in said
    assert "rollout 8.0 s" in said
    assert "1 by zero variance" in said
    assert "staleness 0.5, KV use 0.83, queue 4" in said
    assert "iteration 3: open, waits for scores; 3 of 3 answers, 1 scored" in said
    assert "assistant: <b>6</b>" in said


def test_no_text_acts_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.flows.commands.terminal.console._force_terminal", True)
    monkeypatch.setattr("millrace.flows.commands.top.ANSWERS", len(ATTACKS))
    write_viewed_run(str(tmp_path), said=tuple(ATTACKS.values()))
    said = looked(tmp_path)
    assert CONTROL.findall(said) == []
    assert said.count("sample kept2-") == len(ATTACKS)
    assert "\\x1b]52;c;b3duZWQ=\\x07" in said


def test_a_broken_file_is_named_and_the_rest_said(tmp_path: Path) -> None:
    folder = write_viewed_run(str(tmp_path))
    path = next(path for path in folder.store.list("iterations/000002") if "/rollouts/" in path)
    folder.store.write(path, folder.store.read(path)[:-20])
    assert "iteration 2: reward 0.75" in looked(tmp_path)
