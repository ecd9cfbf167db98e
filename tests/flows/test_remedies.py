"""No message offers what does not work: commands that remedies name exist with their options; what they say to remove is tried."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import millrace
from millrace.flows.commands import COMMANDS, command_of

SOURCES = Path(millrace.__file__).parent
FOLDERS = ("core", "connectors", "tasks", "flows")
COMMAND = re.compile(r"`millrace ([^`]*)`")
REMOVES = re.compile(r"\b(?:remove|delete|rename)\b", re.IGNORECASE)
TRIED = {  # what a remedy says to remove, and the test that does it
    "restore it from a copy, or remove it and start the run again: it is made again": (
        "tests/flows/test_tampering.py::test_a_manifest_that_is_removed_is_made_again_as_it_was"
    ),
    "restore the checkpoint from a copy, or remove its folder: the one before it is then taken, with replay": (
        "tests/flows/test_tampering.py::test_without_the_folder_of_a_broken_checkpoint_the_one_before_counts"
    ),
    "remove it, and start again": (
        "tests/connectors/ray/test_ray_head.py::test_a_record_that_cannot_be_read_is_named_and_its_remedy_works"
    ),
    "restore it, or remove it: then all parts count": (
        "tests/connectors/storage/test_fence.py::"
        "test_a_broken_note_of_a_takeover_is_named_and_its_remedy_works"
    ),
    "make sure that no process drives the run, then remove this file": (
        "tests/connectors/storage/test_lease.py::test_a_broken_lease_is_named_and_its_remedy_works"
    ),
    "remove its folder and start the run again: it is saved again": (
        "tests/connectors/megatron/test_replay.py::"
        "test_a_complete_checkpoint_of_another_version_is_kept_until_its_folder_is_removed"
    ),
    "remove the target and convert again": (
        "tests/connectors/megatron/test_conversion.py::test_a_flipped_bit_is_found"
    ),
    "remove it, or name a folder that does not exist": (
        "tests/connectors/megatron/test_conversion.py::test_a_source_that_changed_meanwhile_is_another_one"
    ),
    "holds no weights, and without it nothing of Megatron-LM's arguments is checked": (
        "tests/connectors/megatron/test_conversion.py::"
        "test_arguments_are_read_without_their_classes_and_code_in_them_does_not_run"
    ),
    "rename the one of yours: VALUE is imported, and hides VALUE": (
        "tests/core/config/test_own_paths.py::test_an_installed_package_of_the_same_name_comes_first_and_is_named"
    ),
}
# what these say to remove is a field, a key or a character of a file that its owner writes
OF_A_CONFIGURATION = (
    "core/config/",
    "core/families/",
    "flows/preflight/",
    "connectors/engines/sglang/server_args.py",
)


@cache
def sentences() -> tuple[tuple[str, str], ...]:
    """Every string of the sources that is no docstring, with its place; a value in an f-string reads VALUE."""
    return tuple(_sentences())


def _sentences() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for file in sorted((SOURCES / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            inside = {
                id(part)
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for part in ast.walk(node)
                if part is not node
            }
            documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if id(node) in documented or id(node) in inside:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{file.relative_to(SOURCES)}:{node.lineno}", node.value
                elif isinstance(node, ast.JoinedStr):
                    yield f"{file.relative_to(SOURCES)}:{node.lineno}", _text(node)


def _text(node: ast.expr) -> str:
    """A string as it reads: VALUE for a value, and for `of_run` the arguments that it writes."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    called = node.value if isinstance(node, ast.FormattedValue) else None
    if isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and called.func.id == "of_run":
        return " ".join(["VALUE", *map(_text, called.args[2:]), "--root", "VALUE"])
    return "VALUE"


def commands() -> list[tuple[str, str]]:
    return [(place, found) for place, text in sentences() for found in COMMAND.findall(text)]


def test_remedies_name_commands() -> None:
    assert {line.split()[0] for _, line in commands()} >= {"branch", "discard", "stop", "runs"}


def test_a_command_in_a_message_exists_with_its_options() -> None:
    assert [(place, line) for place, line in commands() if not _exists(line)] == []


def _exists(line: str) -> bool:
    """Whether the command is known and takes such arguments; one that is named without arguments only points to it."""
    name, *words = shlex.split(line)
    if name not in COMMANDS:
        return False
    parameters = command_of(name).params
    options = {option for parameter in parameters for option in parameter.opts}
    given = [word for word in words if word.startswith("--")]
    needed = [p for p in parameters if p.required and p.param_type_name == "argument"]
    values = [word for word in words if not word.startswith("--")]
    return set(given) <= options and (not words or len(values) >= len(needed) + len(given))


def test_what_a_remedy_says_to_remove_is_tried_by_a_test() -> None:
    untried = [
        (place, text)
        for place, text in sentences()
        if REMOVES.search(text) and " " in text.strip() and not place.startswith(OF_A_CONFIGURATION)
        if not any(known in text for known in TRIED)
    ]
    assert untried == []
    root = Path(__file__).parents[2]
    texts = [text for _, text in sentences()]
    for sentence, where in TRIED.items():
        assert any(sentence in text for text in texts), f"no message says this any more: {sentence}"
        file, _, test = where.partition("::")
        assert f"def {test}(" in (root / file).read_text(), where
