"""The picture of a run's curves, as PNG."""

from __future__ import annotations

import functools
import io

from millrace.tasks.pages.curves import Curves

PANELS = (
    ("reward", r"reward/mean$|eval/.+/reward_mean$"),
    ("loss", r"train/loss$|eval/.+/loss$"),
    ("response length, tokens", r"rollout/response_length_mean$"),
    ("gradient norm", r"train/grad_norm$"),
)


@functools.cache
def prepare_drawing() -> None:
    """Draw something once in this process: the first picture takes seconds more than the others, for imports and fonts."""
    curves = Curves()
    curves.add({"train/loss": 0.0}, 1)
    curves_png(curves)


def curves_png(curves: Curves) -> bytes:
    """A panel each for reward, loss, length and gradient norm, as far as there are any; held-out sets with their training curve."""
    from matplotlib.figure import Figure

    panels = [(label, names) for label, pattern in PANELS if (names := curves.named(pattern))]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 3.2 * max(rows, 1)))  # a computed layout would take as long as the drawing
    figure.subplots_adjust(
        left=0.07, right=0.98, top=0.97, bottom=0.16 / max(rows, 1), hspace=0.25, wspace=0.18
    )
    for number, (label, names) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, number + 1)
        for name in names:
            steps, values = zip(*curves.points(name), strict=True)
            held_out = name.startswith("eval/")
            axes.plot(steps, values, "o-" if held_out else "-", label=name)
        axes.set_xlabel("iterations trained")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(loc="best")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=90)
    return data.getvalue()
