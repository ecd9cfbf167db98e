"""The `rollout` section: how many samples, how they are sampled, and rollouts of several turns."""

from millrace.core.config.rollout.section import Rollout, Sampling
from millrace.core.config.rollout.session import AnyTool, McpServer, McpTools, Session, Tool

__all__ = ["AnyTool", "McpServer", "McpTools", "Rollout", "Sampling", "Session", "Tool"]
