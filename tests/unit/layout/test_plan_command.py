"""`clawloop plan` as people and programs run it, and that the programs it names take the arguments it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from clawloop.app.cli.worker import worker_app
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import Limits
from tests.unit.layout.folders import QWEN3, write_folder
from tests.unit.layout.shapes import LLAMA_70B, QWEN3_4B, request
from tests.verbs import clawloop, refusal

_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.load(sys.stdin):
    make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("models") / "Tiny"))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--gpus", "80"),
        ("--gpus", "24,24,24", "--serve-gpus", "0", "--judge-gpus", "1", "--train-gpus", "2"),
        ("--gpus", "80,80,80,80,80,80,80,80"),
        ("--gpus", "80", "--no-train"),
        ("--gpus", "80", "--dtype", "bfloat16"),
        ("--dtype", "float32"),
        ("--policies", "20"),
        ("--gpus", "80", "--policies", "20"),
    ],
)
def test_people_get_a_table_within_80_columns(model: str, options: tuple[str, ...]) -> None:
    done = clawloop("plan", "--model", model, *options)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "KV cache" in done.stdout
    assert ("trainer" in done.stdout) == ("--no-train" not in options)


def test_programs_get_the_same_as_data(model: str) -> None:
    done = clawloop("plan", "--model", model, "--gpus", "80,40", "--json")
    data = json.loads(done.stdout)
    assert data["device"] == "cuda"
    assert [device["bytes"] for device in data["devices"]] == [80 * 2**30, 40 * 2**30]
    engine, trainer = data["processes"]
    assert (engine["name"], engine["role"], engine["gpus"]) == ("engine 0", "engine", [0])
    assert sum(part["bytes"] for part in engine["parts"]) == engine["bytes"] == data["devices"][0]["used_bytes"]
    assert trainer["environment"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert data["version_bytes_on_disk"] == 12 * 16 * 2 * 152


def test_a_recipe_decides_rank_and_logits(model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "wide.toml"
    recipe.write_text('name = "wide"\n[train.lora]\nrank = 64\n[train.loss]\ndistillation = 0.5\n')
    data = json.loads(clawloop("plan", "--model", model, "--gpus", "80", "--recipe", str(recipe), "--json").stdout)
    engine, trainer = data["processes"]
    assert engine["arguments"][engine["arguments"].index("--max-lora-rank") + 1] == "64"
    adapter = next(part for part in trainer["parts"] if part["name"] == "adapter and AdamW")
    assert adapter["bytes"] == 16 * 64 * 2 * 152


def test_a_family_that_up_refuses_is_not_planned(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Phi", {**QWEN3, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]})
    said = refusal(clawloop("plan", "--model", str(folder)))
    assert "is a Phi3ForCausalLM, which is not supported: choose a model of one of the families gemma3" in said


def test_what_cannot_fit_is_one_line(model: str) -> None:
    said = refusal(clawloop("plan", "--model", model, "--gpus", "1"))
    assert "Tiny does not fit: GPU 0 has 0.9 GiB to use" in said
    assert said.endswith("GiB")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "80,much"), "'80,much': give the GiB of each GPU"),
        (("--gpus", "80,0"), "give the GiB of each GPU"),
        (("--gpus", "nan"), "give the GiB of each GPU"),
        (("--gpus", "80,80", "--serve-gpus", "0,0"), "'0,0' names a GPU twice"),
        (("--gpus", "80,80", "--train-gpus", "one"), "give indices from 0 on"),
        (("--train-gpus", "0"), "give the size of each GPU"),
    ],
)
def test_wrong_usage_names_the_option(model: str, options: tuple[str, ...], said: str) -> None:
    done = clawloop("plan", "--model", model, *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "80,80", "--serve-gpus", "0", "--train-gpus", "0,1"), "GPU 0 is in --serve-gpus and --train-gpus"),
        (("--gpus", "80,80", "--no-train", "--train-gpus", "0"), "--train-gpus and --no-train contradict each other"),
        (("--max-model-len", "9999"), "--max-model-len 9999: Tiny was made for 4096 tokens"),
        (("--dtype", "int8"), "--dtype int8: use float32 or bfloat16"),
        (("--gpus", "80", "--dtype", "int8"), "--dtype int8: use bfloat16"),
        (
            ("--gpus", "80", "--dtype", "float32"),
            "--dtype float32: vLLM's LoRA kernels on CUDA compute in 16 bits alone: use bfloat16, or leave --dtype out",
        ),
        (("--gpus", "80,80", "--judge-model", "MODEL"), "--judge-model: the judge engine needs GPUs of its own"),
        (("--max-loras", "1"), "--max-loras 1: at least 2"),
        (("--max-lora-rank", "24"), "--max-lora-rank 24: engines take one of 1, 8, 16"),
        (("--max-lora-rank", "8"), "--max-lora-rank 8: the recipe's adapters have rank 16: give 16"),
        (("--recipe", "nowhere.toml"), "nowhere.toml cannot be read"),
    ],
)
def test_settings_that_cannot_be_are_one_line(model: str, options: tuple[str, ...], said: str) -> None:
    given = [model if word == "MODEL" else word for word in options]
    assert said in refusal(clawloop("plan", "--model", model, *given))


def engine_arguments() -> list[tuple[str, ...]]:
    short = Limits(max_model_len=32768, max_sample_tokens=4096)
    layouts = [
        plan(request(QWEN3_4B, (80,))),
        plan(request(QWEN3_4B, (80,) * 4, serve=(0, 1), judge=(2,), train=(3,))),
        plan(request(LLAMA_70B, (80,) * 8, limits=short)),
        plan(request(QWEN3_4B, None, memory=256)),
    ]
    return [
        process.arguments
        for layout in layouts
        for process in layout.processes
        if process.role in ("engine", "judge engine")
    ]


@pytest.mark.slow  # imports all of vLLM
def test_vllm_takes_the_arguments_of_engines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps(engine_arguments()),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_the_trainer_takes_its_arguments() -> None:
    trainer = plan(request(QWEN3_4B, (80,) * 4)).processes[-1]
    command = typer.main.get_command(worker_app)
    assert isinstance(command, typer.core.TyperGroup)
    parsed = command.commands["trainer"].make_context("trainer", list(trainer.arguments))
    assert parsed.params["nproc"] == 2
    assert parsed.params["max_tokens"] == 32768
    assert parsed.params["micro_batch_tokens"] == 8192
    assert parsed.params["device"] == "cuda"
