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

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services.vllm import EngineOptions, launch, read_model
from clawloop.app.local.supervision.supervisor import guarded
from clawloop.app.local.tiny_model import ensure_tiny_model
from tests.conftest import ENGINE_FIXTURES
from tests.e2e.toy import CONTEXT_TOKENS, toy_model
from tests.engine_options import engine_options

# 40 s on two idle cores; ten times that has been seen where others took them.
START_SECONDS = 900
# The model of each fixture that is an engine's URL.
_MODELS = {
    "engine_url": "tiny_model_path",
    "careless_engine_url": "flat_model_path",
    "toy_engine_url": "toy_model_path",
    "strict_engine_url": "strict_model_path",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINE_FIXTURES & _fixtures(item):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                # The first such test also waits for the engine to start.
                item.add_marker(pytest.mark.timeout(START_SECONDS + 300))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def flat_model_path(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with flatter logits.

    Random weights give logits of 6 and more, where one bf16 step is 0.03: two correct implementations then differ by
    more than a test's tolerance. Trained models are certain of most tokens and differ by 3e-4 (measured).
    """
    target = tmp_path_factory.mktemp("flat") / "tiny-random"
    shutil.copytree(tiny_model_path, target)
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"] *= 0.1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="session")
def strict_model_path(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that takes one system message, at the beginning."""
    folder = tmp_path_factory.mktemp("strict") / tiny_model_path.name
    shutil.copytree(tiny_model_path, folder)
    template = Path(__file__).parents[1] / "unit" / "families" / "templates" / "strict.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="session")
def toy_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines that the selected tests use, started at the first test that uses one.

    An engine keeps one core busy for most of a minute before it answers; engines start in parallel. Each takes 2.5 GB.
    """
    with ExitStack() as running:
        engines = Engines(request, tmp_path_factory.mktemp("engines"), running)
        for name in sorted(ENGINE_FIXTURES & _used_fixtures(request)):
            engines.start(name)
        yield engines


def _used_fixtures(request: pytest.FixtureRequest) -> set[str]:
    return {name for item in request.session.items for name in _fixtures(item)}


@pytest.fixture(scope="session")
def engine_url(engines: Engines) -> str:
    """The engine that tests share: float32, with the flags of `clawloop up`."""
    return engines.start("engine_url").ready()


@pytest.fixture(scope="session")
def careless_engine_url(engines: Engines) -> str:
    """An engine without `guard_sampling`: `flat_model_path` in bf16, with the model's own sampling defaults."""
    return engines.start("careless_engine_url").ready()


@pytest.fixture(scope="session")
def toy_engine_url(engines: Engines) -> str:
    """An engine of the demo's model, which is also its own judge."""
    return engines.start("toy_engine_url").ready()


@pytest.fixture(scope="session")
def strict_engine_url(engines: Engines) -> str:
    """A vLLM whose model's template takes few orders of roles."""
    return engines.start("strict_engine_url").ready()


class Engines:
    """The engines of this test session, by the name of the fixture that returns their URL."""

    def __init__(self, request: pytest.FixtureRequest, logs: Path, running: ExitStack) -> None:
        self._request = request
        self._logs = logs
        self._running = running
        self._started: dict[str, StartedEngine] = {}

    def start(self, name: str) -> StartedEngine:
        """Start the engine unless it runs."""
        if name not in self._started:
            port = choose_port("vLLM", "127.0.0.1", 0, "")
            folder: Path = self._request.getfixturevalue(_MODELS[name])
            if name in ("engine_url", "strict_engine_url"):
                options = engine_options(folder, port)
            elif name == "toy_engine_url":
                options = engine_options(folder, port, max_model_len=CONTEXT_TOKENS)
            else:
                options = engine_options(folder, port, dtype="bfloat16", guard_sampling=False)
            engine = started_engine(folder, options, self._logs / f"vllm-{port}.log")
            self._started[name] = self._running.enter_context(engine)
        return self._started[name]


@dataclass(frozen=True)
class StartedEngine:
    """An engine process, ready or not."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self) -> str:
        """Wait until the engine answers; returns its URL."""
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
def started_engine(model: Path, options: EngineOptions, log: Path) -> Iterator[StartedEngine]:
    started = launch(read_model(model), options, dict(os.environ) | {"OMP_NUM_THREADS": "1"})
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
        yield StartedEngine(f"http://127.0.0.1:{options.port}", process, log)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def running_engine(model: Path, options: EngineOptions, log: Path) -> Iterator[str]:
    """Run an engine; yields its URL once it answers."""
    with started_engine(model, options, log) as engine:
        yield engine.ready()
