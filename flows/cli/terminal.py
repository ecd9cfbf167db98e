"""What commands share: the two consoles, the arguments that several take, and how errors end a command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from millrace.core.errors import MillraceError, first_error

T = TypeVar("T")

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
