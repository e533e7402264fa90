"""How tests and benchmarks start one vLLM on the CPU: as the layout of an engine alone says."""

from __future__ import annotations

from pathlib import Path

from clawloop.app.layout.memory import Role
from clawloop.app.local.machine import Device
from clawloop.app.local.model_layout import ModelOptions, lay_out
from clawloop.app.local.services.vllm import EngineOptions

_UNLIMITED = 2**50


def engine_options(
    model: Path,
    port: int,
    *,
    dtype: str = "float32",
    max_model_len: int = 4096,
    guard_sampling: bool = True,
    policies: int = 1,
    max_loras: int | None = None,
) -> EngineOptions:
    wanted = ModelOptions(
        device=Device.CPU,
        dtype=dtype,
        max_model_len=max_model_len,
        policies=policies,
        max_loras=max_loras,
        train=False,
        memory=_UNLIMITED,
    )
    layout = lay_out(wanted, model, None, {})
    [engine] = [process for process in layout.processes if process.role is Role.ENGINE]
    return EngineOptions(port, engine.arguments, engine.environment, guard_sampling=guard_sampling)
