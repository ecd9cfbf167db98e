"""The `rollout` section: how many samples, how they are sampled, rollouts of several turns, and reuse."""

from millrace.core.config.rollout.section import Buffer, Rollout, Sampling
from millrace.core.config.rollout.session import (
    AnyTool,
    McpServer,
    McpTools,
    NamedRollout,
    SessionSection,
    Tool,
)

__all__ = [
    "AnyTool",
    "Buffer",
    "McpServer",
    "McpTools",
    "NamedRollout",
    "Rollout",
    "Sampling",
    "SessionSection",
    "Tool",
]
