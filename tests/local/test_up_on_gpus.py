"""`clawloop up` on a machine with GPUs, with stand-ins for nvidia-smi, vLLM and the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.app.layout.memory import Layout
from clawloop.app.layout.model_folder import read_model_shape
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import Gpus, Request, TrainingNeeds, limits_for
from clawloop.app.local.tiny_model import ensure_tiny_model
from tests.local import fake_gpus
from tests.local.test_up import up

PROGRAM = str(Path(__file__).with_name("up_with_noted_workers.py"))
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


def planned(model: Path, gpus: Gpus) -> Layout:
    """What `clawloop plan` says."""
    shape = read_model_shape(model)
    needs = TrainingNeeds()
    return plan(
        Request(
            model=shape,
            limits=limits_for(shape, needs, max_lora_rank=16),
            gpus=gpus,
            memory=0,
            training=needs,
            dtype="bfloat16",
        )
    )


def flags_in(arguments: list[str]) -> str:
    return " ".join(arguments)


def test_one_gpu_is_shared_as_planned_and_the_engine_comes_first(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 80, starts_after=1)
    with up(tmp_path / "data", "--device=cuda", f"--model={model}", program=PROGRAM, **fakes) as running:
        running.line(r"GPU 0 +80\.0 .* engine 0, trainer$")
        running.line("trainer: .* GiB, on the engine's GPU: it is the only one$")
        running.line("vllm ready at .*tiny-random on GPU 0")
        running.line("trainer ready")
        noted, lines = fake_gpus.notes(fakes), list(running.lines)
    layout = planned(model, Gpus(sizes=(80 * GIB,)))
    engine, trainer = layout.processes
    [vllm] = [note for name, note in noted.items() if name.startswith("vllm")]
    assert flags_in(list(engine.arguments)) in flags_in(vllm["arguments"])
    assert "--kv-cache-memory-bytes" in vllm["arguments"]
    assert flags_in(list(trainer.arguments)) in flags_in(noted["trainer"]["arguments"])
    for process, note in ((engine, vllm), (trainer, noted["trainer"])):
        assert process.environment.items() <= note["environment"].items()
    # A dated line for every change of a part.
    states = [line.split(maxsplit=1)[1] for line in lines]
    engine_ready = next(number for number, state in enumerate(states) if state.startswith("vllm ready"))
    assert states.index("trainer starting") > engine_ready


def test_engines_judge_and_trainer_are_on_gpus_of_their_own(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 24, *[80] * 6)
    sets = ("--serve-gpus=0,1", "--judge-gpus=2", "--train-gpus=3,4", f"--judge-model={model}")
    further = ("--engine-arg=--enforce-eager", "--engine-arg", "--seed 7")
    visible = {"CUDA_VISIBLE_DEVICES": "6,5,4,3,2"}
    options = ("--device=cuda", f"--model={model}", *sets, *further)
    with up(tmp_path / "data", *options, program=PROGRAM, **fakes, **visible) as running:
        for part in ("vllm-0", "vllm-1", "vllm-judge", "engine-agent-0", "engine-agent-1", "trainer"):
            running.line(f"{part} ready")
        noted = fake_gpus.notes(fakes)
        running.process.terminate()
        assert running.ended(30) == 0
        stopped = [line.split()[1] for line in running.lines if line.endswith(" stopped")]
    assert stopped[-1] == "postgres"
    assert set(stopped[-5:-1]) == {"vllm-0", "vllm-1", "vllm-judge", "temporal"}
    engines = {note["environment"]["CUDA_VISIBLE_DEVICES"]: note for name, note in noted.items() if "vllm" in name}
    assert engines.keys() == {"6", "5", "4"}
    assert noted["trainer"]["environment"]["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert flags_in(noted["trainer"]["arguments"]).count("--nproc 2 --ranks replicated") == 1
    assert all(note["arguments"][-3:] == ["--enforce-eager", "--seed", "7"] for note in engines.values())
    assert ["--enable-lora" in engines[gpu]["arguments"] for gpu in ("6", "5", "4")] == [True, True, False]
    # Each agent has an engine, and the judge asks the third.
    ports = {gpu: note["arguments"][note["arguments"].index("--port") + 1] for gpu, note in engines.items()}
    served = {f"http://127.0.0.1:{ports[gpu]}" for gpu in ("6", "5")}
    assert {noted[f"engine-agent-{n}"]["arguments"][2] for n in (0, 1)} == served
    judging = noted["judge"]["environment"]
    assert judging["CLAWLOOP_JUDGE_URL"] == f"http://127.0.0.1:{ports['4']}"
    assert (judging["CLAWLOOP_JUDGE_MODEL"], judging["CLAWLOOP_JUDGE_FORM"]) == ("tiny-random", "auto")
    assert "CLAWLOOP_JUDGE_URL" not in noted["orchestrator"]["environment"]


def refused(data: Path, *options: str, **environment: str) -> str:
    with up(data, "--device=cuda", *options, program=PROGRAM, **environment) as running:
        assert running.ended() == 1
        [line] = [line for line in running.lines if line.startswith("clawloop: ")]
        return line


def test_a_gpu_that_is_too_small_is_refused_with_the_words_of_the_plan(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 2)
    said = refused(tmp_path / "data", f"--model={model}", **fakes)
    assert said.startswith("clawloop: tiny-random does not fit: GPU 0 has 1.9 GiB to use, engine 0 and trainer need")
    assert said.endswith(": 2 GPUs (--gpus 2,2), or a GPU of 3 GiB")


def test_float32_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 80)
    said = refused(tmp_path / "data", f"--model={model}", "--dtype=float32", **fakes)
    assert said.startswith(
        "clawloop: --dtype float32: vLLM's LoRA kernels on CUDA compute in 16 bits alone: use bfloat16"
    )
