"""Rollouts of several turns, with your functions, environments and tools."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction, listed


class Tool(UserFunction):
    """A function that the policy may call, described to it by its type hints and docstring."""

    name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_-]*$",
        description="The name that the model sees; empty: the function's name.",
    )


class NamedRollout(UserFunction):
    """A function that makes the rollouts of the rows that name it."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]+$", description="The name that rows have in `metadata.rollout`."
    )


class McpServer(Section):
    """A server of the Model Context Protocol, started by a command or running at a URL."""

    command: list[str] = Field(
        [], description="Program and arguments; started once in each process of rollouts. Empty: see url."
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Address of a running server (streamable HTTP). null: see command.",
    )
    env: dict[str, str] = Field(
        {},
        description="Environment variables of the command; a secret as a reference: ${env:NAME} or ${prefect:BLOCK}.",
    )
    headers: dict[str, str] = Field(
        {},
        description="Headers of each request to the URL; a secret as a reference: ${env:NAME} or ${prefect:BLOCK}.",
    )
    only: list[str] = Field([], description="Names of the tools that the policy may call; empty: all.")

    @model_validator(mode="after")
    def _started_or_running(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        if self.url and self.env:
            raise ValueError("env is for a command: a server at a URL has its own environment")
        if self.command and self.headers:
            raise ValueError("headers are for a url: a command gets env")
        return self


class McpTools(Section):
    """The tools of an MCP server, under the names and descriptions that it gives them."""

    mcp: McpServer = Field(description="The server.")

    @property
    def name(self) -> str:
        """None: each tool has the name that the server gives it."""
        return ""


def _kind_of_tool(value: Any) -> str:
    mcp = isinstance(value, McpTools) or (isinstance(value, Mapping) and "mcp" in value)
    return "mcp" if mcp else "function"


AnyTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[McpTools, Tag("mcp")], Discriminator(_kind_of_tool)
]
"""What the policy may call: a function, or with `mcp` the tools of a server."""


class SessionSection(Section):
    """How one rollout continues: by a function, in an environment, or by calls of tools alone."""

    function: UserFunction | None = Field(None, description="Makes a rollout (millrace.RolloutFunction).")
    named: Annotated[list[NamedRollout], BeforeValidator(listed)] = Field(
        [],
        description="Functions that rows name: a row whose `metadata.rollout` is a name here is made by that function, instead of `function`, `environment` or `tools`.",
    )
    environment: UserFunction | None = Field(
        None, description="Makes an environment for each rollout (millrace.Environment)."
    )
    tools: list[AnyTool] = Field(
        [], description="Functions that the policy may call, and servers of the Model Context Protocol."
    )
    max_turns: int = Field(16, ge=1, description="Turns of one branch.")
    max_tokens: int = Field(
        2048,
        ge=1,
        description="Longest dialogue after the prompt: turns and the observations between them. Tokens.",
    )
    history: Literal["exact", "append"] = Field(
        "exact",
        description="exact: refuse a chat template that rewrites earlier turns. append: keep generated tokens even then.",
    )
    workers: Annotated[int, ANY_START] = Field(
        1,
        ge=1,
        description="Processes that run rollouts, many side by side in each; each can be killed on its own.",
    )
    timeout_s: Annotated[float, ANY_START] = Field(
        60,
        gt=0,
        description="Longest time for a tool, a step of an environment, or the function between two turns. Seconds.",
    )
    rollout_timeout_s: Annotated[float, ANY_START] = Field(
        3600, gt=0, description="Longest time for one rollout. Seconds."
    )
    memory_mb: Annotated[int, ANY_START] = Field(
        4096, ge=64, description="Memory that one process of rollouts may have. MiB."
    )
    max_processes: Annotated[int, ANY_START] = Field(
        64,
        ge=1,
        description="Processes that one process of rollouts may start; beyond it is ended. On Linux.",
    )
    max_rollouts: Annotated[int, ANY_START] = Field(512, ge=1, description="Rollouts that run at once.")
    max_calls: Annotated[int, ANY_START] = Field(
        256, ge=1, description="Calls of tools and steps of environments that run at once."
    )
