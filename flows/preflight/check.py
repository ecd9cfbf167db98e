"""`millrace check`: check everything that a configuration names, once, before anything starts.

Owns the order of the checks and which of them run at the same time. Imports no torch, ray, mlflow or transformers, and prefect
only if a reference names one of its blocks. Imports the user's modules. Of their functions it calls only the reward, in a
separate process.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from millrace.connectors.engines.sglang.server_args import PYTHON_PATH, server_args
from millrace.connectors.storage.sources.locate import is_absent
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig, rules
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.references import references
from millrace.core.errors import StorageError
from millrace.core.hooks.loading import search_in
from millrace.flows.preflight.check_data import check_rows, sources
from millrace.flows.preflight.check_hooks import check_hooks, check_passthrough, hidden_modules
from millrace.flows.preflight.check_machine import (
    check_delta_layers,
    check_disk,
    check_host_memory,
    check_machine,
    check_output_layer,
    check_windows,
    ray_answers,
    tracking_answers,
)
from millrace.flows.preflight.check_model import ReadModel, check_model, check_served_teacher, check_stops
from millrace.flows.preflight.check_references import check_references
from millrace.flows.preflight.check_reward import RewardAnswers, check_majority, check_rewards
from millrace.flows.preflight.check_run import StoredRun, check_run
from millrace.flows.preflight.check_session import check_named_rollouts, check_session
from millrace.flows.preflight.check_versions import check_versions, installed, needs
from millrace.flows.preflight.first_rows import CheckedRows

PATIENCE_S = 5.0  # for a server that accepts connections and never answers
DISK_PATIENCE_S = 60.0  # for a disk, which may be busy

Touch = Callable[[], list[Problem]]


@dataclass
class Checked:
    """Results of the checks: problems, and facts for the plan."""

    config: RunConfig
    problems: list[Problem]
    data: list[CheckedRows]
    absent: list[CheckedRows] = field(default_factory=list)  # sources that run.prepare will make
    model: ReadModel = field(default_factory=ReadModel)
    run: StoredRun = field(default_factory=StoredRun)
    rewards: list[RewardAnswers] = field(default_factory=list)
    file: Path | None = None  # the file that the configuration was read from

    @property
    def located(self) -> RunConfig:
        """The configuration with a named model's folder instead of its name, and the type of the weights, if they were found."""
        here = self.model.here or self.config
        dtype = self.run.dtype or self.model.dtype
        return here.with_dtype(dtype) if dtype else here

    @property
    def training(self) -> list[CheckedRows]:
        """The sources that are trained on, without the held-out sets."""
        return [rows for rows in self.data if rows.field.startswith("data.")]


def check(config: RunConfig, prepared: bool = False) -> list[Problem]:
    """Every problem of a configuration, all at once.

    prepared: run.prepare was called. Before that, files that it may still make are allowed to be missing.
    """
    return checked(config, prepared=prepared).problems


def checked(config: RunConfig, before: Sequence[Problem] = (), prepared: bool = False) -> Checked:
    """Check a configuration; returns problems and facts for the plan.

    before: problems of reading the configuration. For their fields, `config` holds stand-ins, whose problems are left out.
    """
    search_in(config.run.import_from)
    may_be_made = config.run.prepare is not None and not prepared
    stood_in = {problem.field for problem in before}
    problems = [*before]
    _add(problems, rules.problems(config), stood_in)
    wrong_fields = {problem.field for problem in problems}
    data = [rows for rows in sources(config) if rows.place not in wrong_fields]
    absent = [rows for rows in data if may_be_made and not rows.function and is_absent(rows.source.path)]
    data = [rows for rows in data if rows not in absent]
    # before a function of rows is called, which gets its secrets
    referred = [*check_references(config)]
    data = [rows for rows in data if not _lacks_secret(rows, referred)]
    found = Checked(config, problems, data, absent)
    touches = _touches(found, wrong_fields)
    needed = needs()
    later = [*check_versions(needed, installed([item.name for item in needed]))]
    later += check_model(config, may_be_made, found.model)
    # then rules know the type that auto means
    if found.model.dtype:
        later += rules.problems(config.with_dtype(found.model.dtype))
    if found.model.shape:
        later += check_host_memory(found.located, found.model.shape)
        later += check_windows(found.located, found.model.shape)
        later += check_output_layer(found.located, found.model.shape)
        later += check_delta_layers(found.located, found.model.shape)
    hooks = [*referred, *check_hooks(config)]
    if not any(name.startswith("algorithm.teacher") for name in wrong_fields):
        later += check_served_teacher(config, found.model)
    later += check_stops(config, found.model)
    if config.rollout.session and not any(problem.field.startswith("rollout.session") for problem in hooks):
        hooks += check_session(config.rollout.session, found.model, _template_kwargs(config))
    later += [*hooks, *check_passthrough(config), *check_machine(config), *touches.problems()]
    if not {problem.field for problem in [*problems, *later]} & {"storage.root", "run.name"}:
        later += check_run(config, found.run)
        if found.model.shape and found.run.committed < config.run.iterations:
            later += check_disk(found.located, found.model.shape)
    if not config.algorithm.supervised:
        wrong = [problem.field for problem in [*problems, *hooks]]
        later += check_rewards(config, data, wrong, found.rewards)
        later += check_majority(config, data, found.rewards)
        if config.rollout.session:
            later += check_named_rollouts(config.rollout.session, data)
    for rows in data:
        later += check_rows(config, rows, found.model)
    _add(problems, later, stood_in)
    return found


def _lacks_secret(rows: CheckedRows, referred: Sequence[Problem]) -> bool:
    """Whether a function of rows refers to a missing secret."""
    missing = {problem.value for problem in referred}
    return rows.function is not None and any(
        f"${{{reference}}}" in missing for reference in references(rows.function.options)
    )


def _template_kwargs(config: RunConfig) -> list[dict[str, Any]]:
    """The distinct variables that sources and sets give to the chat template."""
    found: list[dict[str, Any]] = []
    for rows in sources(config):
        if rows.source.chat_template_kwargs not in found:
            found.append(rows.source.chat_template_kwargs)
    return found


def _add(problems: list[Problem], more: Sequence[Problem], stood_in: set[str]) -> None:
    """Add new problems, except for fields whose value is a stand-in."""
    for problem in more:
        if problem not in problems and not any(name in str(problem) for name in stood_in):
            problems.append(problem)


def _touches(found: Checked, wrong_fields: set[str]) -> _Touches:
    """Start the checks that read files and ask servers; adds a problem for each URL that fsspec cannot open."""
    config, problems = found.config, found.problems
    touches: dict[str, Touch] = {
        rows.place: rows.read
        for rows in found.data
        if rows.function or _is_known(rows.place, rows.source.path, problems)
    }
    folders = {"storage.root": config.storage.root}
    if config.sync.by_url:
        folders["sync.directory"] = config.sync.directory or ""
    for name, url in folders.items():
        if name not in wrong_fields and _is_known(name, url, problems):
            touches[name] = _writing(name, url)
    if config.placement.kernel_cache:
        _check_place("placement.kernel_cache", config.placement.kernel_cache, problems)
    if config.placement.ray_address:
        touches["placement.ray_address"] = lambda: list(ray_answers(config.placement.ray_address or ""))
    if config.tracking.uri and "tracking.uri" not in wrong_fields:
        touches["tracking.uri"] = lambda: list(tracking_answers(config.tracking.uri or ""))
    on_disk = {rows.place for rows in found.data if "://" not in rows.source.path}
    return _Touches(touches, on_disk)


class _Touches:
    """Checks that read files and ask servers, each in its own thread and with a time limit.

    on_disk: the checks that read a disk.
    """

    def __init__(self, touches: dict[str, Touch], on_disk: set[str]) -> None:
        self._on_disk = on_disk
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
        for name, thread in self._threads.items():
            thread.join(DISK_PATIENCE_S if name in self._on_disk else PATIENCE_S)
        silent = Problem(
            "", None, f"no answer within {PATIENCE_S:g} s", "check that the server runs and try again"
        )
        return [
            problem
            for field in self._threads
            for problem in self._found.get(field, [silent._replace(field=field)])
        ]


def _is_known(field: str, url: str, problems: list[Problem]) -> bool:
    """Whether fsspec can open URLs of this kind; adds the problem if it cannot."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        problems.append(
            Problem(field, url, f"{protocol}:// is not a known storage", "give a path, s3:// or gs://")
        )
    except ImportError as error:
        problems.append(Problem(field, url, f"{protocol}:// needs a package: {error}", "install it"))
    else:
        return True
    return False


def _check_place(field: str, url: str, problems: list[Problem]) -> None:
    """Add the problem of a URL that names no place. The storage is not asked, since a run goes on without it."""
    if _is_known(field, url, problems):
        try:
            Store(url)
        except StorageError as error:
            problems.append(
                Problem(field, url, "it names no folder", error.remedy or "name a folder below a bucket")
            )


def _writing(field: str, root: str) -> Touch:
    def write() -> list[Problem]:
        try:
            Store(root).check_writable(field)
        except StorageError as error:
            return [Problem(field, root, error.reason, error.remedy or "correct the path")]
        return []

    return write


def unchecked(config: RunConfig, whole: bool = True) -> Iterator[str]:
    """A sentence for each section of options whose library is not found here, and for each function found in two places.

    whole: whether the model's weights are on this host.
    """
    yield from hidden_modules(config)
    if not whole:
        yield f"Not checked: the weights of {config.model.path}, which train downloads into Hugging Face's cache."
    e = config.engines
    if e.sglang and not server_args()[1]:
        yield (
            f"Not checked: {_listed('engines.sglang', e.sglang)}. No SGLang is found on this host; check again where engines "
            f"run, or where {PYTHON_PATH} names its folder."
        )
    options = e.router.options if e.router else {}
    if options and importlib.util.find_spec("sglang_router") is None:
        yield f"Not checked: {_listed('engines.router.options', options)}. No sglang-router is found on this host."


def _listed(section: str, options: dict[str, object]) -> str:
    return ", ".join(f"{section}.{name}" for name in options)
