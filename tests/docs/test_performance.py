"""The page of figures is made from kept results, and every command on it starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import cpu_rows, gpu_rows
from benchmarks.kept import RESULTS, KeptResults
from benchmarks.page import PAGE, benchmark_modules, page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m benchmarks.page"


def test_every_kept_result_is_on_the_page() -> None:
    kept = KeptResults()
    page(kept)
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


@pytest.mark.parametrize("module", benchmark_modules())
def test_a_benchmark_starts_as_a_module_and_explains_itself(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


def test_no_benchmark_changes_the_import_path() -> None:
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert "sys.path.insert" not in path.read_text(encoding="utf-8"), path
