"""The pages of figures are made from kept results, and every command on it starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.figures.rows import cpu_rows, gpu_rows
from benchmarks.gpu.shapes import configuration
from benchmarks.kept import RESULTS, KeptResults
from benchmarks.page import ALL, CHOSEN, PAGE, benchmark_modules, page, whole_page
from benchmarks.whole_runs import iteration_overhead, recovery_time
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config

ROOT = Path(__file__).parents[2]


def test_the_pages_are_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m benchmarks.page"
    assert ALL.read_text(encoding="utf-8") == whole_page(), "run python -m benchmarks.page"


def test_the_page_of_the_docs_has_fifteen_rows_and_the_other_one_all() -> None:
    assert len(set(CHOSEN)) == 15
    assert page().count("\n| ") - 4 == 15
    rows = [*cpu_rows(KeptResults()), *gpu_rows(KeptResults())]
    whole = whole_page()
    assert [row.what for row in rows if f"\n| {row.what} |" not in whole] == []


def test_every_kept_result_is_on_the_page() -> None:
    kept = KeptResults()
    whole_page(kept)
    assert {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")} == kept.read


def test_every_figure_has_a_command_that_exists() -> None:
    kept = KeptResults()
    for row in [*cpu_rows(kept), *gpu_rows(kept)]:
        program, *arguments = row.command.split()
        assert any(row.figures), row.what
        if program == "python":
            assert importlib.util.find_spec(arguments[1]), row.command
        else:
            assert program == "millrace", row.command


def test_every_training_command_resolves(tmp_path: Path) -> None:
    for row in [*cpu_rows(KeptResults()), *gpu_rows(KeptResults())]:
        program, *arguments = row.command.split()
        if [program, *arguments[:1]] == ["millrace", "train"]:
            load_config(str(ROOT / arguments[1]), arguments[2:])
        if "--overrides" in arguments:
            text = yaml.safe_dump(configuration(tmp_path / "model", tmp_path))
            load_config(None, arguments[arguments.index("--overrides") + 1 :], text)


def test_the_benchmarks_configurations_are_valid(tmp_path: Path) -> None:
    iteration_overhead.prepare(tmp_path, str(tmp_path / "runs"), 3)
    load_config(str(tmp_path / "run.yaml"))
    recovery_time.prepare(tmp_path)
    load_config(str(tmp_path / "run.yaml"))
    RunConfig.model_validate(configuration(tmp_path / "model", tmp_path))


# One process for all: most of a benchmark's start is the import of what the others import too.
EXPLAIN = """
import contextlib, io, json, runpy, sys
found = {}
for module in sys.argv[1:]:
    out = io.StringIO()
    sys.argv = [module, "--help"]
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            found[module] = [end.code, out.getvalue()]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_benchmark_starts_as_a_module_and_explains_itself() -> None:
    modules = benchmark_modules()
    assert len(modules) > 20
    command = [sys.executable, "-c", EXPLAIN, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in modules if name not in found or found[name][0] != 0] == []
    assert [name for name in modules if "--out" not in found[name][1]] == []


def test_no_benchmark_changes_the_import_path() -> None:
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert "sys.path.insert" not in path.read_text(encoding="utf-8"), path
