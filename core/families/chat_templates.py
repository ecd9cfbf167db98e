"""Renders chat templates in a process with limits of time and memory, and bounds the text that comes back.

Owns that process: each process that renders has one, started by its first text. It runs `template_process`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import IO, Any

from millrace.core.errors import MillraceError
from millrace.core.families import template_process
from millrace.core.families.template_process import LENGTH, LONG, MEMORY, REFUSED, SYNTAX
from millrace.core.plain_text import json_text

ANSWER_S = 120.0  # a process that is not stopped answers in this time, on a busy host too
END_S = 10.0  # a process without input ends in this time; then it is killed
STARTS = 2  # starts of a process for one text, since something else may have killed it


class TemplateRefusedError(ValueError):
    """The template raised an error, or is no template: the kind of error, and its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.kind else self.message


class TemplateLimitError(ValueError):
    """The template exceeds a limit, when it is rendered or compiled."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits for one text."""

    seconds: float = 5.0  # seconds of processor time; a text takes some 0.0001
    memory_mb: int = 512
    characters: int = 1 << 20  # characters of the text, beyond its messages' characters
    times: int = 4  # the messages' bytes: as JSON in JSON a text is longer than it was


class TemplateRenderer:
    """A process that renders one text after the other. Any thread may ask."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._started: _Started | None = None
        atexit.register(self.close)

    @property
    def process(self) -> int | None:
        """Its id, if it is started."""
        return self._started.process.pid if self._started else None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that a template renders. Errors: TemplateRefusedError, TemplateLimitError."""
        return self._asked(template, dict(variables))

    def variables(self, template: str) -> set[str]:
        """Names that a template reads and does not set itself. Errors: as of `render`."""
        return set(self._asked(template, None).split("\n")) - {""}

    def close(self) -> None:
        """End the process. The next text starts another."""
        with self._lock:
            started, self._started = self._started, None
            if started is not None:
                started.end()
        atexit.unregister(self.close)

    def _asked(self, template: str, variables: dict[str, Any] | None) -> str:
        limits = self.limits
        try:
            pickled = pickle.dumps(variables)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise TemplateRefusedError(type(error).__name__, f"messages or variables: {error}") from error
        size = len(pickled) + len(template)
        most = limits.characters + limits.times * size
        request = pickle.dumps((template, pickled, limits.seconds, most))
        with self._lock:
            kind, text = self._exchanged(LENGTH.pack(len(request)) + request)
        if kind == SYNTAX:
            raise TemplateRefusedError("", text)
        if kind == REFUSED:
            raise TemplateRefusedError(*text.split("\n", 1))
        if kind == MEMORY:
            raise TemplateLimitError(f"it takes more than {limits.memory_mb} MiB of memory")
        if kind == LONG:
            raise TemplateLimitError(
                f"it writes {text} characters, of messages with {size}: more than {most}"
            )
        return text

    def _exchanged(self, request: bytes) -> tuple[bytes, str]:
        how = ""
        for _ in range(STARTS):
            started = self._started = self._started or _Started.start(self.limits.memory_mb)
            answer = started.exchange(request)
            if answer is None or answer[0] == MEMORY:
                self._started = None
                code = started.end()
                if code == -signal.SIGPROF:
                    raise TemplateLimitError(
                        f"it takes more than {self.limits.seconds:g} s of processor time"
                    )
                how = f"exit code {code}"
            if answer is not None:
                return answer
        raise TemplateLimitError(f"the process that renders it ended, {STARTS} times: {how}")


@dataclass(frozen=True)
class _Started:
    """A process, and the socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    answers: IO[bytes]

    @classmethod
    def start(cls, memory_mb: int) -> _Started:
        script = template_process.__file__
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", script, str(memory_mb)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    # Ctrl-C is for the parent process
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise MillraceError(
                    f"no process that renders chat templates can be started: {error}",
                    where=script,
                    remedy="free memory or processes on this host",
                ) from error
        ours.settimeout(ANSWER_S)
        return cls(process, ours, ours.makefile("rb"))

    def exchange(self, request: bytes) -> tuple[bytes, str] | None:
        """The answer to a request; None from a process that has ended or does not answer."""
        # the process may answer that it has no memory before it has read all
        with contextlib.suppress(ConnectionError):
            try:
                self.socket.sendall(request)
            except TimeoutError:
                return None
        try:
            head = self.answers.read(1 + LENGTH.size)
            if len(head) <= LENGTH.size:
                return None
            (length,) = LENGTH.unpack(head[1:])
            body = self.answers.read(length)
        except (ConnectionError, TimeoutError):
            return None
        return (head[:1], body.decode("utf-8", "surrogatepass")) if len(body) == length else None

    def end(self) -> int:
        """End the process, by a kill if it does not end in time; returns its exit code."""
        self.answers.close()
        self.socket.close()
        try:
            return self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout=END_S)


def renderer() -> TemplateRenderer:
    """The renderer of this process: a fork has its own."""
    return _renderer_of(os.getpid())


@cache
def _renderer_of(process: int) -> TemplateRenderer:
    return TemplateRenderer()


def with_arguments_for(template: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with arguments of calls as the template takes them: objects, or JSON text if it refuses objects."""
    if not any(message.get("tool_calls") for message in messages) or _takes_objects(template):
        return list(messages)
    return [_with_texts(message) if message.get("tool_calls") else message for message in messages]


@lru_cache(maxsize=64)
def _takes_objects(template: str) -> bool:
    """Whether a template writes calls whose arguments are objects; true as well if it writes none in either form."""
    function = {"name": "tool", "arguments": {"a": "b"}}
    call = {"type": "function", "id": "call00000", "function": function}
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = {"role": "user", "content": "question"}

    def takes(said: Mapping[str, Any]) -> bool:
        variables = {"messages": [asked, said], "tools": None, "add_generation_prompt": False}
        try:
            renderer().render(template, variables)
        except TemplateRefusedError:
            return False
        return True

    return takes(turn) or not takes(_with_texts(turn))


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json_text(arguments)


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    for_answer: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that apply_chat_template of transformers would render from these messages.

    Errors: TemplateRefusedError, TemplateLimitError.
    """
    shown = list(tools) or None
    template = tokenizer.get_chat_template(tools=shown)
    variables = {
        "messages": with_arguments_for(template, messages),
        "tools": shown,
        "documents": None,
        "add_generation_prompt": for_answer,
        **tokenizer.special_tokens_map,
        **(template_kwargs or {}),
    }
    return renderer().render(template, variables)
