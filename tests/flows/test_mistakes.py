"""What newcomers do wrong is answered before anything starts: the field or file, the reason and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millrace.flows.commands import app
from tests.support.mistakes import MISTAKES, Mistake

THROUGH_A_SHELL = ("a section misspelt", "a reward that raises", "another rate in a run that exists")


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", "run.yaml", *arguments])


@pytest.fixture(autouse=True)
def here(wrong_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wrong_place)
    monkeypatch.syspath_prepend(str(wrong_place))
    monkeypatch.setenv("COLUMNS", "500")


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_the_answer_names_field_reason_and_remedy(mistake: Mistake) -> None:
    result = check(*mistake.overrides)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith(f"  {mistake.field}")][:1]
    for part in (mistake.reason, mistake.remedy):
        assert part in line, result.output


def test_no_two_mistakes_are_the_same() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    assert len({tuple(mistake.overrides) for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("name", THROUGH_A_SHELL)
def test_train_refuses_before_anything_starts(name: str, tmp_path: Path) -> None:
    (mistake,) = [mistake for mistake in MISTAKES if mistake.name == name]
    done = train(tmp_path, *mistake.overrides)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert mistake.reason in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"stderr.log"}, "a server was started"


def test_a_home_that_cannot_be_written_is_a_sentence() -> None:
    done = train(Path("/proc/millrace"))
    assert done.returncode == 2
    assert "MILLRACE_HOME = /proc/millrace: no folder that can be written" in done.stderr
    assert "Traceback" not in done.stderr


def train(home: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.flows.commands", "train", "run.yaml", *overrides],
        env={**os.environ, "MILLRACE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_mistakes_of_the_file_and_of_what_it_names_come_in_one_list() -> None:
    wrong = [
        "run.iteratoins=3",
        "data.max_prompt_tokens=many",
        "model.path=no-model",
        "data.sources.sums.weigth=2",
    ]
    lines = check(*wrong, "data.sources.sums.path=nowhere.jsonl").output.splitlines()
    assert lines[0] == "5 problems in the configuration:"
    fields = {line.split()[0].rstrip(":") for line in lines[1:]}
    assert fields == {
        "run.iteratoins",
        "data.max_prompt_tokens",
        "model.path",
        "data.sources.sums.weigth",
        "data.sources.sums.path",
    }


def test_with_the_remedy_for_a_silent_template_it_is_accepted(wrong_place: Path) -> None:
    text = (wrong_place / "silent.jinja").read_text()
    assert check("model.chat_template=silent.jinja").exit_code == 2
    (wrong_place / "ready.jinja").write_text(text + "{% if add_generation_prompt %}<assistant>{% endif %}")
    (wrong_place / "always.jinja").write_text(text + "<assistant>")
    (wrong_place / "bare.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name in ("ready", "always", "bare"):
        assert check(f"model.chat_template={name}.jinja").exit_code == 0, name


def test_what_the_remedy_for_changed_data_says_is_accepted() -> None:
    changed = ["run.name=trained", "data.sources.sums.path=mostly.jsonl", "data.max_quarantined_share=0.9"]
    assert check(*changed).exit_code == 2
    assert check(*changed, "data.allow_changes=true").exit_code == 0


def test_a_reward_that_may_take_longer_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.flows.preflight.check_reward.PATIENCE_S", 0.2)
    result = check("reward.function=rewards_of_a_newcomer:hangs")
    assert result.exit_code == 0, result.output
    assert "no answer within 0.2 s; a run waits 30 s" in result.output


def test_a_secret_that_the_reward_raises_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_A_NEWCOMER", "s3cr3t-of-a-newcomer")
    reward = ["reward.function=rewards_of_a_newcomer:tells", "reward.options.key=${env:KEY_OF_A_NEWCOMER}"]
    result = check(*reward)
    assert "it raised OSError: ${env:KEY_OF_A_NEWCOMER} in rewards_of_a_newcomer.py" in result.output
    assert "s3cr3t" not in result.output
