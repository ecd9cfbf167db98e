"""millrace: LLM reinforcement-learning post-training as resumable Prefect flows.

Names for user code are imported from here: `from millrace import RewardInput`. Each is loaded at its first use, so that
`import millrace` loads neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.connectors.user_code.sandbox import SandboxLimits as SandboxLimits
    from millrace.connectors.user_code.sandbox import SandboxOutcome as SandboxOutcome
    from millrace.connectors.user_code.sandbox import SandboxProtections as SandboxProtections
    from millrace.connectors.user_code.sandbox import run_python as run_python
    from millrace.core.config import RunConfig as RunConfig
    from millrace.core.contracts.token_batch import TokenBatch as TokenBatch
    from millrace.core.errors import BudgetError as BudgetError
    from millrace.core.errors import ConfigError as ConfigError
    from millrace.core.errors import DataError as DataError
    from millrace.core.errors import EngineError as EngineError
    from millrace.core.errors import MillraceError as MillraceError
    from millrace.core.errors import StorageError as StorageError
    from millrace.core.errors import TrainerError as TrainerError
    from millrace.core.families.family import Family as Family
    from millrace.core.families.registry import family_named as family_named
    from millrace.core.families.registry import register_family as register_family
    from millrace.core.hooks.protocols import Advantage as Advantage
    from millrace.core.hooks.protocols import BufferedGroup as BufferedGroup
    from millrace.core.hooks.protocols import BufferFilter as BufferFilter
    from millrace.core.hooks.protocols import DataSource as DataSource
    from millrace.core.hooks.protocols import GroupFilter as GroupFilter
    from millrace.core.hooks.protocols import GroupSample as GroupSample
    from millrace.core.hooks.protocols import Loss as Loss
    from millrace.core.hooks.protocols import Reward as Reward
    from millrace.core.hooks.protocols import RewardInput as RewardInput
    from millrace.core.hooks.protocols import RewardResult as RewardResult
    from millrace.core.hooks.protocols import RewardShaping as RewardShaping
    from millrace.core.hooks.protocols import TeacherHint as TeacherHint
    from millrace.core.sessions.interface import Done as Done
    from millrace.core.sessions.interface import Environment as Environment
    from millrace.core.sessions.interface import LimitReachedError as LimitReachedError
    from millrace.core.sessions.interface import Observation as Observation
    from millrace.core.sessions.interface import RolloutFunction as RolloutFunction
    from millrace.core.sessions.interface import Session as Session
    from millrace.core.sessions.interface import SessionError as SessionError
    from millrace.core.sessions.interface import Task as Task
    from millrace.core.sessions.interface import ToolCall as ToolCall
    from millrace.core.sessions.interface import ToolError as ToolError
    from millrace.core.sessions.interface import Turn as Turn

# Milliseconds until Arrow returns freed memory to the host. Its default is one second, and then each stage of an iteration pays
# for new pages. Arrow's allocator reads the variable when pyarrow is imported, so it is set before all else.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")

# Ray's core silently ends a process that has lost its node if the process with this id is dead. Ray sets the variable for its
# workers. Without it Ray asks whether the parent is process 1, which is true for a background driver whose shell has ended, and
# would end it. Ray reads the variable when it is imported.
os.environ["RAY_RAYLET_PID"] = str(os.getpid())

_MODULES = {
    "millrace.connectors.user_code.sandbox": [
        "SandboxLimits",
        "SandboxOutcome",
        "SandboxProtections",
        "run_python",
    ],
    "millrace.core.config": ["RunConfig"],
    "millrace.core.families.family": ["Family"],
    "millrace.core.families.registry": ["family_named", "register_family"],
    "millrace.core.hooks.protocols": [
        "Advantage",
        "BufferFilter",
        "BufferedGroup",
        "DataSource",
        "GroupFilter",
        "GroupSample",
        "Loss",
        "Reward",
        "RewardInput",
        "RewardResult",
        "RewardShaping",
        "TeacherHint",
    ],
    "millrace.core.sessions.interface": [
        "Done",
        "Environment",
        "LimitReachedError",
        "Observation",
        "RolloutFunction",
        "Session",
        "SessionError",
        "Task",
        "ToolCall",
        "ToolError",
        "Turn",
    ],
    "millrace.core.contracts.token_batch": ["TokenBatch"],
    "millrace.core.errors": [
        "BudgetError",
        "ConfigError",
        "DataError",
        "EngineError",
        "MillraceError",
        "StorageError",
        "TrainerError",
    ],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
