"""A harness for verifiers' environments: a plain dialogue in this process.

verifiers imports it under the name NAME. Needs the package verifiers.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

NAME = "millrace_chat"
__all__ = ["MillraceChat"]


class MillraceChatConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No settings."""

    id: str = NAME


class MillraceChat(vf.Harness[MillraceChatConfig]):  # type: ignore[misc]
    """One answer to the prompt, and one to each further message of the environment."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> Any:
        """Ask for one answer to all messages; verifiers keeps it."""
        body = {"model": ctx.model, "messages": opening(self, data)}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as client,
            client.post(f"{endpoint.rstrip('/')}/chat/completions", json=body, timeout=None) as answer,
        ):
            failed = "" if answer.ok else await answer.text()
        return vf.ProgramResult(exit_code=1 if failed else 0, stdout="", stderr=failed)


def opening(harness: Any, data: Any) -> list[dict[str, Any]]:
    """The messages that a task starts with."""
    system, prompt = harness.resolve_prompt(data)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *map(message_to_wire, prompt or ())]
