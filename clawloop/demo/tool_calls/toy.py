"""The toy that learns to call a tool."""

from __future__ import annotations

from pathlib import Path

from clawloop.demo.practice.toy import Toy
from clawloop.demo.tool_calls.lessons import COURSE
from clawloop.demo.tool_calls.simulation import ToolCallSimulation
from clawloop.environments.tool_call.environment import ToolCallEnvironment

TOOL_CALLS = Toy(
    environment=ToolCallEnvironment.name,
    make=ToolCallEnvironment,
    simulate=ToolCallSimulation,
    base_model="clawloop-tool-calls",
    folder=Path(__file__).with_name("model"),
    course=COURSE,
    max_tokens=32,
    batch_groups=4,
    versions=20,
)
