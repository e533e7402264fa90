"""What an environment does between a model's replies, in this process: for measuring a model before any engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from clawloop.environments.agent import AgentLoop

State = TypeVar("State")


class Simulation(Protocol[State]):
    """All attempts of a batch make a turn together, so that one sandbox can run what they all call for."""

    @property
    def agent(self) -> AgentLoop: ...

    def begin(self, task_id: str) -> tuple[State, str]:
        """The task at its beginning, and what is asked."""

    def run(self, states: Sequence[State], arguments: Sequence[str]) -> list[str]:
        """What each one's call of the tool returns; it changes the states."""

    def rewards(self, states: Sequence[State], replies: Sequence[str]) -> list[float]:
        """Of finished attempts; their last replies called nothing."""
