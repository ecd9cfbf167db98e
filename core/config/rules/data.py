"""Rules of `data`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace.core.config.data import Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.config.parts.problems import Problem
from millrace.core.config.reward import NamedReward
from millrace.core.config.run_config import RunConfig
from millrace.core.contracts.chat_options import RESERVED
from millrace.core.contracts.source_path import FORMATS, REMEDY, UNREAD, source_path


def problems(config: RunConfig) -> Iterator[Problem]:
    """Sources that cannot be read, distinguished, or learned from."""
    yield from same_names("data.sources", config.data.sources)
    yield from same_names("reward.named", config.reward.named)
    for source in config.data.sources:
        yield from file_problems(f"data.sources.{source.name}.path", source.path)
        yield from template_problems(f"data.sources.{source.name}", source)
        if config.algorithm.supervised and source.label_key is None and not source.label_from_prompt:
            yield Problem(
                f"data.sources.{source.name}.label_key",
                None,
                "algorithm.loss=sft learns the reference answer, and no column is named for it",
                "name the column",
            )


def same_names(field: str, items: Sequence[Source | EvalSet | NamedReward]) -> Iterator[Problem]:
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


def template_problems(field: str, source: Source | EvalSet) -> Iterator[Problem]:
    """Variables that a chat template gets from elsewhere."""
    for name in sorted(RESERVED & source.chat_template_kwargs.keys()):
        remedy = "name the column with tools in tools_key" if name == "tools" else "remove it"
        yield Problem(
            f"{field}.chat_template_kwargs", name, "chat templates get it from millrace itself", remedy
        )


def file_problems(field: str, path: str) -> Iterator[Problem]:
    """A path that ends in what is no slice, or names a file of a format that is not read."""
    try:
        files = source_path(path).files
    except ValueError as error:
        yield Problem(field, path, str(error), REMEDY)
        return
    if files.endswith(UNREAD):
        yield Problem(
            field, path, "files of this format are not read", f"give files in {' or '.join(FORMATS)}"
        )
