"""`millrace chat` with a run: the weights after an iteration, exported or made again, as the run sampled, and its folder unchanged."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace, configuration

pytestmark = pytest.mark.slow

LIMIT = configuration()["rollout"]["sampling"]["max_new_tokens"]


def said(workplace: Workplace, *arguments: str) -> str:
    """What a chat printed after its first lines, for one message."""
    ended = subprocess.run(
        [*workplace.command, "chat", *arguments, "--temperature", "0", "--seed", "1"],
        input="3+4=\n",
        capture_output=True,
        text=True,
        env=workplace.environment,
        cwd=workplace.folder,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def answer(out: str) -> str:
    return out.split("Ctrl-D the chat.\n")[1].partition("\n[")[0]


def test_weights_of_a_run_answer_as_its_export_and_its_model_do_and_nothing_of_it_changes(
    workplace: Workplace, whole: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    run = ("a", "--root", str(whole.parent))
    newest = said(workplace, *run)
    assert "a after 3 iterations" in newest
    limit = ("--max-new-tokens", str(LIMIT))
    export = said(workplace, str(whole / "exports" / "000003"), *limit)
    assert answer(newest) == answer(export)
    assert re.findall(r"cut off after (\d+) tokens", newest) in ([], [str(LIMIT)])
    untrained = said(workplace, *run, "--at", "0")
    assert "a before training" in untrained
    assert answer(untrained) == answer(said(workplace, str(workplace.folder / "model"), *limit))
    # neither has an export: the weights are made from a checkpoint, and from the first batch
    both = said(workplace, *run, "--at", "2", "--compare", "1")
    assert "a after 2 iterations" in both
    assert "a after 1 iterations" in both
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
