"""The picture of a run's curves, as PNG."""

import asyncio
import functools
import io
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millrace.connectors.host.local_files import keep_fonts_at_home
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.account import FATES

SHOWN = re.compile(
    r"^(reward/mean|train/loss|train/grad_norm|train/entropy|rollout/response_length_mean|tokens/[a-z]+|time/iteration_s"
    r"|eval/.+/(reward_mean|loss))$"
)


class Curves:
    """Metrics by name and iteration. Metrics from before training have iteration 0."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self.moved: set[str] = set()  # names of all metrics that ever differed from 0

    def read(self, folder: RunFolder) -> None:
        """Add the metrics of the run's committed iterations."""
        for item in folder.committed():
            self.add(item.metrics, item.iteration + 1)
            if item.evaluated:
                self.add(item.evaluated["metrics"], item.evaluated["done"])

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of an iteration."""
        for name, value in metrics.items():
            if value:
                self.moved.add(name)
            if SHOWN.match(name):
                self._points.setdefault(name, {})[step] = value

    def points(self, name: str) -> list[tuple[int, float]]:
        """Iterations and values of a metric, in order."""
        return sorted(self._points.get(name, {}).items())

    def named(self, pattern: str) -> list[str]:
        """Names of metrics whose start matches a regular expression, sorted."""
        return sorted(name for name in list(self._points) if re.match(pattern, name))

    def tokens(self) -> dict[str, int]:
        """The account of the run's tokens: generated tokens, and what became of them."""
        names = ("generated", *(fate for fate in FATES if fate != "in flight"))
        totals = {name: sum(value for _, value in self.points(f"tokens/{name}")) for name in names}
        return {
            name: int(value) for name, value in totals.items() if value or name in ("generated", "trained")
        }


PANELS = (
    ("reward", r"reward/mean$"),
    ("held-out reward", r"eval/.+/reward_mean$"),
    ("loss", r"train/loss$"),
    ("held-out loss", r"eval/.+/loss$"),
    ("response length, tokens", r"rollout/response_length_mean$"),
    ("gradient norm", r"train/grad_norm$"),
)
# a loss that never exceeds it is not shown: with one step an iteration it is 0 by construction
NOTHING = 1e-6
LEGEND_PT = 12  # height of a line of a legend

T = TypeVar("T")


async def drawn(draw: Callable[..., T], *arguments: Curves) -> T:
    """The result of `draw`, called in the only drawing thread: matplotlib opens its fonts for each thread and keeps them open."""
    return await asyncio.get_running_loop().run_in_executor(_drawer(), draw, *arguments)


@functools.cache
def _drawer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="drawer")


def curves_png(curves: Curves) -> bytes:
    """Panels for reward, loss, length and gradient norm, and for held-out rewards and losses if there are any."""
    keep_fonts_at_home()
    from matplotlib.figure import Figure

    panels = [(label, names) for label, pattern in PANELS if (names := _that_say_something(curves, pattern))]
    rows = -(-len(panels) // 2)
    lines = max((len(names) for _, names in panels if len(names) > 1), default=0)
    legend = LEGEND_PT * lines / 72  # inches below each panel
    height = (2.7 + legend) * max(rows, 1) + 0.3
    # a computed layout would take as long as the drawing
    figure = Figure(figsize=(11, height))
    figure.subplots_adjust(
        left=0.07, right=0.98, top=1 - 0.1 / height, bottom=(0.5 + legend) / height, wspace=0.18,
        hspace=(0.6 + legend) / 2.2,
    )  # fmt: skip
    for number, (label, names) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, number + 1)
        for name in names:
            steps, values = zip(*curves.points(name), strict=True)
            # $ would start a formula
            shown = name.replace("$", r"\$")
            axes.plot(steps, values, "o-" if name.startswith("eval/") else "-", label=shown)
        axes.set_xlabel("iterations trained")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        # below the panel, so that it hides no curve
        if len(names) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=8, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=90)
    return data.getvalue()


def _that_say_something(curves: Curves, pattern: str) -> list[str]:
    """Names of the metrics of a panel, without a loss that is 0 by construction."""
    return [
        name
        for name in curves.named(pattern)
        if name != "train/loss" or max(abs(value) for _, value in curves.points(name)) > NOTHING
    ]
