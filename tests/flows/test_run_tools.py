"""verify, replay, sql and branch on a finished run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from millrace.flows.commands.replay import largest_differences
from millrace.flows.commands.sql import answer
from tests.soak.promises import numbers
from tests.support.flow_runs import Workplace, final_weights, trained


def test_verify_finds_nothing_wrong_with_a_whole_run(workplace: Workplace, whole: Path) -> None:
    out = workplace.call("verify", "a", "--root", str(whole.parent))
    assert "3 iterations" in out
    assert "96 trained samples" in out
    assert "nothing is wrong" in out


def test_verify_names_the_file_with_a_flipped_bit(workplace: Workplace, whole: Path, tmp_path: Path) -> None:
    """One file: tests/flows/test_tampering.py has every kind."""
    shutil.copytree(whole, tmp_path / "a")
    victim = tmp_path / "a" / "iterations/000001/batch.parquet"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    out = workplace.call("verify", "a", "--root", str(tmp_path), expect=1)
    assert str(victim) in out


@pytest.mark.slow
def test_a_replay_may_begin_at_the_model(workplace: Workplace, whole: Path) -> None:
    out = workplace.call("replay", "a", "--from", "1", "--to", "3", "--root", str(whole.parent))
    assert "from the model as it was before the first step" in out
    assert "every weight equals the export after iteration 3, bit for bit" in out


def test_a_replay_makes_the_stored_steps_and_weights_again(workplace: Workplace, whole: Path) -> None:
    out = workplace.call("replay", "a", "--from", "2", "--to", "3", "--root", str(whole.parent))
    assert "from checkpoint 2" in out
    assert "every weight equals the export after iteration 3, bit for bit" in out
    refused = workplace.call("replay", "a", "--from", "2", "--to", "9", "--root", str(whole.parent), expect=2)
    assert "3 committed iterations" in refused


def test_sql_answers_over_the_committed_tables(workplace: Workplace, whole: Path) -> None:
    root = str(whole.parent)
    query = "select count(*) n, count(distinct b.sample_id) from batches b join samples s using (sample_id)"
    assert "96" in workplace.call("sql", "a", query, "--root", root)
    assert answer(root, "a", "select max(version) from steps").rows == [(6,)]
    for view in ("prompts", "samples", "rewards", "verdicts", "batches", "steps", "evaluations"):
        assert len(answer(root, "a", f"select * from {view} limit 1").rows) == 1
    assert "Views: " in workplace.call("sql", "a", "select * from nothing", "--root", root, expect=2)


@pytest.mark.slow
def test_a_branch_goes_on_from_a_checkpoint_under_its_own_name(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    root = str(tmp_path)
    assert "there are: 2, 3" in workplace.call("branch", "a", "b", "--at", "1", "--root", root, expect=2)
    another = "trainer.optimizer.lr=5e-4"
    refused = workplace.train(root, another, "run.iterations=4", expect=2, COLUMNS="400")
    (offered,) = re.findall(r"`millrace (.*?)`", refused)
    assert offered == f"branch a NEW --at 3 --root {root}"
    workplace.call(*offered.replace("NEW", "b").replace("--at 3", "--at 2").split())
    assert "exists already" in workplace.call("branch", "a", "b", "--at", "2", "--root", root, expect=2)
    out = workplace.train(root, "run.name=b", another)
    assert "3 iterations complete, 1 of them now" in out
    assert trained(tmp_path / "b")[:64] == trained(whole)[:64]
    assert trained(tmp_path / "b")[64:] != trained(whole)[64:]
    ours, parents = numbers(tmp_path / "b"), numbers(whole)
    for name in ("prompt_id", "seed", "tokens"):  # equal weights drew them, under any name
        assert ours[name] == parents[name], name
    assert final_weights(tmp_path / "b") != final_weights(whole)
    assert json.loads((tmp_path / "b" / "run.json").read_text())["parent"]["run"] == "a"
    assert "nothing is wrong" in workplace.call("verify", "b", "--root", root)
    assert rates(tmp_path / "b") == [1e-3] * 4 + [5e-4] * 2
    workplace.call(
        "replay", "b", "--from", "0", "--to", "1", "--root", root
    )  # exits 1 if the parent's steps differ


def rates(run: Path) -> list[float]:
    """The learning rate of every step."""
    folders = sorted((run / "iterations").iterdir())
    return [
        step["lr"] for folder in folders for step in json.loads((folder / "step.json").read_text())["steps"]
    ]


def test_replayed_weights_in_bfloat16_are_compared_by_value(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        weights = {"same": torch.ones(3), "moved": torch.ones(2) + number / 4}
        save_file({name: t.bfloat16() for name, t in weights.items()}, folder / "model.safetensors")
    assert largest_differences(*folders) == {"moved": 0.25}
