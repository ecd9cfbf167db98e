"""Tags of a run's flow runs and deployments, to find them by. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.config import RunConfig

OF_RUNS = ("run:", "preset:", "model:")


def run_tags(config: RunConfig) -> set[str]:
    """The run's name, its preset and its model, a tag each."""
    model = config.model.path.rstrip("/").rpartition("/")[2]
    learns = "sft" if config.algorithm.supervised else config.algorithm.preset
    return {f"run:{config.run.name}", f"preset:{learns}", f"model:{model}"}


def with_run_tags(had: Iterable[str], of_run: set[str]) -> list[str]:
    """The tags of a flow run with those of its run, in place of others of their kinds: those of its deployment's recipe."""
    return sorted({tag for tag in had if not tag.startswith(OF_RUNS)} | of_run)
