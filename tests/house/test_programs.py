"""The rule about programs in strings, on snippets."""

from __future__ import annotations

import pytest

from tests.house.programs import lost_imports
from tests.house.source import SourceFile

THERE = {
    "core/__init__.py": "",
    "core/steps.py": "import os\nif os.name:\n    LIMIT = 1\ndef step(): ...\nclass Step: ...\n",
    "tests/support/places.py": "",
}
LOST = {
    "a module": ("PROGRAM = 'import millrace.core.gone'", "millrace.core.gone"),
    "a module of a package": ("PROGRAM = 'from millrace.core import gone'", "millrace.core.gone"),
    "a name of a module": ("PROGRAM = 'from millrace.core.steps import gone'", "millrace.core.steps.gone"),
    "inside a function": ("def f():\n    run('from tests.support import gone')", "tests.support.gone"),
    "in an f-string": ("PROGRAM = f'import millrace.gone; print({1})'", "millrace.gone"),
    "in an indented text": ('PROGRAM = """\n    import millrace.gone\n    """', "millrace.gone"),
    "all names of a module": ("PROGRAM = 'from millrace.gone import *'", "millrace.gone"),
}
FOUND = {
    "a module": "PROGRAM = 'import millrace.core.steps'",
    "a module of a package": "PROGRAM = 'from millrace.core import steps'",
    "a module of a folder": "PROGRAM = 'from tests.support import places'",
    "names of a module": "PROGRAM = 'from millrace.core.steps import LIMIT, Step, os, step'",
    "a name that is filled in": "PROGRAM = f'from millrace.core import {name}'",
    "of others": "PROGRAM = 'from elsewhere import gone'",
    "a sentence": "SAID = 'no import millrace.gone here'",
}


@pytest.mark.parametrize("case", LOST)
def test_a_program_that_imports_what_does_not_exist_is_reported_with_its_name(case: str) -> None:
    text, name = LOST[case]
    (found,) = lost_imports(_files(text))
    assert found.path == "tests/test_x.py"
    assert found.problem == f"a program imports {name}, which does not exist"


@pytest.mark.parametrize("case", FOUND)
def test_a_program_that_imports_what_exists_passes(case: str) -> None:
    assert not list(lost_imports(_files(FOUND[case])))


def _files(text: str) -> list[SourceFile]:
    return [SourceFile(path, body) for path, body in (THERE | {"tests/test_x.py": text}).items()]
