"""What a configuration names, touched once before anything starts: model, template, data, reward, storage.

Owns the looking; the rules stand in core.config. Imports neither torch nor any of the outside systems, so that a wrong
configuration is answered at once.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from connectors.storage.prompts import peek_source
from connectors.storage.store import Store
from core.config import RunConfig
from core.config.architecture import model_problems
from core.config.model import Source
from core.config.problems import Problem
from core.config.rules import rule_problems
from core.config.training import EvalSet
from core.errors import ConfigError, DataError, StorageError
from core.hooks import RewardInput, load
from core.prompts import PromptRow

PEEK_ROWS = 100


def check(config: RunConfig, *, made_later: bool = False) -> list[Problem]:
    """Every problem of the configuration, all at once.

    `made_later`: run.prepare has still to run, so that files that are not there yet are no problem.
    """
    looks: list[Callable[[RunConfig], Iterable[Problem]]] = [
        _model,
        _teacher,
        _data,
        _hooks,
        _storage,
        _options,
    ]
    with ThreadPoolExecutor(len(looks)) as threads:
        found = [
            problem
            for problems in threads.map(lambda look: list(look(config)), looks)
            for problem in problems
        ]
    missing = made_later and config.run.prepare is not None
    return [
        *rule_problems(config),
        *(problem for problem in found if not (missing and isinstance(problem, _Missing))),
    ]


class _Missing(Problem):
    """A file that is not there."""


def _model(config: RunConfig) -> Iterator[Problem]:
    folder = Path(config.model.path)
    try:
        hf = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        what = "has no config.json" if folder.is_dir() else "no such folder"
        yield _Missing("model.path", config.model.path, what, "name a Hugging Face checkpoint folder")
        return
    except (OSError, ValueError) as error:
        yield Problem(
            "model.path", config.model.path, f"config.json cannot be read: {error}", "mend the file"
        )
        return
    yield from model_problems(config, hf)
    if not any(folder.glob("*.safetensors")):
        yield Problem(
            "model.path", config.model.path, "holds no safetensors", "save the model with safetensors"
        )
    field, holder = (
        ("model.tokenizer", config.model.tokenizer) if config.model.tokenizer else ("model.path", folder)
    )
    if not any(
        (Path(holder) / name).exists()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        yield Problem(
            field,
            str(holder),
            "holds no tokenizer",
            "copy the tokenizer's files there, or set model.tokenizer",
        )
        return
    yield from _template(config, Path(holder))


def _teacher(config: RunConfig) -> Iterator[Problem]:
    folder = config.algorithm.teacher
    if folder is None:
        return
    if not (Path(folder) / "config.json").is_file():
        yield _Missing(
            "algorithm.teacher", folder, "holds no config.json", "name a Hugging Face checkpoint folder"
        )
    elif not any(Path(folder).glob("*.safetensors")):
        yield Problem(
            "algorithm.teacher", folder, "holds no safetensors", "save the teacher with safetensors"
        )


def _template(config: RunConfig, holder: Path) -> Iterator[Problem]:
    """The chat template, rendered once where a source needs it."""
    if not _needs_template(config):
        return
    named = config.model.chat_template
    try:
        text = Path(named).read_text() if named else _own_template(holder)
    except (OSError, ValueError) as error:
        yield Problem(
            "model.chat_template", named, f"cannot be read: {error}", "name a file with a Jinja template"
        )
        return
    if text is None:
        yield Problem(
            "model.chat_template", None, "the tokenizer has no chat template",
            "name a template file, or set chat=false for sources of plain text",
        )  # fmt: skip
        return
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: form
    messages = [{"role": "user", "content": "1+1="}]
    if any(source.system for source in _sources(config)):
        messages.insert(0, {"role": "system", "content": "Answer."})
    try:
        rendered = environment.from_string(text).render(
            messages=messages, add_generation_prompt=True, tools=None, bos_token="", eos_token=""
        )
    except (TemplateError, TypeError) as error:
        line = f" in line {error.lineno}" if getattr(error, "lineno", None) else ""
        yield Problem("model.chat_template", named, f"cannot be rendered{line}: {error}", "mend the template")
        return
    if "1+1=" not in rendered:
        yield Problem("model.chat_template", named, "leaves the user's message out", "mend the template")


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _needs_template(config: RunConfig) -> bool:
    return any(source.chat for source in _sources(config))


def _own_template(holder: Path) -> str | None:
    """The template that the tokenizer carries."""
    separate = holder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text()
    settings = holder / "tokenizer_config.json"
    found = json.loads(settings.read_text()).get("chat_template") if settings.exists() else None
    if isinstance(found, list):
        found = next((item["template"] for item in found if item.get("name") == "default"), None)
    return found


def _sources(config: RunConfig) -> list[Source | EvalSet]:
    return [*config.data.sources, *config.evaluation.sets]


def _data(config: RunConfig) -> Iterator[Problem]:
    fields = [f"data.sources.{at}" for at in range(len(config.data.sources))]
    fields += [f"evaluation.sets.{at}" for at in range(len(config.evaluation.sets))]
    for field, source in zip(fields, _sources(config), strict=True):
        try:
            rows, refused = peek_source(source, PEEK_ROWS)
        except DataError as error:
            kind = _Missing if "no such file" in str(error) else Problem
            text = str(error).removeprefix(f"source {source.name}: {source.path}: ")
            reason, _, remedy = text.rpartition("; ")
            yield kind(f"{field}.path", source.path, reason, remedy)
            continue
        except StorageError as error:
            yield Problem(
                f"{field}.path",
                source.path,
                str(error),
                "correct the path, or the credentials in the environment",
            )
            continue
        yield from _rows(config, field, source, rows, [item.reason for item in refused])


def _rows(
    config: RunConfig, field: str, source: Source | EvalSet, rows: list[PromptRow], refused: list[str]
) -> Iterator[Problem]:
    looked = len(rows) + len(refused)
    if not looked:
        yield Problem(f"{field}.path", source.path, "holds no row", "name a file with prompts")
    elif not rows:
        common = max(set(refused), key=refused.count)
        yield Problem(
            field, source.path, f"none of the first {looked} rows can be used: {common}",
            "correct the source's prompt_key, label_key and metadata_key, or the file",
        )  # fmt: skip
    elif not source.chat and any(not isinstance(row.prompt, str) for row in rows):
        yield Problem(f"{field}.chat", False, "the source holds chat messages", "set it to true")
    elif (
        config.algorithm.loss == "sft"
        and field.startswith("data")
        and not all(isinstance(row.label, str) and row.label for row in rows)
    ):
        yield Problem(
            f"{field}.label_key", source.label_key, "supervised training needs an answer as text in every row",
            "name the column that holds it",
        )  # fmt: skip


def _hooks(config: RunConfig) -> Iterator[Problem]:
    named = [
        ("reward.function", config.reward.function),
        ("filter.function", config.filter.function),
        ("algorithm.advantage_function", config.algorithm.advantage_function),
        ("algorithm.shaping_function", config.algorithm.shaping_function),
        ("algorithm.loss_function", config.algorithm.loss_function),
    ]
    for field, path in named:
        if path is None:
            continue
        try:
            function = load(path, field)
        except ConfigError as error:
            text = str(error).removeprefix(f"{field} = {path}: ")
            reason, _, remedy = text.rpartition("; ")
            yield Problem(field, path, reason or text, remedy or "correct the path")
            continue
        if field == "reward.function":
            yield from _reward(config, function)


def _reward(config: RunConfig, function: Callable[..., Any]) -> Iterator[Problem]:
    sample = RewardInput(prompt="1+1=", response="2", label="2", metadata={})
    try:
        inspect.signature(function).bind(sample, **config.reward.options)
    except TypeError as error:
        yield Problem(
            "reward.options", config.reward.options, f"{config.reward.function} does not take them: {error}",
            "a reward takes one sample and reward.options by name",
        )  # fmt: skip


def _storage(config: RunConfig) -> Iterator[Problem]:
    try:
        Store(config.storage.root).check_writable()
    except (StorageError, ValueError, ImportError) as error:
        reason = str(error).split("cannot be written: ", 1)[-1]
        yield Problem(
            "storage.root", config.storage.root, f"cannot be written: {reason}",
            "name a folder or URL that this user may write; credentials come from the environment",
        )  # fmt: skip
    if config.sync.directory and not Path(config.sync.directory).is_dir():
        yield Problem("sync.directory", config.sync.directory, "no such folder", "make it, or leave it out")


def _options(config: RunConfig) -> Iterator[Problem]:
    """Names handed on to megatron-core and SGLang, against the installed versions' own."""
    if config.trainer.megatron:
        known = _fields("megatron", "core/transformer/transformer_config.py", "TransformerConfig")
        known |= _fields("megatron", "core/model_parallel_config.py", "ModelParallelConfig")
        yield from _unknown("trainer.megatron", config.trainer.megatron, known)
    if config.engines.sglang:
        known = _fields("sglang", "srt/server_args.py", "ServerArgs")
        yield from _unknown("engines.sglang", config.engines.sglang, known)


def _unknown(field: str, given: Mapping[str, Any], known: set[str]) -> Iterator[Problem]:
    import difflib

    for name in given:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            yield Problem(f"{field}.{name}", given[name], "the installed version has no such field", remedy)


def _fields(package: str, file: str, name: str) -> set[str]:
    """Annotated fields of a class, read from an installed package's source without importing it."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.exists():
            classes = [
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
            ]
            return {
                item.target.id
                for node in classes
                if node.name == name
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return set()
