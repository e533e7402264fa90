"""vLLM on the CPU, started with and without a part of its memory: what differs is what the part takes; and on a GPU.

Used by `benchmarks.plan_memory`; `benchmarks.low_precision_engines` starts its engines in the same way.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from clawloop.layout import engine
from clawloop.layout.arguments import cache_of, engine_arguments, engine_environment
from clawloop.layout.engine import Serving
from clawloop.layout.model_folder import read_model_shape
from clawloop.layout.on_cpu import ENGINE_RUNTIME
from clawloop.layout.parts import PartName, Role
from clawloop.layout.request import Limits, Request, TrainingNeeds
from clawloop.local.checks import choose_port
from clawloop.local.machine import Device, find_gpus
from clawloop.local.model_layout import ModelOptions, lay_out
from clawloop.local.services.vllm import EngineOptions, launch, read_model
from clawloop.local.supervision.part import Launch
from clawloop.recipes.recipe import Recipe

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
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    environment: tuple[tuple[str, str], ...] = ()
    further: tuple[str, ...] = ()

    @property
    def serving(self) -> Serving:
        return replace(engine.on_cpu(_CONTEXT), seqs=_REQUESTS)

    def launch(self, port: int) -> Launch:
        shape = read_model_shape(self.model)
        limits = Limits(
            max_model_len=_CONTEXT, max_sample_tokens=_CONTEXT, max_loras=self.loras, max_lora_rank=self.rank
        )
        asked = Request(model=shape, limits=limits, gpus=None, memory=0, training=TrainingNeeds(), dtype=self.dtype)
        planned = engine_arguments(asked, self.serving, gpus=0, with_lora=True)
        planned += ("--no-enable-chunked-prefill", *cache_of(self.cache))
        environment = engine_environment(()) | dict(self.environment)
        return launch(read_model(self.model), EngineOptions(port, planned, environment, self.further), os.environ)


def compare(tiny: Path, model: Path, log: Path) -> dict[str, tuple[int, int]]:
    """Of each part: bytes as planned and as measured."""
    shape, b = read_model_shape(model), 2
    least = Start(tiny, cache=128 * MIB)
    plain, cached, wide = Start(model), Start(model, cache=1536 * MIB), Start(model, loras=4, rank=64)
    with running_engine(least, log) as running:
        runtime = running.bytes() - least.cache
    with running_engine(plain, log) as running:
        idle = running.bytes()
        running.clear_peaks()
        running.ask()
        reading = running.peak() - idle
    with running_engine(cached, log) as running:
        cache = running.bytes() - idle
    with running_engine(wide, log) as running:
        slots = running.bytes() - idle
    slots_of = {start: engine.lora_slots(shape, start.loras, start.rank, b) for start in (plain, wide)}
    weights = engine.weight_bytes(shape, b) + engine.packed_vocabulary(shape, b)
    return {
        "runtime": (ENGINE_RUNTIME, runtime),
        "base weights": (weights, idle - runtime - plain.cache - slots_of[plain]),
        "KV cache": (cached.cache - plain.cache, cache),
        "LoRA slots": (slots_of[wide] - slots_of[plain], slots),
        "reading and sampling": (engine.reading_bytes(shape, plain.serving, b), reading),
    }


@contextmanager
def engine_on_gpu(model: Path, log: Path, further: Sequence[str]) -> Iterator[dict[str, tuple[int, int]]]:
    """A vLLM that `clawloop up` would start on the only GPU, beside a trainer that is not there yet.

    Args:
        further: arguments of vLLM's own.

    Yields:
        Of what it holds beside its KV cache: bytes as planned and as measured.
    """
    layout = lay_out(ModelOptions(device=Device.CUDA), model, Recipe(name="combined"), os.environ)
    planned = next(process for process in layout.processes if process.role is Role.ENGINE)
    cache, before = planned.part(PartName.KV), used_on_gpu()
    port, facts = choose_port("vLLM", "127.0.0.1", 0, ""), read_model(model)
    started = launch(facts, EngineOptions(port, planned.arguments, planned.environment, tuple(further)), os.environ)
    with running_launch(started, port, facts.name, log) as running:
        ready = used_on_gpu() - before
        running.ask()
        asked = used_on_gpu() - before
        print(f"engine: a KV cache of {cache / MIB:.0f} MiB for {planned.cached_tokens} tokens", flush=True)
        beside = planned.bytes - cache
        yield {"ready, without cache": (beside, ready - cache), "after requests": (beside, asked - cache)}


def used_on_gpu() -> int:
    """Of the first GPU, as nvidia-smi says."""
    gpu = find_gpus(os.environ)[0]
    return gpu.bytes - gpu.free


class RunningEngine:
    """An engine's processes."""

    def __init__(self, pid: int, url: str, model: str):
        self._root = psutil.Process(pid)
        self._url = url
        self._model = model

    def bytes(self) -> int:
        """Of all its processes; pages that several have count once."""
        return sum(_field(process.pid, "smaps_rollup", "Pss") for process in self._all())

    def clear_peaks(self) -> None:
        for process in self._all():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak(self) -> int:
        """The most since peaks were cleared, were it in all processes at the same time; the worker has nearly all."""
        grown = sum(
            _field(process.pid, "status", "VmHWM") - _field(process.pid, "status", "VmRSS") for process in self._all()
        )
        return self.bytes() + grown

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

    def _all(self) -> Sequence[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]


@contextmanager
def running_engine(start: Start, log: Path) -> Iterator[RunningEngine]:
    port = choose_port("vLLM", "127.0.0.1", 0, "")
    with running_launch(start.launch(port), port, start.model.resolve().name, log) as engine:
        yield engine


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
        yield RunningEngine(process.pid, url, model)
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


def _field(pid: int, file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
