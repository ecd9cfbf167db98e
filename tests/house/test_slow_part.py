"""A commit's part of the slow tests: all of them, in an order of its own, and none after the time is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SHARED, shared_servers
from tests.slow_part import LONGEST_S, UNTIL, belongs, ordered
from tests.slow_seconds import SECONDS, seconds_of

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/{file}.py::test_{number}" for file in "abcdef" for number in range(4)]


@given(st.text("0123456789abcdef", min_size=40, max_size=40))
def test_every_test_is_in_the_order_of_every_commit_and_files_stay_together(commit: str) -> None:
    order = ordered(commit, TESTS)
    assert sorted(order) == sorted(TESTS)
    assert len([1 for one, two in zip(order, order[1:], strict=False) if one[:8] != two[:8]]) == 5


def test_commits_start_with_different_tests() -> None:
    firsts = {ordered(str(commit), TESTS)[0] for commit in range(200)}
    assert firsts == {*TESTS}


def test_a_sequence_starts_at_its_first_test() -> None:
    whole = {"tests/a.py", "tests/b.py"}
    for commit in range(20):
        order = ordered(str(commit), TESTS, whole)
        assert sorted(order) == sorted(TESTS)
        for file in whole:
            assert [name for name in order if name.startswith(file)] == [
                name for name in TESTS if name.startswith(file)
            ]


def part_of(folder: Path, file: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A part of twenty minutes of the tests in a folder, or in one of its files."""
    plugins = ["-p", "tests.slow_part", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]
    options = ["--part-of", "abc", "--part-seconds", "1200", str(folder / file)]
    command = [sys.executable, "-m", "pytest", *plugins, *options]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_no_test_starts_after_the_time_and_one_that_fails_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(
        "import os\nfrom tests.slow_part import UNTIL\n\n"
        "def end_the_time():\n    os.environ[UNTIL] = '0'\n\ntest_a = test_b = lambda: end_the_time()\n"
    )
    (tmp_path / "test_wrong.py").write_text("def test_c():\n    assert False\n")
    (tmp_path / "test_long.py").write_text(
        "import pytest\n\n@pytest.mark.timeout(7200)\ndef test_d():\n    assert False\n\ndef test_e():\n    pass\n"
    )

    late, wrong = part_of(tmp_path, "test_late.py"), part_of(tmp_path, "test_wrong.py")
    assert (late.returncode, "1 passed, 1 skipped" in late.stdout) == (0, True), late.stdout
    assert wrong.returncode == 1, wrong.stdout
    long = part_of(tmp_path, "test_long.py")
    assert (long.returncode, "1 passed" in long.stdout) == (0, True), long.stdout


def test_a_test_starts_only_where_it_ends_in_time_and_the_longest_are_in_no_part(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_late.py").write_text("def test_a():\n    pass\n\ndef test_b():\n    pass\n")
    for left_s, outcome in (
        (seconds_of("tests/test_late.py::test_a") - 1, "1 passed, 1 skipped"),
        (1200, "2 passed"),
    ):
        done = part_of(tmp_path, **{UNTIL: str(time.time() + left_s)})
        assert outcome in done.stdout, done.stdout
    long = (
        "tests/flows/test_late_storage.py::test_a_run_on_late_storage_trains_what_one_on_a_disk_does[hidden]"
    )
    assert seconds_of(long) > LONGEST_S
    assert not belongs(long)


def test_every_row_of_seconds_is_of_tests_that_exist() -> None:
    for row in SECONDS:
        file, _, name = row.partition("::")
        assert (ROOT / file).exists(), row
        assert f"def {name}" in (ROOT / file).read_text() if name else True, row


def test_files_that_use_a_folders_servers_share_a_process_and_others_do_not() -> None:
    """In the default suite: a commit's part keeps the order of its files."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" not in path.parts]
    shared = {folder: {path.name for path in files if shared_servers(path) == folder} for folder in SHARED}
    assert {"test_kills.py", "test_tampering.py", "test_training_run.py"} <= shared["flows"]
    assert {"test_actors.py", "test_left_cluster.py", "test_task_processes.py"} <= shared["ray"]
    assert {"test_fleet.py", "test_router.py", "test_flushing.py"} <= shared["sglang"]
    forked = {"test_layouts.py", "test_buckets.py", "test_curves.py", "test_rank_contract.py"}
    assert forked <= shared["megatron"]
    assert (len(shared["engine_contract"]), len(shared["sglang_protocol"])) == (4, 3)
    names = set().union(*shared.values())
    assert not names & {
        "test_check.py",
        "test_installed_project.py",
        "test_agent_examples.py",
        "test_patches.py",
    }
