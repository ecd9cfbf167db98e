"""What libraries print stays off the terminal of a command, in a log that a failing command names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = r"""
import logging, os, sys, threading
from millrace.flows.commands.terminal import console, errors, libraries_kept_off_terminal, lines_before_prefect

def ray():
    print("[state-dump] of a raylet")

with libraries_kept_off_terminal():
    os.write(2, b"*** SIGTERM received\n")
    os.system("echo of a child >&2")
    thread = threading.Thread(target=ray, name="ray_listen_error_messages")
    thread.start()
    thread.join()
    print("a line")
    console.print("a table")
    print("a warning", file=sys.stderr)
    errors.print("an error")
    sys.exit(int(sys.argv[1]))
"""


def prints(home: Path, code: int, script: str = PRINTS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(code)],
        env={**os.environ, "MILLRACE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_libraries_write_to_a_log_and_python_to_the_terminal(tmp_path: Path) -> None:
    done = prints(tmp_path, 2)
    assert done.returncode == 2
    assert done.stdout.splitlines() == ["a line", "a table"]
    log = tmp_path / "stderr.log"
    assert done.stderr.splitlines() == [
        "a warning",
        "an error",
        f"What libraries wrote meanwhile is in {log}",
    ]
    assert log.read_text().splitlines() == ["*** SIGTERM received", "of a child", "[state-dump] of a raylet"]


def test_before_prefect_is_there_lines_are_formatted_alike_and_afterwards_left_to_it(tmp_path: Path) -> None:
    script = (
        PRINTS.partition("def ray")[0]
        + """
log = logging.getLogger("millrace.connectors.prefect.server")
with libraries_kept_off_terminal(), lines_before_prefect():
    log.info("starting")
    logging.getLogger().addHandler(logging.NullHandler())
    log.info("there")
"""
    )
    (line,) = prints(tmp_path, 0, script).stderr.splitlines()
    assert line.endswith(" | INFO    | millrace.connectors.prefect.server - starting")


def test_once_it_is_silenced_the_terminal_gets_the_last_words_alone(tmp_path: Path) -> None:
    script = (
        PRINTS.partition("def ray")[0]
        + """
with libraries_kept_off_terminal() as terminal:
    terminal.say(f"nothing yet: {terminal.log()}")
    terminal.silence()
    terminal.say(f"still nothing: {terminal.log()}")
    logging.getLogger("asyncio").error("an exception was never retrieved")
    print("a line of a table")
    terminal.say(f"what libraries logged is in {terminal.log()}")
    os._exit(0)
"""
    )
    done, log = prints(tmp_path, 0, script), tmp_path / "stderr.log"
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "nothing yet: None",
        "still nothing: None",
        f"what libraries logged is in {log}",
    ]
    assert log.read_text().splitlines() == ["an exception was never retrieved", "a line of a table"]


SILENT = """
import typer
from millrace.flows.commands.train import interruptible

app = typer.Typer()

def work():
    raise {error}

@app.command()
def go():
    interruptible(work)

app(args=[])
"""


@pytest.mark.parametrize("error", ["BrokenPipeError(32, 'Broken pipe')", "OSError(32, 'a')", "EOFError('e')"])
def test_a_lost_process_does_not_end_a_run_without_a_word(tmp_path: Path, error: str) -> None:
    done = prints(tmp_path, 1, SILENT.replace("{error}", error))
    assert "a process that the run talked to is gone" in done.stdout + done.stderr
    assert "in work" in done.stdout + done.stderr  # where it was
