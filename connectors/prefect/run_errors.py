"""Logs each error of flow and task runs once, and without a traceback if the error is written for people.

Prefect logs an error with its traceback for the task run that fails, again for the iteration's flow run, and again for the
training's flow run; then it logs each of their states. The server keeps the states, so the log omits them.
"""

import logging

from prefect.logging.handlers import PrefectConsoleHandler

from millrace.connectors.host.local_files import home, is_full
from millrace.core.errors import MillraceError, first_error

TASK_RUNS, FLOW_RUNS = "prefect.task_runs", "prefect.flow_runs"
ENGINE = "prefect.engine"  # the logger of a flow run that a worker started
STATES = ("Finished in state ", "Crash detected! Execution was cancelled")
LOGGED_BY = "_millrace_logged_by"  # attribute of an error: the flow runs that have logged it
AGAIN = "_millrace_again"  # attribute of a record: whether another run has logged its error


class _ErrorsOnce(logging.Filter):
    """Passes each error once per flow run. Errors of millrace are logged by the flow run only, without their traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and record.getMessage().startswith(STATES):
            return False
        raised = record.exc_info[1] if record.exc_info else None
        error = first_error(raised) if raised else None
        if error is None:
            return True
        if isinstance(error, MillraceError):
            if record.name == TASK_RUNS:  # the flow run may still complete the error's remedy
                return False
            record.msg, record.args = "%s: %s", (type(error).__name__, error)
            record.exc_info = record.exc_text = None
        elif is_full(home()):  # the command reports that, so the first line of the error is enough
            record.msg, record.args = "%s: %s", (type(error).__name__, str(error).partition("\n")[0])
            record.exc_info = record.exc_text = None
        logged_by: list[object] = vars(error).setdefault(LOGGED_BY, [])
        run = getattr(record, "flow_run_id", None)
        vars(record)[AGAIN] = bool(logged_by)
        logged_by.append(run)
        return run not in logged_by[:-1]


class _ErrorsLeftToCommand(logging.Filter):
    """For the terminal: passes each error once, or none if the command prints the errors at its end."""

    by_command = False

    def filter(self, record: logging.LogRecord) -> bool:
        again = getattr(record, AGAIN, None)  # None: not an error of a run
        return again is None or not (again or self.by_command)


_once, _on_terminal = _ErrorsOnce(), _ErrorsLeftToCommand()


def log_errors_once(*, by_command: bool = False) -> None:
    """From now on log each error once: on the terminal for the first run that fails, on the server for each run.

    by_command: a command of this process prints the errors on the terminal when it ends.
    """
    _on_terminal.by_command |= by_command
    for name in (TASK_RUNS, FLOW_RUNS, ENGINE):
        logging.getLogger(name).addFilter(_once)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(_on_terminal)
    # Prefect connects again when its server is back; websockets logs a traceback for each connection that was cut
    logging.getLogger("websockets.client").setLevel(logging.CRITICAL)
