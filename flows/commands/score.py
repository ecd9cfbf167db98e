"""The command that scores a file with a reward, without a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millrace.core.errors import ConfigError
from millrace.flows.commands.terminal import guarded, print_lines

REASONS = 10  # reasons that are printed
BINS = 10


def score(
    file: Annotated[str, typer.Argument(help="JSONL or Parquet file with a response in each row.")],
    reward: Annotated[str, typer.Option(help="Import path: package.module:function.")],
    options: Annotated[str, typer.Option(help="Options of the reward, as YAML: {form: 0.2}.")] = "{}",
    out: Annotated[
        str | None,
        typer.Option(help="Where scores are written: JSONL or Parquet. FILE.scores.jsonl by default."),
    ] = None,
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    response_key: Annotated[str, typer.Option(help="Column with the response.")] = "response",
    label_key: Annotated[str, typer.Option(help="Column with the reference answer.")] = "label",
    metadata_key: Annotated[str, typer.Option(help="Column with a mapping for the reward.")] = "metadata",
    group_key: Annotated[
        str | None, typer.Option(help="Column that names the group of a row, for a reward of groups.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that score.")] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Longest time for one call. Seconds.")] = 30.0,
    memory_mb: Annotated[int | None, typer.Option(min=256, help="Memory of a process. MiB.")] = None,
    max_processes: Annotated[int | None, typer.Option(min=0, help="Processes that a call may run.")] = None,
) -> None:
    """Score the rows of a file with a reward; print mean, distribution and failures. Exit code 1: no row could be scored."""
    from millrace.connectors.user_code.process import Limits
    from millrace.flows.tools.score import Columns, score_file

    columns = Columns(prompt_key, response_key, label_key, metadata_key, group_key)
    scores, written = guarded(
        lambda: score_file(
            file,
            reward,
            _options(options),
            columns,
            out=out,
            workers=workers,
            timeout_s=timeout_s,
            limits=Limits(memory_mb, max_processes),
        )
    )
    lines = [f"{len(scores.rows)} rows, {len(scores.rewards)} scored; scores in {written}"]
    if scores.mean is not None:
        shares = " ".join(f"{name} {scores.quantile(share):g}" for name, share in QUANTILES.items())
        lines += [f"mean {scores.mean:g}, {shares}", *_histogram(scores.rewards)]
    lines += [f"{count:>7}  {reason}" for reason, count in scores.failures[:REASONS]]
    print_lines(lines)
    if not scores.rewards:
        raise typer.Exit(1)


QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "most": 1.0}


def _options(text: str) -> dict[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("is not YAML", where=f"--options {text}", remedy="write {name: value}") from error
    if not isinstance(options, dict):
        raise ConfigError("is no mapping", where=f"--options {text}", remedy="write {name: value}")
    return options


def _histogram(rewards: list[float]) -> list[str]:
    """A line for each value, or for each of ten ranges of values; rewards: smallest first."""
    values = sorted(set(rewards))
    if len(values) <= BINS:
        counts = [(f"{value:g}", rewards.count(value)) for value in values]
    else:
        least, width = rewards[0], (rewards[-1] - rewards[0]) / BINS
        places = [min(BINS - 1, int((reward - least) / width)) for reward in rewards]
        counts = [(f"from {least + at * width:g}", places.count(at)) for at in range(BINS)]
    most = max(count for _, count in counts)
    return [f"{count:>7}  {name:<14} {'█' * round(30 * count / most)}" for name, count in counts]
