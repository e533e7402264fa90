"""The toy that learns to work in a terminal."""

from __future__ import annotations

from pathlib import Path

from clawloop.demo.practice.toy import Toy
from clawloop.demo.terminal.lessons import COURSE
from clawloop.demo.terminal.simulation import simulate_terminal
from clawloop.environments.terminal.environment import TerminalEnvironment

TERMINAL = Toy(
    environment=TerminalEnvironment.name,
    make=TerminalEnvironment,
    simulate=simulate_terminal,
    base_model="clawloop-terminal",
    folder=Path(__file__).with_name("model"),
    course=COURSE,
    max_tokens=48,
    batch_groups=8,
    versions=30,
)
