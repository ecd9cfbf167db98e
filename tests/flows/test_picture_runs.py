"""Whole runs whose prompts have pictures: killed, started again, replayed, with the same samples and weights as an undisturbed one."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny_vision import KINDS
from millrace.core.contracts.images import image_names
from tests.support import seen_rows
from tests.support.flow_runs import Workplace, exported, generated, trained, undisturbed

GAP = 1e-5  # nats a token, of float32
# engines read the tower from files, or get it with the other weights
SYNC = {"qwen2_5_vl": "broadcast", "qwen3_vl": "disk", "qwen3_vl_moe": "broadcast"}


@pytest.fixture(params=KINDS)
def here(workplace: Workplace, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Arguments of a run with pictures, in the workplace."""
    (workplace.folder / seen_rows.NAME).write_text(seen_rows.MODULE)
    given = seen_rows.SETTINGS | {
        "run.prepare": {"function": "seen_rows:prepare", "options": {"kind": request.param}},
        "sync.kind": SYNC[request.param],
        "sync.max_logprob_gap": GAP,
        "sync.max_prompt_gap": GAP,
    }
    yield [f"{field}={json.dumps(value)}" for field, value in given.items()]
    shutil.rmtree(workplace.folder / seen_rows.MODEL)
    (workplace.folder / seen_rows.FILE).unlink()


@pytest.mark.slow
def test_a_run_with_pictures_goes_on_after_a_kill(
    workplace: Workplace, here: list[str], tmp_path: Path
) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    undisturbed(workplace, plain, here, workplace.folder / seen_rows.MODEL, GAP)

    second = killed / "a/iterations/000001/prompts.parquet"
    workplace.train_and_kill(killed, second.exists, *here)
    assert "3 iterations complete" in workplace.train(killed, *here)
    assert trained(killed / "a") == trained(plain / "a")
    assert exported(killed / "a", 3) == exported(plain / "a", 3)
    assert set(generated(killed / "a").values()) == {1}
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(killed))
    workplace.call("ledger", "a", "--root", str(killed))

    verdicts = [pq.read_table(path).to_pylist() for path in killed.glob("a/iterations/*/verdicts.parquet")]
    unusable = {row["reason"] for rows in verdicts for row in rows if "unusable" in (row["reason"] or "")}
    assert unusable
    assert all("missing image: number 0: " in reason for reason in unusable)
    batch = pq.read_table(killed / "a/iterations/000001/batch.parquet").to_pylist()
    names = {name for row in batch for name in image_names(json.loads(row["prompt"]))}
    assert len(names) > 2
    stored = {path.stem: path.read_bytes() for path in killed.glob("a/images/*/*.png")}
    page = tmp_path / "seen.html"
    workplace.call("view", "a", "--root", str(killed), "--at", "2", "--export", str(page))
    shown = page.read_text()
    assert all(base64.b64encode(stored[name]).decode() in shown for name in names)
