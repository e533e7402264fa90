"""Runs `clawloop up` as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawloop.app.local.tiny_model import ensure_tiny_model

# The tiny model's engine takes 50 s on two idle cores; ten times that has been seen where others took them.
START_SECONDS = 900
FREE_PORTS = [f"--{part}port=0" for part in ("", "temporal-", "temporal-ui-", "engine-", "postgres-")]


@dataclass
class Up:
    process: subprocess.Popen[bytes]
    data: Path
    output: Path

    def line(self, pattern: str, seconds: float = START_SECONDS) -> str:
        """The first group of the first printed line that matches; waits for it."""
        deadline = time.monotonic() + seconds
        while True:
            printed = self.output.read_text(errors="replace")
            if match := re.search(pattern, printed, re.MULTILINE):
                return match.group(1)
            assert self.process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.1)


@contextmanager
def up(
    data: Path, output: Path, *options: str, settings: Mapping[str, str] | None = None, tiny: bool = True
) -> Iterator[Up]:
    """
    Args:
        options: of the command, beside the folder and the ports.
        settings: environment variables.
        tiny: without `--model` it gets the tiny model; else the one that the command chooses.
    """
    if tiny and not any(option.startswith("--model") for option in options):
        options = (*options, "--model", str(ensure_tiny_model(data / "models")))
    with output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "clawloop.app.cli.main", "up", "--data", str(data), *FREE_PORTS, *options],
            env=_environment() | dict(settings or {}),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
        )
    try:
        yield Up(process, data, output)
    finally:
        # The guards end every part once `up` is gone.
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """This process's environment without the variables that make `up` use external parts or another model."""
    removed = {"DATABASE_URL", "TEMPORAL_ADDRESS", "CLAWLOOP_ENGINES", "CLAWLOOP_DATA", "CLAWLOOP_MODEL"}
    return {name: value for name, value in os.environ.items() if name not in removed} | {"OMP_NUM_THREADS": "1"}
