"""Real vLLM engines for tests, on the random tiny model. Every test that uses one is marked `engine`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from clawloop.local.checks import choose_port
from clawloop.local.supervisor import guarded
from clawloop.local.tiny_model import ensure_tiny_model
from clawloop.local.vllm import Device, EngineOptions, launch, read_model

# 40 s on two idle cores, more when tests share them.
START_SECONDS = 240
ENGINE_FIXTURES = {"engine_url", "start_engine"}
StartEngine = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINE_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                # The first of them also waits for the engine.
                item.add_marker(pytest.mark.timeout(START_SECONDS + 300))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def start_engine(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts one more engine, ended with the session: `start_engine(dtype="bfloat16", guard_sampling=False)`.

    Returns its URL. Each takes about 40 s and 2.5 GB.
    """
    logs = tmp_path_factory.mktemp("engines")
    with ExitStack() as running:

        def start(
            dtype: str = "float32",
            guard_sampling: bool = True,
            max_model_len: int = 4096,
            model: Path = tiny_model_path,
        ) -> str:
            port = choose_port("vLLM", "127.0.0.1", 0, "")
            options = EngineOptions(port, dtype, max_model_len, guard_sampling)
            return running.enter_context(running_engine(model, options, logs / f"vllm-{port}.log"))

        yield start


@pytest.fixture(scope="session")
def engine_url(start_engine: StartEngine) -> str:
    """The one engine that tests share: float32, started as `clawloop up` starts it."""
    return start_engine()


@contextmanager
def running_engine(model: Path, options: EngineOptions, log: Path) -> Iterator[str]:
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
    url = f"http://127.0.0.1:{options.port}"
    try:
        _wait_until_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            tail = log.read_text(errors="replace")[-4000:]
            assert process.poll() is None, f"the engine ended: {tail}"
            assert time.monotonic() < deadline, f"the engine is not ready after {START_SECONDS} s: {tail}"
            time.sleep(0.3)
