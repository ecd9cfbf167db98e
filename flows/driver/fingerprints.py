"""Hashes of what a run reads besides its configuration: the model's folder and the code of the user's functions.

Owns what is hashed. Data sources have their own fingerprints (millrace.core.contracts.rows.prompts).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from millrace.connectors.storage.sampled_hash import sampled_hash
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.rollout import Tool
from millrace.core.hooks.loading import hash_of, load, module_and_name, source_of
from millrace.core.hooks.reward_selection import all_rewards, comparisons
from millrace.core.hooks.rollout_selection import rollout_functions

OF_A_MODEL = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model")
OURS = "millrace."


def fingerprints(config: RunConfig) -> dict[str, dict[str, str]]:
    """Hashes: "model" by field and file, "code" by field and module file.

    The hash of a weight file covers its size, its header (names, types and shapes) and three samples of its content.
    """
    return {"model": of_model(config), "code": dict(_code(config))}


def of_model(config: RunConfig) -> dict[str, str]:
    """The hashes of the model's files alone, without the user's functions."""
    return dict(_models(config))


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The names whose hash differs, or that are only in one."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _models(config: RunConfig) -> Iterator[tuple[str, str]]:
    critic, lora = config.algorithm.critic, config.trainer.lora
    folders = {
        "model.path": config.model.path,
        "model.tokenizer": config.model.tokenizer,
        "algorithm.teacher": config.algorithm.teacher,
        "algorithm.reference": config.algorithm.reference,
        "algorithm.advantage.critic.path": critic.path if critic else None,
        "trainer.lora.path": lora.path if lora else None,
    }
    for field, folder in folders.items():
        if folder and Path(folder).is_dir():
            files = {file for pattern in OF_A_MODEL for file in Path(folder).glob(pattern) if file.is_file()}
            for file in sorted(files):
                yield f"{field}: {file.name}", sampled_hash(file)
    template = config.model.chat_template
    if template and Path(template).is_file():
        yield "model.chat_template: file", sampled_hash(Path(template))


def own_modules(config: RunConfig) -> dict[str, str]:
    """The hash of each module of the user's functions, by its name."""
    return {module: hash_of(source) for _, module, source in _sources(config)}


def _code(config: RunConfig) -> Iterator[tuple[str, str]]:
    for field, _, source in _sources(config):
        yield f"{field}: {source.name}", hash_of(source)


def _sources(config: RunConfig) -> Iterator[tuple[str, str, Path]]:
    """Field with path, module and file of each of the user's functions."""
    named = {f"{field}.function": function.function for field, function in _functions(config) if function}
    for path, function in {**named, "trainer.rank": config.trainer.rank}.items():
        if function is None or function.startswith(OURS):
            # millrace's own modules have its version, which run.json names
            continue
        load(function, path)
        module = module_and_name(function)[0]
        source = source_of(sys.modules[module])
        if source:
            yield f"{path} = {function}", module, source


def _functions(config: RunConfig) -> Iterator[tuple[str, UserFunction | None]]:
    algorithm = config.algorithm
    for source in config.data.sources:
        yield f"data.sources.{source.name}.rows", source.rows
    for found in all_rewards(config):
        yield found.field, found.function
    yield from comparisons(config)
    yield "filter.group_filter", config.filter.group_filter
    if config.rollout.buffer:
        yield "rollout.buffer.buffer_filter", config.rollout.buffer.buffer_filter
    yield "algorithm.advantage", algorithm.advantage if algorithm.advantage.kind == "function" else None
    yield "algorithm.loss", algorithm.loss if algorithm.loss.kind == "function" else None
    if algorithm.teacher_server:
        yield "algorithm.teacher_server.hint", algorithm.teacher_server.hint
    yield "algorithm.shaping", algorithm.shaping
    session = config.rollout.session
    if session:
        yield from rollout_functions(session)
        yield "rollout.session.environment", session.environment
        for at, tool in enumerate(session.tools):
            yield f"rollout.session.tools.{at}", tool if isinstance(tool, Tool) else None
