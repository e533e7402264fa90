"""A vLLM that nothing else belongs to, started as `clawloop up` starts it: it scores and samples what a test asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clawloop.app.layout import memory as memory_module
from clawloop.app.layout.memory import Serving
from clawloop.app.layout.model_folder import read_model_shape
from clawloop.app.layout.request import Limits, Request, TrainingNeeds
from clawloop.app.layout.table import cpu_arguments, engine_arguments, engine_environment
from clawloop.app.local.checks import choose_port
from clawloop.app.local.machine import find_gpus
from clawloop.app.local.services.vllm import EngineOptions, launch, read_model
from clawloop.app.local.supervision.supervisor import Launch
from clawloop.training.options import Dtype

MIB = 2**20
_CONTEXT = 2048
_START_SECONDS = 900.0
_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Start:
    """One way to start an engine.

    Args:
        cache: bytes of its KV cache.
        loras, rank: its slots.
        dtype: of what is computed.
        environment: variables of vLLM's own.
        further: arguments of vLLM's own.
    """

    model: Path
    cache: int = 512 * MIB
    loras: int = 2
    rank: int = 16
    dtype: Dtype = "bfloat16"
    environment: tuple[tuple[str, str], ...] = ()
    further: tuple[str, ...] = ()

    @property
    def serving(self) -> Serving:
        return replace(memory_module.ON_CPU, seqs=_REQUESTS)

    def launch(self, port: int) -> Launch:
        shape = read_model_shape(self.model)
        limits = Limits(
            max_model_len=_CONTEXT, max_sample_tokens=_CONTEXT, max_loras=self.loras, max_lora_rank=self.rank
        )
        asked = Request(model=shape, limits=limits, gpus=None, memory=0, training=TrainingNeeds(), dtype=self.dtype)
        planned = engine_arguments(asked, self.serving, gpus=0, with_lora=True)
        planned += cpu_arguments(self.cache)
        environment = engine_environment(()) | dict(self.environment)
        return launch(read_model(self.model), EngineOptions(port, planned, environment, self.further), os.environ)


def used_on_gpu() -> int:
    """Of the first GPU, as nvidia-smi says."""
    gpu = find_gpus(os.environ)[0]
    return gpu.bytes - gpu.free


class RunningEngine:
    """An engine, by its URL."""

    def __init__(self, url: str, model: str):
        self._url = url
        self._model = model

    def ask(self) -> None:
        """Requests that fill a context, all at the same time."""
        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(self._complete, range(_REQUESTS)))

    def load(self, name: str, adapter: Path) -> None:
        self._post({"lora_name": name, "lora_path": str(adapter)}, "/v1/load_lora_adapter")

    def score(self, ids: list[int], adapter: str | None = None) -> list[float]:
        """The log-prob of each token but the first, given those before it, by a loaded adapter or the base model."""
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = json.loads(self._post(asked | ({} if adapter is None else {"model": adapter})))
        choices: list[dict[str, list[dict[str, dict[str, float]]]]] = answer["choices"]
        places = choices[0]["prompt_logprobs"][1:]
        return [place[str(token)]["logprob"] for token, place in zip(ids[1:], places, strict=True)]

    def sample(self, prompt: list[int], tokens: int, adapter: str | None = None) -> tuple[list[int], list[float]]:
        """A reply's tokens and their log-probs."""
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
        named = {"return_token_ids": True} | ({} if adapter is None else {"model": adapter})
        [choice] = json.loads(self._post(asked | named))["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def _complete(self, number: int) -> None:
        prompt = [100 + (number + place) % 300 for place in range(_CONTEXT - 16)]
        self._post({"prompt": prompt, "max_tokens": 8, "logprobs": 1, "temperature": 0.6})

    def _post(self, asked: Mapping[str, object], path: str = "/v1/completions") -> str:
        body = {"model": self._model, **asked} if path == "/v1/completions" else asked
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_START_SECONDS) as answer:
            content: str = answer.read().decode()
        return content


@contextmanager
def running_engine(start: Start, log: Path) -> Iterator[RunningEngine]:
    port = choose_port("vLLM", "127.0.0.1", 0, "")
    with running_launch(start.launch(port), port, start.model.resolve().name, log) as memory_module:
        yield memory_module


@contextmanager
def running_launch(started: Launch, port: int, model: str, log: Path) -> Iterator[RunningEngine]:
    """A vLLM of this command, from when it answers until the end of the block.

    Args:
        model: the name it serves.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            started.command, env=dict(started.environment), stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log)
        yield RunningEngine(url, model)
    finally:
        # Its own session: the workers would outlive the server.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}; its log is {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"vLLM was not ready within {_START_SECONDS:.0f} s; its log is {log}")
