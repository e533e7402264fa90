"""A model of Qwen3-0.6B's exact shape, from `clawloop up` to a published version, in the memory that the plan said.

Its weights are random, so ratings are the signal. What Python, torch, vLLM and their threads take by themselves is
measured with the same work on a model of a megabyte; what comes on top of it is compared with the plan.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from clawloop.app.layout import memory as layout_memory
from clawloop.app.layout.model_folder import read_model_shape
from clawloop.app.layout.request import TrainingNeeds
from clawloop.app.local.tiny_model import ensure_tiny_model
from tests.e2e.up import Up, up
from tests.random_model import write_random_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(3600),
]

MIB = 2**20
SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 16, 1000, 64
CONTEXT = 1152
RANK = 16
OPTIONS = (
    "--dtype=bfloat16",
    f"--max-model-len={CONTEXT}",
    "--micro-batch-tokens=1",  # a sample at a time
)
RECIPE = f"""
name = "rated"
[signal]
hints = false
m = 1
[train]
batch_samples = {SAMPLES}
[train.advantage]
teacher_weight = 0.0
[train.lora]
rank = {RANK}
[train.optimiser]
lr = 1e-6
"""
ENGINE, TRAINER = "vllm.entrypoints.openai.api_server", "worker trainer"
# Another test may have the other core.
START_SECONDS, STEP_SECONDS = 900, 1800


@dataclass(frozen=True)
class Peaks:
    """The most memory that the processes of a part held, in bytes, and the time from the ratings to the version."""

    engine: int
    trainer: int
    seconds: float


def field(pid: int, file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


def processes(started: Up, program: str) -> list[int]:
    """The part that runs this program, and what is under it."""
    parts = psutil.Process(started.process.pid).children()
    [part] = [process for process in parts if program in " ".join(process.cmdline())]
    return [process.pid for process in (part, *part.children(recursive=True))]


def clear_peaks(started: Up, program: str) -> None:
    """While weights are read, pages of their file count as the process's, which the system takes back at will."""
    for pid in processes(started, program):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak(started: Up, program: str) -> int:
    """Since peaks were cleared; pages that several processes hold count once."""
    pids = processes(started, program)
    now = sum(field(pid, "smaps_rollup", "Pss") for pid in pids)
    return now + sum(field(pid, "status", "VmHWM") - field(pid, "status", "VmRSS") for pid in pids)


def prompt(tokenizer: Tokenizer, session: int) -> str:
    """A text of its own for each session, of about PROMPT_TOKENS with what the template adds."""
    text = f"{session} times, the user asks for a list of numbers."
    while len(tokenizer.encode(text).ids) < PROMPT_TOKENS - 12:
        text += f" {len(text) % 10}, then a friend counts the weather in Paris."
    return text


def learn(model: Path, folder: Path) -> Peaks:
    """Chat, rate each reply, and wait until the version that was learned from it answers."""
    folder.mkdir()
    recipe = folder / "rated.toml"
    recipe.write_text(RECIPE)
    options = (f"--model={model}", f"--recipe={recipe}", *OPTIONS)
    with up(folder / "data", folder / "up.log", *options, settings={"OMP_NUM_THREADS": "2"}) as started:
        url = started.line(r"gateway +(http://127\.0\.0\.1:\d+)/v1$", START_SECONDS)
        for part in ("vllm", "trainer", "combined-worker"):
            started.line(rf"({part} ready) at ", START_SECONDS)
        clear_peaks(started, ENGINE)
        keys = json.loads((started.data / "keys.json").read_text())
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        with (
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {keys['chat']}"}, timeout=900) as client,
            ThreadPoolExecutor(SAMPLES) as pool,
        ):
            prompts = [prompt(tokenizer, session) for session in range(SAMPLES)]
            replies = list(pool.map(lambda numbered: chat(client, *numbered), enumerate(prompts)))
            for number, reply in enumerate(replies):
                assert PROMPT_TOKENS - 100 < reply["usage"]["prompt_tokens"] < PROMPT_TOKENS + 20
                assert reply["usage"]["completion_tokens"] == ANSWER_TOKENS
                rating = {"response_id": reply["id"], "rating": "up" if number % 2 else "down"}
                client.post("/v1/feedback", json=rating).raise_for_status()
            rated_at = time.monotonic()
            wait_for_version_1(url, keys["admin"], started)
            seconds = time.monotonic() - rated_at
            chat(client, SAMPLES, "Hello.")
        found = Peaks(
            peak(started, ENGINE),
            peak(started, TRAINER),
            seconds,
        )
        started.process.terminate()
        assert started.process.wait(60) == 0
    return found


def chat(client: httpx.Client, session: int, text: str) -> dict[str, Any]:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "session_id": f"s{session}",
        "session_done": True,
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wait_for_version_1(url: str, key: str, started: Up) -> None:
    deadline = time.monotonic() + STEP_SECONDS
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as admin:
        while True:
            status = admin.get("/admin/v1/training").json()
            assert status["state"] != "paused", status
            if status["version"] == 1:
                return
            assert time.monotonic() < deadline, (status, started.output.read_text()[-4000:])
            time.sleep(1)


def expected(model: Path) -> tuple[int, int]:
    """What the plan's parts are for this work beside runtime, of the engine and of the trainer."""
    shape, needs, b = read_model_shape(model), TrainingNeeds(rank=RANK), 2
    serving = replace(layout_memory.ON_CPU, seqs=SAMPLES)
    data = planned(model)
    cache = next(part["bytes"] for part in data["engine 0"] if part["name"] == "KV cache")
    served = (
        layout_memory.weight_bytes(shape, b)
        + layout_memory.packed_vocabulary(shape, b)
        + layout_memory.lora_slots(shape, 4, RANK, b)
        + layout_memory.loaded_loras(shape, 1, RANK, b)
        + cache
        + layout_memory.reading_bytes(shape, serving, b)
    )
    working = layout_memory.working_bytes(
        shape, needs, b, tokens=PROMPT_TOKENS + ANSWER_TOKENS - 1, responses=ANSWER_TOKENS
    )
    return served, layout_memory.base_bytes(shape, b, CONTEXT) + layout_memory.adapter_bytes(shape, needs) + sum(
        working
    )


def planned(model: Path) -> dict[str, list[dict[str, Any]]]:
    """The parts of each process, as `clawloop plan` prints them for the options of `up`."""
    command = [sys.executable, "-m", "clawloop.app.cli.main", "plan", "--model", str(model), *OPTIONS, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {process["name"]: process["parts"] for process in json.loads(done.stdout)["processes"]}


def most(model: Path, name: str) -> int:
    """What `plan` says a process takes beside its runtime."""
    return sum(part["bytes"] for part in planned(model)[name] if part["name"] != "runtime")


def test_a_model_of_600_million_weights_learns_in_the_memory_that_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, model = ensure_tiny_model(tmp_path), write_random_model(tmp_path / "qwen3-0.6b")
    small, real = learn(tiny, tmp_path / "tiny"), learn(model, tmp_path / "real")
    for_tiny, for_real = expected(tiny), expected(model)
    engine_runtime, trainer_runtime = small.engine - for_tiny[0], small.trainer - for_tiny[1]
    measured = {"engine": real.engine - engine_runtime, "trainer": real.trainer - trainer_runtime}
    with capsys.disabled():
        for name, size, wanted, runtime, whole in (
            ("engine", measured["engine"], for_real[0], engine_runtime, real.engine),
            ("trainer", measured["trainer"], for_real[1], trainer_runtime, real.trainer),
        ):
            figures = [f"{number / MIB:.0f}" for number in (whole, runtime, size, wanted)]
            line = "{}: {} MiB, of it {} runtime; {} above, {} planned".format(name, *figures)
            sys.stdout.write(f"\n{line}")
        sys.stdout.write(f"\nfrom the last rating to the version: {real.seconds:.0f} s\n")
    assert measured["engine"] == pytest.approx(for_real[0], rel=0.15)
    assert measured["trainer"] == pytest.approx(for_real[1], rel=0.15)
    assert measured["engine"] <= most(model, "engine 0")
    assert measured["trainer"] <= most(model, "trainer")
