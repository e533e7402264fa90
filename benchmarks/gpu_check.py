"""`make gpu-check`: tries the trainer and the engines on a bare GPU machine; a part at a time, a JSON line for each.

    python3 -m benchmarks.gpu_check trainer [--only PART …] [--logs DIR]    at most 4 minutes
    python3 -m benchmarks.gpu_check serving [--only PART …] [--logs DIR]    at most 5 minutes, where vLLM imports
    python3 -m benchmarks.gpu_check wheels                                  here, before: what `trainer` takes along

`--device cpu --small` runs the same code on tiny shapes. The machine needs torch, transformers, peft, safetensors and
numpy; what else the trainer imports comes as wheels in `.wheels`, which are unpacked beside the results and not
installed. A part is a process of its own with a limit of its own, less where less is left of the program's time: one
that fails or does not end stops no other while there is time, and its line has what it found until then. A part that
does not end is sent SIGABRT, so that each of its programs leaves the stacks of all its threads in the log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".wheels"
CARRIED = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "uuid6", "orjson"),
    *("jinja2", "markupsafe", "torchtune", "torchao", "torchdata", "omegaconf", "peft", "pillow", "sentencepiece"),
    *("tiktoken", "pytest", "pluggy", "iniconfig"),
)
"""Packages of `.wheels`: what the trainer and its tests import beside what the machine has. PEFT is the pinned one,
since others refuse torchao's version."""
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
_FIGURES = "GPU_CHECK_FIGURES"
# Below that a part would not even import torch.
_LEAST_SECONDS = 5.0
# A busy machine without a GPU is no failure.
_SMALL_PATIENCE = 10.0


# Parts of the trainer -------------------------------------------------------------------------------------------------


class NotRun(Exception):
    """The part does not apply to this machine; its text says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """
    Args:
        small: tiny shapes.
        folder: of all parts of a program; a part may leave there what a later one reads.
    """

    device: str
    small: bool
    folder: Path


def tell(**figures: object) -> None:
    """Report what a part found so far; of a figure told twice the later value counts."""
    with Path(os.environ[_FIGURES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figures) + "\n")


def machine(options: Options) -> None:
    """What is there, what is missing, and what the GPU multiplies a second."""
    import torch

    missing = [name for name in ("pydantic", "torchtune", "torchao", "uuid6", "peft", "pytest") if not find_spec(name)]
    tell(missing=missing, python=sys.version.split()[0], cuda=torch.version.cuda, cores=os.cpu_count())
    tell(**{name: _version(name) for name in ("torch", "transformers", "peft", "torchao", "flash_attn", "vllm")})
    if options.device == "cuda":
        free, whole = torch.cuda.mem_get_info()
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        tell(gpus=gpus, gib=round(whole / 2**30, 1), free_gib=round(free / 2**30, 1))
    size = 256 if options.small else 8192
    left, right = (torch.randn(size, size, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    took = [_seconds(options.device, lambda: left @ right) for _ in range(12)][2:]
    tell(matmul_tflops=float(f"{2 * size**3 / median(took) / 1e12:.3g}"))
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: take along what `make gpu-check ARGS=wheels` fetches into {WHEELS}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _seconds(device: str, work: Callable[[], object]) -> float:
    began = _now(device)
    work()
    return _now(device) - began


def _now(device: str) -> float:
    """Seconds of a clock, once the device has done all that it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def gradients(options: Options) -> None:
    """A step's gradient by both backends on the device, beside PEFT and transformers in float64 on the CPU."""
    import torch

    from clawloop.core.recipes.recipe import Loss, Optimiser, Train
    from clawloop.training.model.decoder import load_torchtune_model
    from clawloop.training.model.loading import load_model
    from clawloop.training.model.port import LoraShape
    from clawloop.training.packing import Limits
    from clawloop.training.step import make_optimizer, train_step
    from tests.training.plain_step import peft_model, plain_gradients
    from tests.training.steps import ROUNDED_GRADIENT
    from tests.training.tiny import VOCAB, random_batch, relative_error, save_checkpoint, shake_adapter

    folder, lora = options.folder / "gradients", LoraShape(rank=4, alpha=8.0)
    base = save_checkpoint(folder / "base")
    recipe = Train(loss=Loss(kl=0.1), optimiser=Optimiser(grad_clip=1e9))
    exact_model = load_torchtune_model(base, lora, dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(exact_model)
    samples = random_batch(exact_model, hints=True)
    exact, _ = plain_gradients(peft_model(exact_model, base, folder).double(), samples, recipe)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        for backend in ("torchtune", "transformers"):
            device = torch.device(options.device)
            model = load_model(base, lora, dtype=dtype, device=device, backend=backend)
            shake_adapter(model)
            optimizer = make_optimizer(model, recipe.optimiser)
            train_step(model, optimizer, samples, recipe, Limits(60, 256, VOCAB), parent=1)
            named = model.adapter_parameters().items()
            found = {name: value.grad.double().cpu() for name, value in named if value.grad is not None}
            name = str(dtype).removeprefix("torch.")
            errors[f"{backend}, {name}"] = relative_error(found, exact) / ROUNDED_GRADIENT[name]
            tell(**{f"error of {backend} in {name}": relative_error(found, exact)})
    if wrong := [name for name, share in errors.items() if not share < 1]:
        raise RuntimeError(f"further off than rounding explains: {wrong}")


_SMALL_SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}


def step(shape: str, documents: int, contender: str, options: Options) -> None:
    """Tokens a second and peak memory of a whole step on 16,384 tokens, a quarter of each document a reply.

    Weights are random; ours is the trainer's own step with reference and the reading afterwards, each of them timed;
    PEFT's has a reference too. Planned memory is what `clawloop plan` counts for such a step.
    """
    import torch

    from benchmarks.train_case import Case, Paths, Shape, write_case
    from benchmarks.train_contenders import CONTENDERS, our_step, reset_peak_memory, timed
    from clawloop.core.recipes.recipe import Bounds, load_recipe
    from clawloop.training.ranks import Progress
    from tests.random_model import QWEN3_06B, QWEN3_4B

    sizes = {"qwen3-0.6b": QWEN3_06B, "qwen3-4b": QWEN3_4B}[shape] | (_SMALL_SHAPE if options.small else {})
    tokens = 128 if options.small else 16_384
    case = Case(
        family="qwen3",
        shape=Shape(**{name: size for name, size in sizes.items() if name != "max_position_embeddings"}),
        dtype="bfloat16",
        device=options.device,  # type: ignore[arg-type]
        rank=16,
        samples_at_once=documents,
        threads=torch.get_num_threads(),
        max_tokens=tokens,
    )
    paths, same = Paths(options.folder / f"{shape}-{documents}"), Paths(options.folder / f"{shape}-8")
    reply, random = tokens // documents // 4, Random(0)
    if not paths.folder.exists():
        unfinished = paths.folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        # The last token is only a target.
        lengths = [tokens // documents - reply + 1, reply]
        vocabulary = range(case.shape.vocab_size)
        batch = [tuple(random.choices(vocabulary, k=length) for length in lengths) for _ in range(documents)]
        written = same.checkpoint if same.folder.exists() else None
        write_case(unfinished, case, batch, checkpoint=written)  # type: ignore[arg-type]
        unfinished.rename(paths.folder)
    tell(tokens=tokens, documents=documents, planned_gib=_planned_gib(paths.checkpoint, tokens, documents, reply))
    # Random weights are far from themselves.
    recipe = load_recipe(ROOT / "deploy" / "recipes" / "binary.toml").train
    recipe = recipe.model_copy(update={"bounds": Bounds(kl=1e9, ratio=1e9)})
    stages: list[tuple[str, float]] = []
    if contender == "clawloop":

        def note(progress: Progress) -> None:
            stages.append((progress.stage, _now(options.device)))

        take = our_step(paths, case, recipe, on_progress=note)
    else:
        take = CONTENDERS[contender](paths, case, recipe)
    tell(loaded_gib=round(reset_peak_memory(case) / 2**30, 2))
    seconds: list[float] = []
    for number in range(3):  # the first warms up
        stages[:] = [("", _now(options.device))]
        took = timed(take, case)
        seconds += [took["wall_seconds"]] if number else []
        tell(loss=took["loss"], peak_gib=round(took["peak_bytes"] / 2**30, 4))
        if seconds:
            tell(step_seconds=seconds, tokens_per_second=round(tokens / min(seconds), 1))
        else:
            tell(first_seconds=took["wall_seconds"])
        if len(stages) > 1:
            tell(stages={stage: round(at - before, 3) for (_, before), (stage, at) in pairwise(stages)})


def _planned_gib(checkpoint: Path, tokens: int, documents: int, reply: int) -> float:
    from clawloop.app.layout import memory
    from clawloop.app.layout.model_folder import read_model_shape
    from clawloop.app.layout.request import TrainingNeeds

    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    shape, needs = read_model_shape(checkpoint), TrainingNeeds(rank=16)
    held = memory.base_bytes(shape, 2, tokens) + memory.adapter_bytes(shape, needs)
    working = memory.working_bytes(shape, needs, 2, tokens=tokens, responses=documents * reply, longest=reply)
    return round((held + sum(working)) / 2**30, 4)


_COUNTED = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}


def tests(chosen: Sequence[str], small: str, options: Options) -> None:
    """Tests of `tests/gpu` by pytest, without this repository's own fixtures and options.

    Args:
        chosen: files and options.
        small: an expression that chooses those for `--small`; empty: they need CUDA.
    """
    if options.small and not small:
        raise NotRun("these tests need CUDA")
    if find_spec("pytest") is None:
        raise NotRun("pytest is not installed here")
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, f"--rootdir={ROOT}", "--noconftest"]
    command += ["-p", "no:cacheprovider", f"--basetemp={options.folder / 'tests'}", *chosen]
    command += ["-k", small] if options.small else []
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    environment = {**os.environ, "GPU_TESTS_ON": options.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", line):
                names[_COUNTED[found[2]]].append(found[1])
                tell(**{**names, "passed": len(names["passed"])})
    if run.returncode != 0:
        raise RuntimeError(f"pytest ended with {run.returncode}: {names['failed']}")
    if not names["passed"]:
        raise NotRun(f"all were skipped: {names['skipped']}")


# Parts of serving -----------------------------------------------------------------------------------------------------


def demo(options: Options) -> None:
    """The toy's demo, in bfloat16 where there is a GPU; each line it prints with the seconds since its start."""
    _run_demo(options, options.folder / "demo", "--quick")


def demo_on_smollm2(options: Options) -> None:
    """The same on SmolLM2 in the toy's place, from `.wheels` if they are there."""
    from clawloop.app.models.library import SMOLLM2, find_model
    from clawloop.core.errors import SetupError

    os.environ.update(_carried())
    try:
        model = find_model(SMOLLM2, options.folder / "models")
    except SetupError as error:
        raise NotRun(str(error)) from None
    _run_demo(options, options.folder / "demo-smollm2", f"--model={model}")


def _carried() -> dict[str, str]:
    """Variables by which pip finds SmolLM2 in `.wheels`."""
    return {"PIP_FIND_LINKS": str(WHEELS), "PIP_NO_INDEX": "1"} if WHEELS.is_dir() else {}


def _run_demo(options: Options, folder: Path, *given: str) -> None:
    folder.mkdir()
    command = [sys.executable, "-m", "clawloop.app.cli.main", "demo", "run", f"--data={folder}", f"--out={folder}"]
    command += [*given, *(["--interactions=8"] if options.small else [])]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(f"{time.monotonic() - began:.1f} s: {line}", end="", flush=True)
            tell(last=line.strip(), last_seconds=round(time.monotonic() - began, 1))
    if run.returncode != 0:
        raise RuntimeError(f"the demo ended with {run.returncode}")


_RATED = """
name = "rated"
[signal]
hints = false
m = 1
[train]
batch_samples = 16
[train.advantage]
teacher_weight = 0.0
[train.optimiser]
lr = 1e-5
"""


def up(options: Options) -> None:
    """SmolLM2 by `clawloop up`: eight clients chat and rate until three versions were made of it."""
    import httpx

    from tests.e2e.up import up as running_up

    folder = options.folder / "up"
    folder.mkdir()
    (folder / "rated.toml").write_text(_RATED)
    wanted, asked = (1, ["--max-model-len=1152"]) if options.small else (3, ["--model=smollm2"])
    began, took, failed = time.monotonic(), list[float](), list[str]()
    recipe = f"--recipe={folder / 'rated.toml'}"
    with running_up(folder / "data", folder / "up.log", recipe, *asked, settings=_carried()) as started:
        url = started.line(r"gateway +(http://127\.0\.0\.1:\d+)/v1$")
        for part in ("vllm", "trainer", "combined-worker"):
            started.line(rf"({part} ready) at ")
            tell(**{f"{part}_ready": round(time.monotonic() - began, 1)})
        keys = json.loads((started.data / "keys.json").read_text())
        client, admin = (
            httpx.Client(
                base_url=url, headers={"Authorization": f"Bearer {keys[scope]}"}, timeout=600 if options.small else 60
            )
            for scope in ("chat", "admin")
        )
        done: list[int] = []

        def tell_all(training: dict[str, Any]) -> None:
            seconds = list(took)  # clients add to it
            tell(training=training, versions=training["version"], replies=len(seconds), failed=failed[:3])
            tell(up_seconds=round(time.monotonic() - began, 1))
            if seconds:
                tell(p50_seconds=median(seconds), most_seconds=max(seconds))

        def chat(number: int) -> None:
            while not done:
                asked_at = time.monotonic()
                said = [{"role": "user", "content": f"Tell me something about the number {len(took)}."}]
                body = {"model": "policy", "messages": said, "max_tokens": 64, "session_id": f"{number}-{asked_at}"}
                try:
                    answer = client.post("/v1/chat/completions", json={**body, "session_done": True}).raise_for_status()
                    took.append(time.monotonic() - asked_at)
                    rating = {"response_id": answer.json()["id"], "rating": "up" if len(took) % 2 else "down"}
                    client.post("/v1/feedback", json=rating).raise_for_status()
                except httpx.HTTPError as error:
                    failed.append(repr(error))
                    time.sleep(1)

        with ThreadPoolExecutor(8) as clients:
            asking = [clients.submit(chat, number) for number in range(8)]
            try:
                while (status := admin.get("/admin/v1/training").json())["version"] < wanted:
                    tell_all(status)
                    if status["state"] == "paused" or any(one.done() for one in asking):
                        raise RuntimeError(f"stopped at {status}; failed: {failed[:3]}")
                    time.sleep(1)
            finally:
                done.append(1)
        tell_all(status)
        started.process.terminate()
        started.process.wait(60)
    if failed:
        raise RuntimeError(f"{len(failed)} chats failed, the first: {failed[0]}")


# Programs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """
    Args:
        seconds: its limit; less where less is left of the program's time.
        work: None in tests, which run programs of their own.
    """

    name: str
    seconds: float
    work: Callable[[Options], None] | None = None


_ENGINES, _RANKS = "tests/gpu/test_engines_on_cuda.py", "tests/gpu/test_two_ranks_on_cuda.py"
_OTHERS = ["tests/gpu", f"--ignore={_ENGINES}", f"--ignore={_RANKS}"]
# In the order of what a short loan should bring first.
TRAINER = (
    Part("machine", 30, machine),
    Part("gradients", 45, gradients),
    Part("step of qwen3-4b", 75, partial(step, "qwen3-4b", 8, "clawloop")),
    Part("step of qwen3-4b by PEFT", 60, partial(step, "qwen3-4b", 8, "peft")),
    Part("step of qwen3-0.6b", 40, partial(step, "qwen3-0.6b", 8, "clawloop")),
    Part("step of qwen3-0.6b by PEFT", 40, partial(step, "qwen3-0.6b", 8, "peft")),
    Part("two ranks", 75, partial(tests, [_RANKS], "float32 and sharded")),
    Part("tests/gpu", 90, partial(tests, _OTHERS, "log_probs or gradients")),
    Part("step of qwen3-4b, one document", 45, partial(step, "qwen3-4b", 1, "clawloop")),
    Part("step of qwen3-4b by PEFT, one document", 45, partial(step, "qwen3-4b", 1, "peft")),
)
# Likewise. An engine's first start on a bare machine, which compiles, may take two minutes; `restart` starts two, the
# second of them from what the first compiled, and `engines at each precision` three.
SERVING = (
    Part("up, eight clients, three versions", 240, up),
    Part("demo in bfloat16 makes steps", 240, demo),
    Part("GPTQ engine ends", 150, partial(tests, [_ENGINES, "-k", "gptq"], "")),
    Part("restart beside a resident trainer", 150, partial(tests, [_ENGINES, "-k", "restarted"], "")),
    Part("engines at each precision", 240, partial(tests, [_ENGINES, "-k", "log_probs and not gptq"], "")),
    Part("demo on SmolLM2", 240, demo_on_smollm2),
)
PROGRAMS = {"trainer": (TRAINER, 240.0), "serving": (SERVING, 300.0)}


def run_parts(
    parts: Sequence[Part], seconds: float, command: Callable[[Part], list[str]], folder: Path, log: Path
) -> list[dict[str, Any]]:
    """Run the parts one after another; prints and returns a line for each.

    Args:
        seconds: for all of them.
        command: that runs one.
        folder: in which they leave files, and logs of their programs.
        log: gets all that they print.
    """
    ends, lines = time.monotonic() + seconds, []
    for part in parts:
        limit = min(part.seconds, ends - time.monotonic())
        if limit < min(part.seconds, _LEAST_SECONDS):
            line = {"part": part.name, "result": "not run", "reason": f"the {seconds:.0f} s of the program were over"}
        else:
            line = _run_part(part, limit, command(part), folder, log)
        lines.append(line)
        print(json.dumps(line), flush=True)
        with log.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return lines


def _run_part(part: Part, limit: float, command: list[str], folder: Path, log: Path) -> dict[str, Any]:
    figures, began, wall = folder / "figures", time.monotonic(), time.time()
    figures.write_text("")
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n==== {part.name}\n")
        output.flush()
        place = log.stat().st_size
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, _FIGURES: str(figures)}, stdout=output, stderr=output
        )
        try:
            process.wait(limit)
            result = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            result = f"did not end in {limit:.0f} s"
        seconds = round(time.monotonic() - began, 1)
        _end_family(process)
    found: dict[str, Any] = {}
    for told in figures.read_text().splitlines():
        with suppress(ValueError):  # a line that was being written
            found |= json.loads(told)
    line = {"part": part.name, "result": result, "seconds": seconds, **found}
    if line["result"] in ("passed", "not run"):
        return line
    with log.open("rb") as printed:
        printed.seek(place)
        error = printed.read().decode(errors="replace")[-1500:]
    with log.open("a", encoding="utf-8") as output:
        for other in (path for path in folder.rglob("*.log") if path.stat().st_mtime >= wall):
            output.write(f"\n---- {other.relative_to(folder)}\n{other.read_text(errors='replace')[-20_000:]}")
    return {**line, "error": error}


def _end_family(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started; a program that still runs says first where it is."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        members = [family, *family.children(recursive=True)]
        for how, patience in ((signal.SIGABRT, 3), (signal.SIGKILL, 10)):
            for member in members:
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(how)
            psutil.wait_procs(members, patience)
    process.wait()


def run(program: str, options: argparse.Namespace) -> int:
    parts, seconds = PROGRAMS[program]
    patience = _SMALL_PATIENCE if options.small else 1.0
    chosen = [Part(part.name, part.seconds * patience) for part in parts if part.name in (options.only or [part.name])]
    logs = options.logs or ROOT / ".bench" / "gpu-check"
    logs.mkdir(parents=True, exist_ok=True)
    in_memory = Path("/dev/shm")
    is_large = in_memory.is_dir() and shutil.disk_usage(in_memory).free > 24 * 2**30
    with tempfile.TemporaryDirectory(dir=in_memory if is_large else None) as temporary:
        folder = Path(temporary)
        os.environ.update(_environment(folder, options.small))
        if program == "serving":
            imported = subprocess.run(
                [sys.executable, "-c", "import vllm"], capture_output=True, text=True, check=False
            )
            if imported.returncode != 0:
                reason = f"vLLM does not import: {imported.stderr.strip().splitlines()[-1]}"
                print(json.dumps({"part": "serving", "result": "not run", "reason": reason}), flush=True)
                return 0

        def command(part: Part) -> list[str]:
            asked = ["--device", options.device, *(["--small"] if options.small else []), "--folder", str(folder)]
            return [sys.executable, "-m", "benchmarks.gpu_check", program, "--part", part.name, *asked]

        lines = run_parts(chosen, seconds * patience, command, folder, logs / f"{program}.log")
    return 0 if all(line["result"] in ("passed", "not run") for line in lines) else 1


def _environment(folder: Path, small: bool) -> dict[str, str]:
    """Variables of all parts; the carried wheels come before what the machine has."""
    wheels = sorted(WHEELS.glob("*.whl"))
    # A wheel's name ends with the tags of Python, ABI and platform.
    ours, abis = f"cp{sys.version_info.major}{sys.version_info.minor}", [wheel.stem.split("-")[-2] for wheel in wheels]
    site = folder / "site"
    if all(abi in (ours, "abi3", "none") for abi in abis):
        for wheel in wheels:
            if "smollm2" not in wheel.name:
                zipfile.ZipFile(wheel).extractall(site)
    else:
        print(f"{WHEELS} has wheels of another Python: they are left out", file=sys.stderr)
    places = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Threads of torch that wait for each other take a busy machine's cores.
    threads = {"OMP_NUM_THREADS": "1"} if small else {}
    return threads | {
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }


def run_part(name: str, options: Options, parts: Sequence[Part]) -> None:
    """The work of one part, in this process."""
    [part] = [part for part in parts if part.name == name]
    assert part.work is not None
    try:
        if options.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise NotRun("torch finds no CUDA device here")
        part.work(options)
    except NotRun as reason:
        tell(result="not run", reason=str(reason))


def fetch_wheels(python: str = "3.12") -> int:
    """Fetch the pinned wheels of `CARRIED` for a Python on x86-64 into `.wheels`, their hashes checked."""
    pins = (ROOT / "requirements" / "cuda.txt").read_text(encoding="utf-8")
    wanted = []
    for name in CARRIED:
        found = re.search(rf"^{re.escape(name)}==(?:.*\\\n)*.*$", pins, re.MULTILINE)
        assert found is not None, name
        wanted.append(found[0])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", "--dest", str(WHEELS)]
        command += [option for name in _PLATFORMS for option in ("--platform", f"{name}_x86_64")]
        return subprocess.run([*command, "--quiet", "--requirement", file.name], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description="a bare GPU machine's ten minutes")
    parser.add_argument("program", choices=[*PROGRAMS, "wheels"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, and ten times the limits")
    names = [part.name for parts, _ in PROGRAMS.values() for part in parts]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--logs", type=Path, help="folder of what the parts print; default: .bench/gpu-check")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.program == "wheels":
        return fetch_wheels()
    if options.part is None:
        return run(options.program, options)
    run_part(options.part, Options(options.device, options.small, options.folder), PROGRAMS[options.program][0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
