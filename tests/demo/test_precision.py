"""The type in which engine and trainer of every demo compute: float32, but on a GPU, for vLLM's sake, bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clawloop.app.demo import practice
from clawloop.app.demo import run as chat
from clawloop.app.demo.plan import plan
from clawloop.app.demo.scoreboard import ScoreLines
from clawloop.app.demo.toys import TOYS
from clawloop.app.layout.memory import Role
from clawloop.app.local import model_layout
from clawloop.app.local.machine import Device
from clawloop.app.local.model_layout import lay_out, widest_dtype
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import UpOptions
from tests.local import fake_gpus

CHAT = "chat"
DEMOS = (CHAT, *TOYS)
TYPES = {Device.CPU: "float32", Device.CUDA: "bfloat16"}
Demo = Callable[[str], Coroutine[Any, Any, dict[Role, str]]]


async def prepare(deployment: Deployment) -> dict[str, str]:
    raise AssertionError


def asked_of(name: str, folder: Path, environment: dict[str, str]) -> Coroutine[Any, Any, object]:
    """The demo of this name."""
    board, setup = ScoreLines(Console(file=StringIO())), chat.DemoSetup(folder, folder, environment)
    if name == CHAT:
        chats = plan(None, None, "combined", 64, paced=True, batch=8)
        return chat.run(chat.DemoOptions(chats, setup), board, prepare)
    episodes = practice.PracticeOptions(toy=TOYS[name], seeds=[1], versions=1, minutes=1, setup=setup)
    return practice.practise(episodes, board, prepare)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """Runs a demo up to where its parts would start; gives the types that engine and trainer would be started with."""
    environment = fake_gpus.install(tmp_path / "gpus", 80)
    found: dict[Role, str] = {}

    async def run_up(options: UpOptions, *_: object, **__: object) -> None:
        assert options.model is not None
        layout = lay_out(options.models, options.model, options.recipe, options.environment)
        for process in layout.processes:
            if process.role is not Role.SERVICE:
                found[process.role] = process.arguments[process.arguments.index("--dtype") + 1]

    async def types(name: str) -> dict[Role, str]:
        await asked_of(name, tmp_path, environment)
        return found

    for module in (chat, practice):
        monkeypatch.setattr(module, "run_up", run_up)
    monkeypatch.setattr(practice.Bubblewrap, "find", lambda *_: None)  # type: ignore[attr-defined]
    return types


def set_up_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_layout, "environment_device", lambda: device)


@pytest.mark.parametrize("device", Device)
@pytest.mark.parametrize("name", DEMOS)
async def test_a_demo_computes_in_float32_and_on_a_gpu_in_bfloat16(
    name: str, device: Device, started: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_for(device, monkeypatch)
    assert await started(name) == {Role.ENGINE: TYPES[device], Role.TRAINER: TYPES[device]}


@pytest.mark.parametrize("device", Device)
def test_the_widest_type_is_that_of_the_environments_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_for(device, monkeypatch)
    assert widest_dtype() == TYPES[device]
