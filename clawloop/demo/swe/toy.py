"""The toy that learns to repair a function in a repository."""

from __future__ import annotations

from pathlib import Path

from clawloop.demo.practice.toy import Toy
from clawloop.demo.swe.lessons import COURSE
from clawloop.demo.swe.simulation import simulate_swe
from clawloop.environments.swe.environment import SweEnvironment

SWE = Toy(
    environment=SweEnvironment.name,
    make=SweEnvironment,
    simulate=simulate_swe,
    base_model="clawloop-swe",
    folder=Path(__file__).with_name("model"),
    course=COURSE,
    max_tokens=48,
    batch_groups=8,
    versions=30,
)
