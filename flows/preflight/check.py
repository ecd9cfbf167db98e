"""`millrace check`: touch everything that a configuration names, once, before anything starts.

Owns the order of the checks and which of them run at the same time. Imports no torch, ray, prefect, mlflow or transformers.
Imports the user's modules but calls none of their functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import fsspec

from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig, rules
from millrace.core.config.parts.problems import Problem
from millrace.core.errors import StorageError
from millrace.flows.preflight.check_data import Rows, check_rows, sources
from millrace.flows.preflight.check_hooks import check_hooks, check_passthrough
from millrace.flows.preflight.check_machine import check_machine, ray_answers
from millrace.flows.preflight.check_model import Checkpoint, check_model

PATIENCE_S = 5.0  # for a storage that accepts the connection and never answers

Touch = Callable[[], list[Problem]]


def check(config: RunConfig, prepared: bool = False) -> list[Problem]:
    """Every problem of a configuration, all at once.

    prepared: run.prepare was called. Before that, files that it may still make are allowed to be missing.
    """
    may_be_made = config.run.prepare is not None and not prepared
    problems = rules.problems(config)
    wrong_fields = {problem.field for problem in problems}
    data = [rows for rows in sources(config) if f"{rows.field}.path" not in wrong_fields]
    if may_be_made:
        data = [rows for rows in data if not _absent(rows.source.path)]
    touches = _touches(config, data, wrong_fields, problems)
    model = Checkpoint()
    problems += check_model(config, may_be_made, model)
    problems += check_hooks(config)
    problems += check_passthrough(config)
    problems += check_machine(config)
    problems += touches.problems()
    for rows in data:
        problems += [problem for problem in check_rows(config, rows, model) if problem not in problems]
    return problems


def _touches(
    config: RunConfig, data: list[Rows], wrong_fields: set[str], problems: list[Problem]
) -> _Touches:
    """Start the checks that wait for files and servers; adds a problem for each URL that fsspec cannot open."""
    touches: dict[str, Touch] = {
        f"{rows.field}.path": rows.read
        for rows in data
        if _is_known(f"{rows.field}.path", rows.source.path, problems)
    }
    folders = {"storage.root": config.storage.root}
    if config.sync.by_url:
        folders["sync.directory"] = config.sync.directory or ""
    for field, url in folders.items():
        if field not in wrong_fields and _is_known(field, url, problems):
            touches[field] = _writing(field, url)
    if config.placement.ray_address:
        touches["placement.ray_address"] = lambda: list(ray_answers(config.placement.ray_address or ""))
    return _Touches(touches)


class _Touches:
    """Checks that wait for files and servers, each in a thread of its own. No thread is waited for beyond PATIENCE_S."""

    def __init__(self, touches: dict[str, Touch]) -> None:
        self._found: dict[str, list[Problem]] = {}
        self._threads = {
            field: threading.Thread(target=self._run, args=(field, touch), daemon=True)
            for field, touch in touches.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, field: str, touch: Touch) -> None:
        self._found[field] = touch()

    def problems(self) -> list[Problem]:
        """Wait for the threads and return the problems in the order of the fields."""
        for thread in self._threads.values():
            thread.join(PATIENCE_S)
        silent = Problem(
            "", None, f"no answer within {PATIENCE_S:g} s", "check that the server runs and try again"
        )
        return [
            problem
            for field in self._threads
            for problem in self._found.get(field, [silent._replace(field=field)])
        ]


def _absent(path: str) -> bool:
    return "://" not in path and not Path(path).exists()


def _is_known(field: str, url: str, problems: list[Problem]) -> bool:
    """Whether fsspec can open URLs of this kind; adds the problem if it cannot."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        problems.append(
            Problem(field, url, f"{protocol}:// is no known storage", "give a path, s3:// or gs://")
        )
    except ImportError as error:
        problems.append(Problem(field, url, f"{protocol}:// needs a package: {error}", "install it"))
    else:
        return True
    return False


def _writing(field: str, root: str) -> Touch:
    def write() -> list[Problem]:
        try:
            Store(root).check_writable(field)
        except StorageError as error:
            return [Problem(field, root, error.reason, error.remedy or "correct the path")]
        return []

    return write
