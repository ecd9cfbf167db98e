"""The example of a served teacher is run: two short iterations of random models, and, slow, as its page says to its numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.run_folder import RunFolder
from millrace.flows.quickstart import held_out_accuracy
from tests.examples.test_examples import SHORT, rows, workplace
from tests.examples.test_pages import ROOT
from tests.support.engine_process import CLOSE, embedded_engine, reference_logprobs
from tests.support.flow_runs import Workplace

__all__ = ["workplace"]
EXAMPLE = ROOT / "examples" / "distillation_served"
PROMISE = re.compile(r"in (\d+) iterations the held-out reward rises from ([\d.]+) to ([\d.]+)")
NOISE = 0.08  # of a held-out reward, over machines


@pytest.mark.slow
def test_the_student_is_trained_on_what_the_server_answered(workplace: Workplace, tmp_path: Path) -> None:
    teacher = build_tiny_model(tmp_path / "teacher", seed=1)
    with embedded_engine(teacher, "--dtype", "float32", log=tmp_path / "engine.log") as (url, _):
        address = f"algorithm.teacher_server.url={url}"
        workplace.call("train", str(EXAMPLE / "student.yaml"), f"storage.root={tmp_path}", *SHORT, address)
    found = sorted((tmp_path / "student" / "iterations").iterdir())
    assert len(found) == 2
    for iteration in found:
        for row in rows(iteration)[::8]:
            size = row["response_length"]
            expected = reference_logprobs(teacher, row["tokens"][:-size], row["tokens"][-size:])
            assert row["teacher_logprobs"] == pytest.approx(expected, abs=CLOSE)
        for step in json.loads((iteration / "step.json").read_text())["steps"]:
            assert step["teacher_kl"] != 0
            assert step["advantage_mean"] == pytest.approx(-step["teacher_kl"])


@pytest.mark.slow
def test_the_student_learns_what_the_page_says(workplace: Workplace) -> None:
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, workplace.folder)
    recipes = ROOT / "deployments" / "recipes"
    config = workplace.folder / "student.yaml"
    config.write_text(config.read_text().replace("../../deployments/recipes", str(recipes)))
    subprocess.run(
        [sys.executable, "make_teacher.py"], cwd=workplace.folder, env=workplace.environment, check=True
    )
    teacher = workplace.folder / "distillation-files" / "seed-0" / "teacher"
    root = workplace.folder / "learning"
    with embedded_engine(teacher, "--dtype", "float32", log=workplace.folder / "engine.log") as (url, _):
        address = f"algorithm.teacher_server.url={url}"
        process = workplace.start("train", str(config), f"storage.root={root}", address)
        out, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, out
    promised = PROMISE.search((EXAMPLE / "README.md").read_text())
    assert promised
    points = held_out_accuracy(RunFolder(str(root), "student"))
    count = int(promised[1])
    assert points[0] == pytest.approx(float(promised[2]), abs=NOISE)
    assert points[count] == pytest.approx(float(promised[3]), abs=NOISE)
    assert points[count] > points[0] + 0.03
