"""Real vLLM engines for tests, on the random tiny model. Every test that uses one is marked `engine`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from clawloop.local.checks import choose_port
from clawloop.local.services.vllm import Device, EngineOptions, launch, read_model
from clawloop.local.supervision.supervisor import guarded
from clawloop.local.tiny_model import ensure_tiny_model
from tests.e2e.up import Up, up

# 40 s on two idle cores, more when tests share them or several start at once.
START_SECONDS = 300
ENGINE_FIXTURES = {"engine_url", "calmed_engine_url"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINE_FIXTURES & _fixtures(item):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                # The first of them also waits for the engine.
                item.add_marker(pytest.mark.timeout(START_SECONDS + 300))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def calmed_model_path(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with flatter logits.

    Random weights make logits of 6 and more, where one step of bf16 is 0.03: two right implementations then differ by
    more than a test's bound. Trained models are sure of most tokens and hardly differ (3e-4, measured).
    """
    target = tmp_path_factory.mktemp("calmed") / "tiny-random"
    shutil.copytree(tiny_model_path, target)
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"] *= 0.1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="session", autouse=True)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Every engine that the chosen tests will ask for, begun with the first test of this folder.

    An engine keeps one core busy for most of a minute before it answers; they do that side by side, and while tests
    run that need none of them. Each takes 2.5 GB.
    """
    with ExitStack() as running:
        known = Engines(request, tmp_path_factory.mktemp("engines"), running)
        for name in sorted(ENGINE_FIXTURES & _wanted(request)):
            known.begin(name)
        yield known


def _wanted(request: pytest.FixtureRequest) -> set[str]:
    return {name for item in request.session.items for name in _fixtures(item)}


@pytest.fixture(scope="session")
def engine_url(engines: Engines, request: pytest.FixtureRequest) -> str:
    """The one engine that tests share: float32, started as `clawloop up` starts it."""
    url = engines.begin("engine_url").ready()
    if "begun_up" in _wanted(request):
        request.getfixturevalue("begun_up")  # it takes a minute as well, and is needed last
    return url


@pytest.fixture(scope="session")
def calmed_engine_url(engines: Engines) -> str:
    """An engine of a careless operator: `calmed_model_path` in bf16, and the model's own sampling settings apply."""
    return engines.begin("calmed_engine_url").ready()


@pytest.fixture(scope="session")
def begun_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`clawloop up` on a folder of its own, which one test uses and ends."""
    folder = tmp_path_factory.mktemp("up")
    with up(folder / "data", folder / "up.log") as begun:
        yield begun


class Engines:
    """The engines of this session, by the fixture that hands out their URL."""

    def __init__(self, request: pytest.FixtureRequest, logs: Path, running: ExitStack) -> None:
        self._request = request
        self._logs = logs
        self._running = running
        self._begun: dict[str, BegunEngine] = {}

    def begin(self, name: str) -> BegunEngine:
        """The engine, begun now if it is not."""
        if name not in self._begun:
            port = choose_port("vLLM", "127.0.0.1", 0, "")
            if name == "engine_url":
                model, options = "tiny_model_path", EngineOptions(port, "float32", 4096)
            else:
                model, options = "calmed_model_path", EngineOptions(port, "bfloat16", 4096, guard_sampling=False)
            folder: Path = self._request.getfixturevalue(model)
            begun = begun_engine(folder, options, self._logs / f"vllm-{port}.log")
            self._begun[name] = self._running.enter_context(begun)
        return self._begun[name]


@dataclass(frozen=True)
class BegunEngine:
    """An engine that starts, or has."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self) -> str:
        """Its URL, once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self.url
            except (urllib.error.URLError, OSError):
                tail = self.log.read_text(errors="replace")[-4000:]
                assert self.process.poll() is None, f"the engine ended: {tail}"
                assert time.monotonic() < deadline, f"the engine is not ready after {START_SECONDS} s: {tail}"
                time.sleep(0.3)


@contextmanager
def begun_engine(model: Path, options: EngineOptions, log: Path) -> Iterator[BegunEngine]:
    started = launch(read_model(model), options, Device.CPU, dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    command = guarded(started.command, signal.SIGTERM, timedelta(seconds=3))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(started.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield BegunEngine(f"http://127.0.0.1:{options.port}", process, log)
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def running_engine(model: Path, options: EngineOptions, log: Path) -> Iterator[str]:
    """The URL of an engine that answers."""
    with begun_engine(model, options, log) as begun:
        yield begun.ready()
