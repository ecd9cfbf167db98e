"""One Prefect server, one Ray head and one random model for all flow tests; runs are started by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from flow_runs import Workplace, configuration


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    from connectors.huggingface.tiny import build_tiny_model

    place = Workplace(tmp_path_factory.mktemp("workplace"))
    build_tiny_model(place.folder / "model", seed=0)
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(10) for b in range(10)]
    (place.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place.folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    (place.folder / "run.yaml").write_text(yaml.safe_dump(configuration()))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


@pytest.fixture(scope="session")
def whole(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `a`, never interrupted."""
    root = tmp_path_factory.mktemp("whole")
    out = workplace.train(root)
    assert "3 iterations complete, 3 of them now" in out
    return root / "a"
