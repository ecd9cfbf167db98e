"""Markdown of an iteration and of a run."""

import re
from collections.abc import Mapping, Sequence

from millrace.tasks.reporting.pictures import Curves
from millrace.tasks.reporting.time_bars import Interval, sparkline, time_bars, time_shares

HELD_OUT = re.compile(r"eval/.+/(reward_mean|loss|pass_at_\d+)$")
HEADLINES = (
    "reward/mean",
    "rollout/response_length_mean",
    "rollout/truncated_share",
    "filter/zero_variance_share",
    "train/loss",
    "train/grad_norm",
    "train/logprob_gap_mean",
    "rollout/tokens_per_second",
)


def iteration_text(
    title: str,
    metrics: Mapping[str, float],
    intervals: Mapping[str, Interval],
    curves: Curves,
    links: Mapping[str, str],
) -> str:
    """An iteration: the reward so far, its headline metrics, its times."""
    shown = [*HEADLINES, *sorted(name for name in metrics if HELD_OUT.match(name))]
    figures = [f"| {_cell(name)} | {metrics[name]:.5g} |" for name in shown if name in metrics]
    lines = [f"# {title}", *_so_far(curves), "", "| figure | value |", "|---|---|", *figures]
    if intervals:
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in time_shares(intervals).items())
        lines += ["", f"Time: {shares}", "", "```text", *time_bars(intervals), "```"]
    return "\n".join([*lines, "", *_links(links)])


def run_text(title: str, curves: Curves, links: Mapping[str, str]) -> str:
    """A run: the reward so far, its held-out sets, and what became of its tokens."""
    lines = [f"# {title}", *_so_far(curves)]
    sets = curves.named(r"eval/.+/(reward_mean|loss)$")
    if sets:
        lines += ["", "| held-out set | first | best | newest |", "|---|---|---|---|"]
        lines += [_set_row(name, curves.points(name)) for name in sets]
    tokens = curves.tokens()
    if tokens["generated"]:
        lines += ["", "| tokens | count | share |", "|---|---|---|"]
        lines += [
            f"| {fate} | {count:,} | {count / tokens['generated']:.1%} |" for fate, count in tokens.items()
        ]
    return "\n".join([*lines, "", *_links(links)])


def account_text(rows: Sequence[Mapping[str, object]]) -> str:
    """What became of an iteration's tokens. rows: of `Account.rows`."""
    if not rows:
        return ""
    columns = list(rows[0])
    lines = ["## Tokens", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(
        [*lines, *(f"| {' | '.join(str(row[name] or '') for name in columns)} |" for row in rows)]
    )


def _so_far(curves: Curves) -> list[str]:
    """The main curve in a line of blocks: the reward, or the loss in supervised runs."""
    for name in ("reward/mean", "train/loss"):
        points = curves.points(name)
        if points:
            values = [value for _, value in points]
            return [
                "",
                f"{name} after iteration {points[0][0]} and later: {sparkline(values)} {values[-1]:.4g}",
            ]
    return []


def _set_row(name: str, points: list[tuple[int, float]]) -> str:
    best = (min if name.endswith("/loss") else max)(points, key=lambda point: point[1])
    cells = [f"{value:.4g} ({_when(step)})" for step, value in (points[0], best, points[-1])]
    return f"| {_cell(name.removeprefix('eval/'))} | {' | '.join(cells)} |"


def _cell(name: str) -> str:
    """A name in a table of Markdown."""
    return re.sub(r"([\\`*{}\[\]<>|])", r"\\\1", name)


def _when(step: int) -> str:
    return f"after iteration {step}" if step else "before training"


def _links(links: Mapping[str, str]) -> list[str]:
    return [f"{name}: {where}  " for name, where in links.items()]
