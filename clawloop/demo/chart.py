"""The picture of a demo: how often answers were as the user likes them, over the interactions.

Knows nothing about how it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from clawloop.demo.plan import PlannedRun
from clawloop.demo.recipes import Method
from clawloop.demo.report import GOAL, Evaluated

_COLOURS = {Method.BINARY: "#d1495b", Method.OPD: "#edae49", Method.COMBINED: "#00798c"}


def draw_chart(path: Path, curves: Mapping[PlannedRun, Sequence[Evaluated]]) -> None:
    """Write a PNG: one line for each run, a dot for each version.

    Args:
        curves: the evaluations of each run, in order.
    """
    # Not pyplot: it would look for a screen, and keep the figure.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    named: set[Method] = set()
    for run, evaluated in curves.items():
        label = None if run.method in named else str(run.method)
        named.add(run.method)
        counts, matches = [one.interactions for one in evaluated], [one.match for one in evaluated]
        faint = 1.0 if len(curves) == 1 else 0.55
        axes.plot(counts, matches, "o-", color=_COLOURS[run.method], alpha=faint, markersize=4, label=label)
    if len(curves) == 1:
        (run,) = curves
        for one in curves[run]:
            axes.annotate(f"v{one.version}", (one.interactions, one.match), (0, 7), textcoords="offset points")
    axes.axhline(GOAL, linestyle="--", linewidth=1, color="grey")
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("interactions")
    axes.set_ylabel("answers in the style the user likes")
    axes.set_title("60 fixed requests, asked of each version while the chat goes on")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
