"""What commands share: the two consoles, the arguments that several take, and how errors end a command."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

import typer
from rich.console import Console

from millrace.connectors.storage.local import library_log
from millrace.core.errors import MillraceError, first_error

T = TypeVar("T")
STDERR = 2
RAY_THREAD = "ray_"  # how the names of Ray's threads begin

console = Console()
errors = Console(stderr=True)

ConfigArgument = Annotated[Path, typer.Argument(help="YAML file with the configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to set: key=value, dotted, as in run.name=a.")
]
RootOption = Annotated[str, typer.Option(help="Storage root that holds the runs.")]


def guarded(call: Callable[[], T]) -> T:
    """Run a command; an error that its user can fix is printed without a traceback and exits with 2."""
    try:
        return call()
    except BaseException as error:
        cause = first_error(error)
        if isinstance(cause, MillraceError):
            errors.print(f"{type(cause).__name__}: {cause}", markup=False, highlight=False, soft_wrap=True)
            sys.exit(2)
        raise


@contextlib.contextmanager
def libraries_kept_off_terminal() -> Iterator[None]:
    """Within, what native libraries and child processes write to stderr, and Ray's threads to stdout, goes to a log.

    Ray dumps its state and C++ stacks there when a part of it dies. Other lines of Python reach the terminal. A command that
    fails names the log if it got anything.
    """
    path = library_log()
    path.parent.mkdir(parents=True, exist_ok=True)
    out, err = sys.stdout, sys.stderr
    err.flush()
    terminal = os.dup(STDERR)
    with path.open("a", buffering=1) as log:
        os.dup2(log.fileno(), STDERR)
        size = os.fstat(log.fileno()).st_size
        # another stream than the terminal is a test's, or the caller's, and stays
        sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1) if err is sys.__stderr__ else err
        sys.stdout = cast(TextIO, _ForAllButRay(out, log))
        try:
            yield
        except BaseException:
            if os.fstat(log.fileno()).st_size > size:
                errors.print(f"What libraries wrote meanwhile is in {path}", markup=False, soft_wrap=True)
            raise
        finally:
            sys.stdout, sys.stderr = out, err
            os.dup2(terminal, STDERR)
            os.close(terminal)


class _ForAllButRay:
    """A stream, but for what Ray's threads write, which goes to a log: the last lines of a part that died."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        """Write where this thread's text belongs."""
        from_ray = threading.current_thread().name.startswith(RAY_THREAD)
        return (self._log if from_ray else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
