"""Rules of `data`."""

from collections.abc import Iterator, Sequence

from millrace.core.config.data import Source
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.parts.problems import Problem
from millrace.core.config.reward import NamedReward
from millrace.core.config.rollout import NamedRollout
from millrace.core.config.run_config import RunConfig
from millrace.core.contracts.rows.chat_options import RESERVED
from millrace.core.contracts.source_path import FORMATS, REMEDY, UNREAD, source_path


def problems(config: RunConfig) -> Iterator[Problem]:
    """Sources that cannot be read, distinguished, or learned from."""
    yield from same_names("data.sources", config.data.sources)
    yield from same_names("reward.named", config.reward.named)
    yield from _stages(config)
    for source in config.data.sources:
        yield from _origin(source)
        yield from template_problems(f"data.sources.{source.name}", source)
        yield from loss_problems(f"data.sources.{source.name}", source, config.algorithm.supervised)
        if source.sampling_key and config.algorithm.overlong is not None and config.rollout.session is None:
            yield Problem(
                f"data.sources.{source.name}.sampling_key",
                source.sampling_key,
                "algorithm.overlong measures each answer by rollout.sampling.max_new_tokens, and a row may end it sooner: no answer "
                "of that row would ever be too long",
                "set algorithm.overlong=null, or leave it out",
            )


def loss_problems(field: str, source: PromptRows, supervised: bool) -> Iterator[Problem]:
    """Sources without a loss (dialogues in RL, rows without an answer in supervised training), and idle settings."""
    if supervised and source.sampling_key:
        yield Problem(
            f"{field}.sampling_key",
            source.sampling_key,
            "algorithm.loss=sft generates nothing",
            "set it to null",
        )
    if source.loss_on == "answer":
        if supervised and source.label_key is None and not source.label_from_prompt:
            yield Problem(
                f"{field}.label_key",
                None,
                "algorithm.loss=sft trains the reference answer, and no column is named for it",
                "name the column, or set loss_on=assistant for whole dialogues",
            )
        return
    if not supervised:
        yield Problem(
            f"{field}.loss_on",
            source.loss_on,
            "whole dialogues are trained by algorithm.loss=sft alone",
            "set it to answer, or algorithm.loss to sft",
        )
    if not source.chat:
        yield Problem(
            f"{field}.chat",
            False,
            f"loss_on={source.loss_on} trains messages, which the chat template renders",
            "set it to true",
        )
    if source.label_from_prompt:
        yield Problem(
            f"{field}.label_from_prompt",
            True,
            f"loss_on={source.loss_on} trains the dialogue's own messages, the last one among them",
            "set it to false",
        )


def _origin(source: Source) -> Iterator[Problem]:
    """Sources whose rows come from both files and a function, or from neither."""
    field = f"data.sources.{source.name}"
    if source.path and source.rows:
        yield Problem(
            f"{field}.rows", source.rows.function, "the source has a path too", "remove one of the two"
        )
    elif source.path:
        yield from file_problems(f"{field}.path", source.path)
    elif source.rows is None:
        yield Problem(
            f"{field}.path",
            None,
            "nothing names the source of the rows",
            "set it, or name a function in `rows`",
        )
    if source.levels and source.rows is None:
        yield Problem(
            f"{field}.levels",
            None,
            "a file has no levels",
            "name a function in `rows` that makes the rows of a level, or give each level's file its own source, and data.stages",
        )


def _stages(config: RunConfig) -> Iterator[Problem]:
    """Stages that name no source, draw from none, or do not end."""
    names = [source.name for source in config.data.sources]
    for number, stage in enumerate(config.data.stages):
        field = f"data.stages.{number}"
        for name, weight in stage.weights.items():
            if name not in names:
                yield Problem(
                    f"{field}.weights.{name}",
                    weight,
                    "no source has this name",
                    f"use one of {', '.join(names)}",
                )
            elif weight < 0:
                yield Problem(
                    f"{field}.weights.{name}", weight, "a weight is negative", "set it to 0 or more"
                )
        if sum(stage.weights.values()) <= 0:
            yield Problem(f"{field}.weights", None, "no source has a weight above 0", "raise one")
        last = number == len(config.data.stages) - 1
        if not last and stage.iterations is None and stage.reward is None:
            yield Problem(
                f"{field}.iterations",
                None,
                "nothing ends the stage",
                "set it or `reward`, or remove later stages",
            )


def same_names(field: str, items: Sequence[PromptRows | NamedReward | NamedRollout]) -> Iterator[Problem]:
    """Two items of a list with one name."""
    names = [item.name for item in items]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        places = [number for number, other in enumerate(names) if other == name]
        yield Problem(
            f"{field}.{places[-1]}.name",
            name,
            f"item {places[0]} has the same name, and metrics and lineage distinguish them by name",
            "give each its own name",
        )


def template_problems(field: str, source: PromptRows) -> Iterator[Problem]:
    """Variables that a chat template gets from elsewhere."""
    for name in sorted(RESERVED & source.chat_template_kwargs.keys()):
        remedy = "name the column with tools in tools_key" if name == "tools" else "remove it"
        yield Problem(
            f"{field}.chat_template_kwargs", name, "chat templates get it from millrace itself", remedy
        )


def file_problems(field: str, path: str) -> Iterator[Problem]:
    """A path that ends in an invalid slice, or names a file of a format that is not read."""
    try:
        files = source_path(path).files
    except ValueError as error:
        yield Problem(field, path, str(error), REMEDY)
        return
    if files.endswith(UNREAD):
        yield Problem(
            field, path, "files of this format are not read", f"give files in {' or '.join(FORMATS)}"
        )
