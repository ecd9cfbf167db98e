"""Shared parts of commands: the two consoles, common arguments, and how errors end a command."""

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

import typer

from millrace.connectors.host.local_files import library_log
from millrace.core.errors import MillraceError, StorageError, first_error
from millrace.core.plain_text import PlainConsole, write_line

T = TypeVar("T")
STDERR = 2
# the format of Prefect's console
LINE = "%(asctime)s.%(msecs)03d | %(levelname)-7s | %(name)s - %(message)s"
RAY_THREAD = "ray_"  # prefix of the names of Ray's threads

console = PlainConsole()
errors = PlainConsole(stderr=True)

ConfigArgument = Annotated[Path, typer.Argument(help="YAML file with the configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to set: key=value, dotted, as in run.name=a.")
]
RootOption = Annotated[str, typer.Option(help="Storage root that holds the runs.")]


def guarded(call: Callable[[], T]) -> T:
    """Run a command. An error that the user can fix is printed without a traceback and exits with 2."""
    try:
        return call()
    except BaseException as error:
        cause = first_error(error)
        if isinstance(cause, MillraceError):
            errors.print(f"{type(cause).__name__}: {cause}", soft_wrap=True)
            sys.exit(2)
        raise


def print_lines(lines: Iterable[str]) -> None:
    """Print lines unchanged and unwrapped, so that paths and commands in them can be pasted."""
    for line in lines:
        console.print(line, soft_wrap=True)


class CommandLine(typer.Typer):
    """Typer with printable tracebacks: an error's message may hold any characters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 - this process ends with it
            errors.print(traceback.format_exc(), soft_wrap=True)
            sys.exit(1)


class Terminal:
    """The terminal of a command that starts live parts, and the log of output that is kept off it."""

    def __init__(self, stream: TextIO, path: Path, log: TextIO) -> None:
        self._stream = stream
        self._path = path
        self._log = log
        self._silent_since: int | None = None  # the log's size in bytes at `silence`

    def silence(self) -> None:
        """From now on Python's output goes to the log too, including the lines of every logger."""
        self._silent_since = self._size()

    def say(self, line: str) -> None:
        """Print a line, silent or not."""
        write_line(line, self._stream)

    def log(self) -> Path | None:
        """The log, if anything was written to it since `silence`."""
        return self._path if self._silent_since is not None and self._size() > self._silent_since else None

    def keeps(self) -> bool:
        """Whether text that is written now goes to the log: all text after `silence`, and text of Ray's threads."""
        return self._silent_since is not None or threading.current_thread().name.startswith(RAY_THREAD)

    def _size(self) -> int:
        return os.fstat(self._log.fileno()).st_size


def named_first(run: str, own_file: bool = True) -> Callable[[list[str]], None]:
    """Prints to stderr what this command imports, starts and joins by a run's stored configuration. Nothing without a run.

    own_file: whether the command takes --config.
    """

    def say(lines: list[str]) -> None:
        if run and lines:
            instead = " (--config FILE takes yours in its place)" if own_file else ""
            errors.print(f"the stored configuration of {run}{instead}:", soft_wrap=True)
            for line in lines:
                errors.print(f"  {line}", soft_wrap=True, markup=False)

    return say


@contextlib.contextmanager
def libraries_kept_off_terminal() -> Iterator[Terminal]:
    """Within the block, stderr of native libraries and child processes, and output of Ray's threads, goes to a log.

    Ray dumps its state and C++ stacks to stderr when a part of it dies. Other lines of Python reach the terminal. A command
    that fails names the log unless it is empty.
    """
    path = guarded(_log)
    out, err = sys.stdout, sys.stderr
    err.flush()
    kept = os.dup(STDERR)
    with path.open("a", buffering=1) as log:
        os.dup2(log.fileno(), STDERR)
        size = os.fstat(log.fileno()).st_size
        # a stream other than the terminal belongs to a test or the caller, and stays
        stream = os.fdopen(os.dup(kept), "w", buffering=1) if err is sys.__stderr__ else err
        terminal = Terminal(stream, path, log)
        sys.stderr = cast(TextIO, _Kept(stream, log, terminal))
        sys.stdout = cast(TextIO, _Kept(out, log, terminal))
        try:
            yield terminal
        except BaseException:
            if os.fstat(log.fileno()).st_size > size:
                errors.print(f"What libraries wrote meanwhile is in {path}", soft_wrap=True)
            raise
        finally:
            sys.stdout, sys.stderr = out, err
            os.dup2(kept, STDERR)
            os.close(kept)


@contextlib.contextmanager
def lines_before_prefect() -> Iterator[None]:
    """Within the block, millrace's log lines reach the terminal: by this handler until Prefect is imported, then by Prefect."""
    logger, handler = logging.getLogger("millrace"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LINE, datefmt="%H:%M:%S"))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _log() -> Path:
    """The log's path. Raises StorageError naming MILLRACE_HOME if it cannot be written there."""
    try:
        path = library_log()
        path.touch()
    except OSError as error:
        raise StorageError(
            f"no folder that can be written: {error.strerror or error}",
            where=f"MILLRACE_HOME = {os.environ.get('MILLRACE_HOME', '~/.millrace')}",
            remedy="export MILLRACE_HOME=FOLDER with a folder that you can write",
        ) from error
    return path


class _Kept:
    """A stream of Python's, without the text that the terminal keeps off it."""

    def __init__(self, stream: TextIO, log: TextIO, terminal: Terminal) -> None:
        self._stream = stream
        self._log = log
        self._terminal = terminal

    def write(self, text: str) -> int:
        """Write to the stream or the log, depending on the thread."""
        return (self._log if self._terminal.keeps() else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
