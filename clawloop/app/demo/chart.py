"""Draws the chart of a demo: match rate and training steps over interactions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from clawloop.app.demo.comparison import BAND, summarise
from clawloop.app.demo.recipes import Method
from clawloop.app.demo.report import GOAL, RunReport

_COLOURS = {
    Method.BINARY: "#d1495b",
    Method.OPD: "#edae49",
    Method.COMBINED: "#00798c",
    Method.HYBRID: "#6a4c93",
    Method.HINDSIGHT: "#003d5b",
}
# More version labels would overlap.
_MAX_LABELLED = 12


def draw_chart(path: Path, runs: Sequence[RunReport]) -> None:
    """Write a PNG: match of each run above, with mean and band for several runs of a method; steps below."""
    # Not pyplot, which looks for a display and keeps a reference to the figure.
    figure = Figure(figsize=(8, 6.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_means(above, below, runs)
    for run in runs:
        _draw_run(above, run, alone=len(runs) == 1)
    for flip in {run.flipped_at for run in runs if run.flipped_at is not None}:
        for axes in (above, below):
            axes.axvline(flip, linestyle=":", linewidth=1, color="black")
        above.annotate("the user's preference flips", (flip, 0.02), (4, 0), textcoords="offset points")
    above.axhline(GOAL, linestyle="--", linewidth=1, color="grey")
    above.set_ylim(0, 1.08)
    above.yaxis.set_major_formatter(PercentFormatter(1.0))
    above.set_ylabel("answers in the style the user likes")
    above.set_title(_title(runs))
    above.legend(loc="lower right")
    below.set_ylabel("steps")
    below.set_xlabel("interactions")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _draw_means(above: Axes, below: Axes, runs: Sequence[RunReport]) -> None:
    for method, summary in summarise(runs).items():
        counts = [point.interactions for point in summary.curve]
        colour = _COLOURS[Method(method)]
        # A version answers until the next one is active: draw steps, not slopes.
        below.step(counts, [point.steps for point in summary.curve], where="post", color=colour)
        if len(runs) == 1:
            continue
        label = method if summary.runs == 1 else f"{method}, {summary.runs} users"
        above.step(counts, [point.match for point in summary.curve], where="post", color=colour, label=label)
        least, most = [point.match_least for point in summary.curve], [point.match_most for point in summary.curve]
        above.fill_between(counts, least, most, step="post", color=colour, alpha=0.15, linewidth=0)


def _draw_run(axes: Axes, run: RunReport, *, alone: bool) -> None:
    counts, matches = [one.interactions for one in run.evaluations], [one.match for one in run.evaluations]
    colour = _COLOURS[Method(run.method)]
    if not alone:
        axes.plot(counts, matches, ".", color=colour, alpha=0.35, markersize=4)
        return
    axes.plot(counts, matches, "o-", color=colour, markersize=4, label=run.method)
    if run.model is not None:
        facts = [one.exact for one in run.evaluations]
        axes.plot(counts, facts, "s--", color="grey", markersize=3, label="facts of the base model kept")
    if len(run.evaluations) <= _MAX_LABELLED:
        for one in run.evaluations:
            axes.annotate(f"v{one.version}", (one.interactions, one.match), (0, 7), textcoords="offset points")


def _title(runs: Sequence[RunReport]) -> str:
    asked = sorted({one.requests for run in runs for one in run.evaluations})
    versions = "versions" if any(run.measure_every > 1 for run in runs) else "each version"
    title = f"{' to '.join(map(str, asked))} fixed requests, asked of {versions} while the chat goes on"
    return title if len(runs) == 1 else f"{title}\nline: mean of the runs; band: {BAND}"
