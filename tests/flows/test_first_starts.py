"""Two first starts at once, in a MILLRACE_HOME where nothing was started yet: one Prefect server, one Ray head, two whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, make_workplace, output_of
from tests.support.scanner import processes_of

HELPERS = ("millrace.connectors.prefect.app", "gcs_server", "raylet/raylet")


@pytest.mark.slow
@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")], ids=["two names", "one name, two roots"])
def test_two_first_starts_at_once_complete_with_the_same_helpers(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    place = make_workplace(tmp_path)
    roots = (tmp_path / "one", tmp_path / "two")
    both = [
        place.start("train", "run.yaml", f"storage.root={root}", f"run.name={name}", "run.iterations=1")
        for name, root in zip(names, roots, strict=True)
    ]
    try:
        for start in both:
            out = output_of(start, 2 * PATIENCE_S)
            assert start.returncode == 0, out
            assert "1 iterations complete, 1 of them now" in out
        assert helpers_of(place) == dict.fromkeys(HELPERS, 1)
        for name, root in zip(names, roots, strict=True):
            assert "nothing is wrong" in place.call("verify", name, "--root", str(root))
        runs = [root / name for name, root in zip(names, roots, strict=True)]
        for name in ("id", "mlflow_run_id"):
            assert len({json.loads((run / "run.json").read_text())[name] for run in runs}) == 2
        assert final_weights(runs[0]) == final_weights(runs[1])  # neither had a rank or engine of the other
    finally:
        for start in both:
            if start.poll() is None:
                start.kill()
        place.call("server", "stop")
    assert helpers_of(place) == {}


def helpers_of(place: Workplace) -> dict[str, int]:
    """How many of each helper live."""
    lines = [" ".join(process.cmdline()) for process in processes_of(place.folder / "home")]
    found = {helper: sum(helper in line for line in lines) for helper in HELPERS}
    return {helper: count for helper, count in found.items() if count}
