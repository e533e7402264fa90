"""Draws what an evaluation's prompts cost over time: their tokens, session by session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from clawloop.app.evaluation.figures import RunFigure
from clawloop.core.errors import SetupError


def tokens_by_session(runs: Sequence[RunFigure]) -> list[float]:
    """Tokens of the prompt of each session's first request, as means over the runs that came so far."""
    longest = max((len(run.tokens) for run in runs), default=0)
    return [fmean(run.tokens[at] for run in runs if at < len(run.tokens)) for at in range(longest)]


def draw_tokens(path: Path, runs: Sequence[RunFigure]) -> None:
    """Write a PNG: a panel for each user, and in it a line for each arm.

    Raises:
        SetupError: it cannot be written.
    """
    users = list(dict.fromkeys(run.user for run in runs))
    # Not pyplot, which looks for a display and keeps a reference to the figure.
    figure = Figure(figsize=(8, 1 + 2.2 * max(1, len(users))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("tokens of the prompt of a session's first request, mean over seeds")
    for at, user in enumerate(users, start=1):
        axes = figure.add_subplot(len(users), 1, at)
        for arm in dict.fromkeys(run.arm for run in runs):
            tokens = tokens_by_session([run for run in runs if (run.arm, run.user) == (arm, user)])
            axes.plot(range(1, len(tokens) + 1), tokens, ".-", label=arm)
        axes.set_title(user)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if at == 1:
            axes.legend()
        if at == len(users):
            axes.set_xlabel("session")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}; choose another file: --chart") from error
