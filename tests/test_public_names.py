"""What user code imports from `millrace` is a promise: a change shows here, as a difference."""

from __future__ import annotations

import subprocess
import sys

import millrace

NAMES = [
    "Advantage",
    "BudgetError",
    "BufferFilter",
    "BufferedGroup",
    "ConfigError",
    "DataError",
    "DataSource",
    "Done",
    "EngineError",
    "Environment",
    "Family",
    "GroupFilter",
    "GroupSample",
    "LimitReachedError",
    "Loss",
    "MillraceError",
    "Observation",
    "Reward",
    "RewardInput",
    "RewardResult",
    "RewardShaping",
    "RolloutFunction",
    "RunConfig",
    "SandboxLimits",
    "SandboxOutcome",
    "SandboxProtections",
    "Session",
    "SessionError",
    "StorageError",
    "Task",
    "TeacherHint",
    "TokenBatch",
    "ToolCall",
    "ToolError",
    "TrainerError",
    "Turn",
    "family_named",
    "register_family",
    "run_python",
]


def test_public_names_are_frozen() -> None:
    assert sorted(millrace.__all__) == NAMES


def test_every_public_name_is_there_and_listed() -> None:
    for name in NAMES:
        assert getattr(millrace, name).__name__ == name
    assert set(NAMES) <= set(dir(millrace))


def test_importing_millrace_or_the_names_of_a_reward_loads_no_heavy_library() -> None:
    code = (
        "import sys, millrace; from millrace import RewardInput, RewardResult, GroupSample, ConfigError;"
        "heavy = {'torch', 'pydantic', 'prefect', 'ray', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_type_checker_sees_every_public_name() -> None:
    import ast
    from pathlib import Path

    assert millrace.__file__ is not None
    tree = ast.parse(Path(millrace.__file__).read_text())
    imported = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(NAMES) <= imported
