"""The driver's half of a session, as tests write it: answers from a list of texts, and remembers what was asked."""

from __future__ import annotations

from typing import Any


class Driver:
    """Answers as the driver does; its last text is repeated."""

    def __init__(self, texts: list[str] | None = None) -> None:
        self.texts = texts or ["one", "two", "three"]
        self.asked: list[dict[str, Any]] = []

    async def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request."""
        self.asked.append(request)
        if request["do"] != "generate":
            return {"event": len(self.asked)}
        turns = sum(each["do"] == "generate" for each in self.asked)
        text = self.texts[min(turns, len(self.texts)) - 1]
        return {
            "text": text,
            "content": text,
            "output_ids": [len(text)],
            "status": "completed",
            "thinking": "",
            "tool_calls": [],
            "problem": None,
        }

    @property
    def shown(self) -> list[list[Any]]:
        """What was new in each prompt."""
        return [request["new"] for request in self.asked if request["do"] == "generate"]


def start(**task: Any) -> dict[str, Any]:
    """What a session begins with."""
    task = {"prompt": "1+1=", **task}
    prompt = task["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"task": task, "messages": messages, "seed": 7, "sampling": {}}
