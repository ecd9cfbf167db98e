"""Too large a pack: the run stops with the fields to change, and goes on with a smaller one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import flow_runs
from tests.support.flow_runs import Workplace
from tests.support.gpu_workplace import configuration, furnish, steps_of

ABSURD = 10_000_000


@pytest.mark.timeout(900)
def test_a_pack_too_large_names_the_fields_and_a_smaller_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", 420)
    sampling = {"max_new_tokens": 1024}
    rollout = {
        **configuration(tmp_path)["rollout"],
        "prompts": 64,
        "max_concurrency": 512,
        "sampling": sampling,
    }
    furnish(tmp_path, rollout=rollout, run={"name": "oom", "iterations": 1}, sync={"max_prompt_gap": None})
    place = Workplace(tmp_path)
    try:
        out = place.call("train", "run.yaml", f"trainer.max_pack_tokens={ABSURD}", expect=2)
        assert f"trainer.max_pack_tokens (now {ABSURD}: lower it)" in out, out[-5000:]
        assert "trainer.recompute (now none: selective or full)" in out
        parts = tmp_path / "runs" / "oom" / "iterations" / "000000" / "rollouts"
        generated = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
        assert generated
        place.call("train", "run.yaml", "trainer.max_pack_tokens=8192")
        assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()} == generated
        (step,) = steps_of(tmp_path / "runs" / "oom")
        assert step["version"] == 1
        assert max(step["packs"]) <= 8192
    finally:
        place.call("server", "stop")
