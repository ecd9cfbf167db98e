"""How errors of flow and task runs are logged: each once, and without a traceback if it is one for people to read.

Prefect logs an error with its traceback where a task run fails, again where the flow run of the iteration does, and again where
that of the training does; and then each of their states. Its server keeps the states: the log tells the rest.
"""

from __future__ import annotations

import logging

from prefect.logging.handlers import PrefectConsoleHandler

from millrace.connectors.storage.local import home, is_full
from millrace.core.errors import MillraceError, first_error

TASK_RUNS, FLOW_RUNS = "prefect.task_runs", "prefect.flow_runs"
ENGINE = "prefect.engine"  # of a flow run that a worker started
STATES = ("Finished in state ", "Crash detected! Execution was cancelled")
LOGGED_BY = "_millrace_logged_by"  # attribute of an error: the flow runs whose log has it
AGAIN = "_millrace_again"  # attribute of a record: whether another run's log has its error


class _ErrorsOnce(logging.Filter):
    """Passes an error of a flow run once for each flow run. Those of millrace wait for the flow run, and lose their traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and record.getMessage().startswith(STATES):
            return False
        error = _error_of(record)
        if error is None:
            return True
        if isinstance(error, MillraceError):
            if record.name == TASK_RUNS:  # its remedy may not be whole yet
                return False
            record.msg, record.args = "%s: %s", (type(error).__name__, error)
            record.exc_info = record.exc_text = None
        elif is_full(home()):  # the command says so; of what libraries raise then the first line is enough
            record.msg, record.args = "%s: %s", (type(error).__name__, str(error).partition("\n")[0])
            record.exc_info = record.exc_text = None
        logged_by: list[object] = vars(error).setdefault(LOGGED_BY, [])
        run = getattr(record, "flow_run_id", None)
        vars(record)[AGAIN] = bool(logged_by)
        logged_by.append(run)
        return run not in logged_by[:-1]


class _ErrorsLeftToCommand(logging.Filter):
    """Keeps errors of runs from a terminal on which the command tells them at its end; else passes each once."""

    by_command = False

    def filter(self, record: logging.LogRecord) -> bool:
        again = getattr(record, AGAIN, None)  # None: it is about no error of a run
        return again is None or not (again or self.by_command)


_once, _on_terminal = _ErrorsOnce(), _ErrorsLeftToCommand()


def log_errors_once(*, by_command: bool = False) -> None:
    """From now on each error is logged once: on the terminal by the first run that fails, on the server by each.

    by_command: a command of this process tells them on the terminal when it ends.
    """
    _on_terminal.by_command |= by_command
    for name in (TASK_RUNS, FLOW_RUNS, ENGINE):
        logging.getLogger(name).addFilter(_once)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(_on_terminal)


def _error_of(record: logging.LogRecord) -> BaseException | None:
    """The error that a record is about, of a group the first."""
    error = record.exc_info[1] if record.exc_info else None
    return first_error(error) if error else None
