"""The driver's half of a session, as tests write it: answers from a list of texts, and remembers what was asked."""

from __future__ import annotations

from typing import Any

from millrace.core.sessions.interface import Task, Turn
from millrace.core.sessions.pipe import Called, CallTool, Generate, MakeCall, Noted, Reply, Request, Start


class Driver:
    """Answers as the driver does; its last text is repeated."""

    def __init__(self, texts: list[str] | None = None) -> None:
        self.texts = texts or ["one", "two", "three"]
        self.asked: list[Request] = []

    async def handle(self, request: Request) -> Reply:
        """Answer a request."""
        self.asked.append(request)
        match request:
            case Generate():
                text = self.texts[min(len(self.shown), len(self.texts)) - 1]
                return Turn(text, text, [len(text)], "completed")
            case CallTool():
                return MakeCall(len(self.asked))
        return Noted()

    @property
    def shown(self) -> list[list[Any]]:
        """What was new in each prompt."""
        return [request.new for request in self.asked if isinstance(request, Generate)]

    @property
    def answers(self) -> list[str]:
        """What each call was answered."""
        return [request.answer for request in self.asked if isinstance(request, Called)]


def start(**task: Any) -> Start:
    """What a session begins with."""
    task = {"prompt": "1+1=", **task}
    prompt = task["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Start(Task(**task), messages, seed=7, sampling={})
