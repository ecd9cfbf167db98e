"""What commands share: the two consoles, the arguments that several take, and how errors end a command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from millrace.connectors.storage.local import library_log
from millrace.core.errors import MillraceError, first_error

T = TypeVar("T")
STDERR = 2

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
    """Within, what native libraries and child processes write to stderr goes to a log; Python's own lines reach the terminal.

    Ray dumps its state and C++ stacks there when a part of it dies. A command that fails names the log if it holds anything.
    """
    path = library_log()
    path.parent.mkdir(parents=True, exist_ok=True)
    before = sys.stderr
    before.flush()
    terminal = os.dup(STDERR)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, STDERR)
    size = os.fstat(file).st_size
    # another stream than the terminal is a test's, or the caller's, and stays
    sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1) if before is sys.__stderr__ else before
    try:
        yield
    except BaseException:
        if os.fstat(file).st_size > size:
            errors.print(f"What libraries wrote meanwhile is in {path}", markup=False, soft_wrap=True)
        raise
    finally:
        sys.stderr = before
        os.dup2(terminal, STDERR)
        os.close(terminal)
        os.close(file)
