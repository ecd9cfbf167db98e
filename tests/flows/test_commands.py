"""Each command of `millrace` is a file, and the help of all of them imports none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millrace.flows import commands
from millrace.flows.commands import COMMANDS, command_of

SHARED = {"__init__", "__main__", "listing", "named_by_run", "named_files", "terminal", "weights_after"}


def test_every_command_is_a_file() -> None:
    files = {file.stem for file in Path(commands.__path__[0]).glob("*.py")}
    assert files - SHARED == set(COMMANDS)


def test_the_help_has_the_line_of_each_command() -> None:
    assert {name: command_of(name).help for name in COMMANDS} == COMMANDS


def test_the_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom millrace.flows.commands import COMMANDS, app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print([name for name in COMMANDS if f'millrace.flows.commands.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
