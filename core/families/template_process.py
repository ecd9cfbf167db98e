"""The process that renders chat templates: one request after the other, until its input ends.

A template is a program of the model's folder. Jinja's sandbox denies it files, and `range` beyond 100,000, and nothing else:
loops in loops, macros that call themselves, 'a' * 10**10 and filters such as center take any time and memory, constants among
them already when the template is compiled. The kernel bounds both here: processor time by a timer that ends the process, memory
by a limit at which allocations fail.

Runs as a file, on the standard library and Jinja alone, so that it starts in a tenth of a second. `chat_templates` starts it.
"""

import json
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

import jinja2
import jinja2.ext
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct(">Q")
TEXT, REFUSED, SYNTAX, MEMORY, LONG = b"T", b"R", b"S", b"M", b"L"  # how an answer starts
TEMPLATES = 8  # number of compiled templates that are kept


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text, in its own scope, and renders as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers uses."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = _environment()
_compiled = lru_cache(TEMPLATES)(ENVIRONMENT.from_string)


def _answer(template: str, pickled: bytes, characters: int) -> tuple[bytes, str]:
    """The text that a template renders; without variables, the names that it reads, a line each."""
    try:
        variables: Mapping[str, Any] | None = pickle.loads(pickled)  # noqa: S301 - from the process that started this one
        if variables is None:
            _compiled(template)
            return TEXT, "\n".join(sorted(find_undeclared_variables(ENVIRONMENT.parse(template))))
        text = _compiled(template).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        return SYNTAX, f"line {error.lineno}: {error.message}"
    except MemoryError:
        return MEMORY, ""
    except Exception as error:  # noqa: BLE001 - a template's code raises anything; the caller raises it again
        return REFUSED, f"{type(error).__name__}\n{str(error)[:characters]}"
    return (TEXT, text) if len(text) <= characters else (LONG, str(len(text)))


def _serve(requests: IO[bytes], answers: IO[bytes], memory_mb: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory_mb << 20 if hard == resource.RLIM_INFINITY else min(memory_mb << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    while length := requests.read(LENGTH.size):
        # the timer counts processor time, so that a busy host refuses nothing; its signal ends the process
        try:
            request = pickle.loads(requests.read(LENGTH.unpack(length)[0]))  # noqa: S301 - the same
            template, pickled, seconds, characters = request
            signal.setitimer(signal.ITIMER_PROF, seconds)
            kind, text = _answer(template, pickled, characters)
            body = text.encode("utf-8", "surrogatepass")
        except MemoryError:
            kind, body = MEMORY, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(kind + LENGTH.pack(len(body)) + body)
        answers.flush()
        if kind == MEMORY:
            return  # part of the request may be unread


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
