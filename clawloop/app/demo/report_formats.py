"""Formats a report as JSON, as one line, as a terminal table and as Markdown; reads the JSON back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from textwrap import wrap

from pydantic import TypeAdapter, ValidationError

from clawloop.app.demo.comparison import BAND, TEST, Difference, MethodSummary, Spread, differences, summarise
from clawloop.app.demo.report import Evaluation, RunReport
from clawloop.app.demo.sessions import FEW_REQUESTS, Scores
from clawloop.core.errors import SetupError

_RUNS = TypeAdapter(list[RunReport])
_LABELS = {
    "interactions_to_90": "90 % after",
    "match_after": "match after",
    "match_held": "match held",
    "exact_least": "least right content",
    "relearned_after": "learned again after",
}
_COUNTS = ("interactions_to_90", "relearned_after")
_MISSING = "–"
_SHOWN_CHARACTERS = 240  # of a reply
_WIDTH = 80


def as_json(runs: Sequence[RunReport], seconds: float) -> str:
    """Return the content of `demo-report.json`.

    Args:
        seconds: wall time of all runs, setup included.
    """
    rows = [asdict(run) for run in runs]
    reached = [run.interactions_to_90 for run in runs if run.interactions_to_90 is not None]
    summary = {
        "runs": len(runs),
        "reached_90": len(reached),
        "match_before": round(fmean(run.match_before for run in runs), 3),
        "match_after": round(fmean(run.match_after for run in runs), 3),
        "interactions_to_90_median": median(reached) if reached else None,
        "exact_rate_least": min(run.exact_rate for run in runs),
        "requests_failed": sum(run.requests_failed for run in runs),
        "faults": sum(sum(run.faults.values()) for run in runs),
        "seconds": round(seconds, 1),
        "seconds_setup": runs[0].seconds_setup,
        "band": BAND,
        "methods": {method: asdict(one) for method, one in summarise(runs).items()},
        "test": TEST,
        "differences": [asdict(one) for one in differences(runs)],
    }
    top = {key: value for key, value in rows[0].items() if key != "evaluations"} if len(rows) == 1 else {}
    return json.dumps({**top, "runs": rows, "summary": summary}, indent=2) + "\n"


def read_report(path: Path) -> tuple[list[RunReport], float]:
    """Return the runs of a `demo-report.json` and their total seconds.

    Raises:
        SetupError: the file cannot be read, is no report, or was written by another release.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _RUNS.validate_python(content["runs"]), float(content["summary"]["seconds"])
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise SetupError(f"{path}: runs.{where}: {error.errors()[0]['msg']}; is it of another release?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path} is no demo-report.json") from error


def summary_line(runs: Sequence[RunReport], seconds: float) -> str:
    """Return the summary that the demo prints when it ends."""
    failed = sum(run.requests_failed for run in runs)
    if len(runs) == 1:
        (run,) = runs
        when = f"90 % after {run.interactions_to_90}" if run.interactions_to_90 is not None else "90 % not reached"
        text = f"match {run.match_before:.0%} → {run.match_after:.0%} in {run.interactions} interactions, {when}"
        if run.flipped_at is not None:
            again = "not learned again" if run.relearned_after is None else f"learned again after {run.relearned_after}"
            text += f", flipped at {run.flipped_at}, {again}"
    else:
        reached = sum(run.interactions_to_90 is not None for run in runs)
        before, after = fmean(run.match_before for run in runs), fmean(run.match_after for run in runs)
        text = f"{reached} of {len(runs)} runs reached 90 %, match {before:.0%} → {after:.0%} on average"
    exact = min(run.exact_rate for run in runs)
    killed = sum(sum(run.faults.values()) for run in runs)
    faults = f" while parts were killed {killed} times;" if killed else ""
    return (
        f"{text}; right content {exact:.0%}; requests failed: {failed};{faults}{_gave_up(runs)}"
        f" {seconds:.0f} s in all, {runs[0].seconds_setup:.0f} s of them setting up"
    )


def taste_lines(run: RunReport) -> list[str]:
    """Return what a run with a taste shows at its end: frozen, trained and notes, and replies before and after.

    Empty for a run of the toy.
    """
    found = run.taste
    if found is None:
        return []
    frozen, trained = run.evaluations[0], run.evaluations[-1]
    rows: list[tuple[str, Evaluation | Scores]] = [
        ("frozen", frozen),
        (f"version {trained.version}", trained),
        (f"frozen, {found.note_lines} notes", found.notes),
    ]
    lines = [f"taste: {found.taste} ({found.rule}), on {frozen.requests} held-out requests"]
    lines += [
        f"  {name:<18} in taste {row.match:4.0%}, facts {row.exact:4.0%}, words {row.words:3.0f},"
        f" cut {row.cut:4.0%}, loops {row.loops}"
        for name, row in rows
    ]
    if (told := found.told.get(found.taste)) is not None:
        lines.append(f"  {'frozen, told once':<18} in taste {told:4.0%}, on {FEW_REQUESTS} of them")
    others = [
        f"{name} {before:.0%} → {after:.0%}" for name, (before, after) in found.tastes.items() if name != found.taste
    ]
    if others:
        what = f"not asked for, frozen → version {trained.version}: {', '.join(others)}"
        lines += wrap(what, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    for example in found.examples:
        lines += [
            f"> {example.request}",
            f"  before: {_shortened(example.before)}",
            f"  after:  {_shortened(example.after)}",
        ]
    return lines


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN_CHARACTERS else f"{words[:_SHOWN_CHARACTERS]} …"


def _gave_up(runs: Sequence[RunReport]) -> str:
    reasons = [run.gave_up for run in runs if run.gave_up is not None]
    if not reasons:
        return ""
    return f" {reasons[0]};" if len(runs) == 1 else f" {len(reasons)} of the runs gave up waiting;"


def comparison_lines(runs: Sequence[RunReport]) -> list[str]:
    """Return a table of the methods and a line for each difference; empty for one run."""
    if len(runs) == 1:
        return []
    rows = _method_rows(runs)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*table, *difference_lines(runs)]


def difference_lines(runs: Sequence[RunReport]) -> list[str]:
    """Return one sentence for each figure and pair of methods, or a single one if there are too few runs to test."""
    compared = differences(runs)
    if compared and all(difference.within_noise is None for difference in compared):
        return ["too few runs of each method to tell a difference from noise"]
    return [_difference_line(difference) for difference in compared]


def as_markdown(runs: Sequence[RunReport]) -> str:
    """Return a Markdown table with a row for each run, after the comparison of methods for several runs."""
    head = ["seed", "method", "interactions", "match before", "match after", "90 % after", "match held"]
    head += ["match kept", "least right content", "requests failed", "versions", "seconds"]
    rows = [head]
    for run in runs:
        cells = [str(run.seed), run.method, str(run.interactions), f"{run.match_before:.0%}", f"{run.match_after:.0%}"]
        cells += [_count(run.interactions_to_90), _share(run.match_held), _share(run.match_kept)]
        cells += [_share(run.exact_least), str(run.requests_failed), str(run.versions), f"{run.seconds:.0f}"]
        rows.append(cells)
    lines = _markdown(rows)
    if len(runs) > 1:
        bullets = [f"- {line}" for line in difference_lines(runs)]
        lines = [*_markdown(_method_rows(runs)), "", *bullets, *([""] if bullets else []), *lines]
    return "\n".join(lines) + "\n"


def _method_rows(runs: Sequence[RunReport]) -> list[list[str]]:
    summaries = summarise(runs)
    head = ["method", "reached 90 %", "90 % after", "match before", "match after", "match held", "least right content"]
    head += ["steps", "interactions", "requests failed", "seconds", "seconds per interaction"]
    flipped = any(summary.relearned_after is not None for summary in summaries.values())
    rows = [head + ([_LABELS["relearned_after"]] if flipped else [])]
    for method, summary in summaries.items():
        cells = [
            method,
            f"{summary.interactions_to_90.known} of {summary.runs}",
            _spread(summary.interactions_to_90, summary.runs),
        ]
        cells += [f"{summary.match_before:.0%}", f"{summary.match_after:.0%}", _share(summary.match_held)]
        cells += [
            _share(summary.exact_least),
            f"{summary.steps:g}",
            str(summary.interactions),
            str(summary.requests_failed),
        ]
        cells += [f"{summary.seconds:.0f}", f"{summary.seconds_per_interaction:.2f}"]
        rows.append(cells + ([_relearned(summary)] if flipped else []))
    return rows


def _relearned(summary: MethodSummary) -> str:
    if summary.relearned_after is None:
        return _MISSING
    return f"{_spread(summary.relearned_after, summary.runs)}, {summary.relearned_after.known} of {summary.runs}"


def _spread(spread: Spread, runs: int) -> str:
    """Format the median, with the range in brackets."""
    if runs == 1 or spread.known == 0:
        return _count(spread.median)
    return f"{_count(spread.median)} ({_count(spread.least)} to {_count(spread.most)})"


def _difference_line(difference: Difference) -> str:
    first, second = (_count(value) if difference.of in _COUNTS else _share(value) for value in difference.medians)
    text = f"{difference.between[0]} and {difference.between[1]}, {_LABELS[difference.of]}: {first} and {second}"
    if difference.within_noise is None or difference.p is None:
        return f"{text}; too few runs to tell"
    return f"{text}; {'within noise' if difference.within_noise else 'more than noise'} (p = {difference.p:.3f})"


def _count(value: float | None) -> str:
    return _MISSING if value is None else f"{value:g}"


def _share(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.0%}"


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = rows
    return [_row(head), _row(["---"] * len(head)), *map(_row, others)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
