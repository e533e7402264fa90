"""`make setup`, images and shell scripts."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.containers import BIN, DEPLOY
from tests.deploy.stated import ROOT, entries

# `make setup`: which device it chooses, what it installs for it, and that it resumes an interrupted run.

SYSTEM = "/usr/bin:/bin"
GPUS = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)"
NO_GPU_HERE = "cpu nvidia-smi lists no GPU and no {dev}/nvidia* exists; DEVICE=cuda overrides"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def nvidia_smi(folder: Path, says: str, status: int = 0) -> None:
    program(folder / "nvidia-smi", f"cat <<'END'\n{says}\nEND\nexit {status}")


@dataclass
class Machine:
    """A machine with these programs, device files and environment."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def device(self) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "deploy" / "device.sh"), "environment", str(self.folder / "dev")]
        environment = {"PATH": f"{self.folder}/bin:{SYSTEM}", **self.variables}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    (tmp_path / "dev").mkdir()
    return Machine(tmp_path)


def test_without_a_gpu_the_device_is_cpu(machine: Machine) -> None:
    assert machine.device().stdout.strip() == NO_GPU_HERE.format(dev=machine.folder / "dev")


def test_with_a_gpu_that_nvidia_smi_lists_it_is_cuda(machine: Machine) -> None:
    nvidia_smi(machine.folder / "bin", GPUS)
    assert machine.device().stdout == "cuda nvidia-smi lists GPU 0: NVIDIA H100 80GB HBM3; DEVICE=cpu overrides\n"


@pytest.mark.parametrize(
    ("says", "status"),
    [("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9), ("No devices found.", 0)],
)
def test_a_driver_without_a_gpu_does_not_count(machine: Machine, says: str, status: int) -> None:
    nvidia_smi(machine.folder / "bin", says, status)
    assert machine.device().stdout.startswith("cpu nvidia-smi lists no GPU")


def test_a_device_file_is_enough(machine: Machine) -> None:
    (machine.folder / "dev" / "nvidiactl").touch()  # the driver's own, without any GPU
    assert machine.device().stdout.startswith("cpu nvidia-smi lists no GPU")
    (machine.folder / "dev" / "nvidia3").touch()
    assert machine.device().stdout == f"cuda {machine.folder}/dev/nvidia3 exists; DEVICE=cpu overrides\n"


def test_the_existing_environment_comes_before_the_hardware(machine: Machine) -> None:
    (machine.folder / "environment").mkdir()
    (machine.folder / "environment" / ".device").write_text("cpu\n")
    nvidia_smi(machine.folder / "bin", GPUS)
    assert machine.device().stdout.startswith("cpu environment was made for it;")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_variable_comes_before_everything(machine: Machine, device: str) -> None:
    (machine.folder / "environment").mkdir()
    (machine.folder / "environment" / ".device").write_text("cpu\n")
    nvidia_smi(machine.folder / "bin", GPUS)
    machine.variables["DEVICE"] = device
    assert machine.device().stdout == f"{device} DEVICE={device} is set\n"


def test_an_unknown_device_is_one_clear_line(machine: Machine) -> None:
    machine.variables["DEVICE"] = "gpu"
    refused = machine.device()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "setup: DEVICE=gpu is neither cpu nor cuda: set one of them, or unset it to detect the hardware\n"
    )


# Makes environments whose pip and uv only write down what they are asked for; uv fails as often as `failures` says.
PYTHON = """
log() { echo "$@" >>"$TREE/asked"; }
case "$*" in
    "-m venv "*)
        log venv "$3"
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python" ;;
    *" --requirement requirements/installer.txt")
        cp "$TREE/uv" "$(dirname "$0")/uv" ;;
    *"libnuma.so.1"*) exit "${NO_LIBNUMA:-0}" ;;
    *Python.h*) exit "${NO_HEADERS:-0}" ;;
    *"version_info[:2] != (3, 11)"*) exit "${NOT_311:-0}" ;;
    *" config get "*) exit 1 ;;
    *"-m pip"*) shift 3; log pip "$@" ;;
esac
"""
UV = """
echo uv "$@" >>"$TREE/asked"
if [ -s "$TREE/failures" ]; then sed -i 1d "$TREE/failures"; echo "connection reset" >&2; exit 2; fi
"""


@dataclass
class Tree:
    """A copy of what set-up reads, with a Python that installs nothing."""

    folder: Path

    def free(self, mib: int) -> None:
        """Make this the free disk that set-up finds, whatever the machine of the tests has."""
        program(self.folder / "bin" / "df", f"printf 'Available\\n/dev/x 1 1 {mib} 1%% /\\n'")

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.folder}/bin:{SYSTEM}", "TREE": str(self.folder), **variables}
        environment["PYTHON"] = str(self.folder / "python")
        return subprocess.run(
            ["bash", "deploy/install.sh"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # a signal to all in there stays in there
            # Of a test run in the background SIGINT is ignored, and a shell cannot trap what it finds ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def asked(self) -> list[str]:
        """What was asked of venv, pip and uv since the last look."""
        file = self.folder / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "deploy").mkdir()
    for name in ("install.sh", "device.sh"):
        shutil.copy(ROOT / "deploy" / name, tmp_path / "deploy")
    program(tmp_path / "python", PYTHON)
    program(tmp_path / "uv", UV)
    program(tmp_path / "bin" / "g++", "")
    made = Tree(tmp_path)
    made.free(mib=100 * 1024)
    return made


def uv_asked(device: str, what: str, more: str = "") -> str:
    pins = f"requirements/{device}.txt"
    return f"uv pip install --python .venv/bin/python --constraint {pins} --build-constraint {pins}{more} {what}"


CPU_OPTIONS = " --override requirements/override.txt --editable"


def test_for_the_cpu_pip_installs_torch_first_by_its_hash(tree: Tree) -> None:
    done = tree.setup(DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    assert tree.asked() == [
        "venv .venv",
        "pip install --quiet --no-deps --require-hashes --requirement .venv/.torch.txt",
        uv_asked("cpu", ".[cpu,train,tensorboard,local,browser,test]", CPU_OPTIONS),
    ]
    assert done.stdout.startswith("setup: device cpu: DEVICE=cpu is set\n")
    version, hashes = entries("cpu.txt")["torch"]
    asked = (tree.folder / ".venv" / ".torch.txt").read_text().replace("\\\n", " ").split()
    assert asked == [f"torch=={version}", *hashes]


def test_on_another_python_torch_has_no_hash_in_the_list_and_set_up_says_so(tree: Tree) -> None:
    done = tree.setup(DEVICE="cpu", NOT_311="1")
    assert done.returncode == 0, done.stderr
    version, _ = entries("cpu.txt")["torch"]
    assert tree.asked()[1] == f"pip install --quiet --no-deps torch=={version}"
    assert f"setup: the list has torch=={version}'s hash for Python 3.11 only: this one is not checked\n" in done.stdout


def test_a_gpu_selects_cuda(tree: Tree) -> None:
    nvidia_smi(tree.folder / "bin", GPUS)
    done = tree.setup()
    assert done.returncode == 0, done.stderr
    assert tree.asked() == [
        "venv .venv",
        uv_asked("cuda", ".[cuda,train,tensorboard,local,browser,test]", " --editable"),
    ]
    assert done.stdout.startswith(
        "setup: device cuda: nvidia-smi lists GPU 0: NVIDIA H100 80GB HBM3; DEVICE=cpu overrides\n"
    )


@pytest.mark.parametrize(("device", "gib"), [("cpu", 6), ("cuda", 16)])
def test_a_disk_too_full_is_refused_before_anything_is_installed(tree: Tree, device: str, gib: int) -> None:
    tree.free(gib * 1024 - 1)
    refused = tree.setup(DEVICE=device)
    assert (refused.returncode, tree.asked()) == (1, [])
    assert refused.stderr == f"setup: {gib} GiB of free disk are needed here, {gib * 1024 - 1} MiB are free\n"
    tree.free(gib * 1024)
    assert tree.setup(DEVICE=device).returncode == 0


def test_what_vllm_needs_of_the_system_is_named_before_anything_is_installed(tree: Tree) -> None:
    refused = tree.setup(DEVICE="cpu", NO_LIBNUMA="1", NO_HEADERS="1", CXX="no-such-compiler")
    packages = "g++ libnuma1 python3-dev"
    assert (refused.returncode, tree.asked()) == (1, [])
    expected = f"setup: vLLM needs what this machine lacks: {packages}; on Debian: apt-get install {packages} (for a"
    assert refused.stderr.startswith(expected)
    for device in ("cpu", "cuda"):
        assert "lacks: python3-dev; on Debian" in tree.setup(DEVICE=device, NO_HEADERS="1").stderr
    assert tree.setup(DEVICE="cuda", NO_LIBNUMA="1").returncode == 0


def test_a_second_run_does_nothing_and_says_nothing(tree: Tree) -> None:
    tree.setup(DEVICE="cuda")
    tree.asked()
    again = tree.setup()
    assert (again.returncode, again.stdout, again.stderr, tree.asked()) == (0, "", "", [])


def test_an_interrupted_run_is_resumed(tree: Tree) -> None:
    nvidia_smi(tree.folder / "bin", GPUS)
    (tree.folder / "failures").write_text("once\n")
    cut_off = tree.setup()
    assert cut_off.returncode != 0
    assert "connection reset" in cut_off.stderr
    tree.asked()
    (tree.folder / "bin" / "nvidia-smi").unlink()  # the device stays what the interrupted run chose
    assert tree.setup().returncode == 0
    assert tree.asked() == [uv_asked("cuda", ".[cuda,train,tensorboard,local,browser,test]", " --editable")]


def test_ctrl_c_ends_set_up_whatever_pip_answers(tree: Tree) -> None:
    # As a terminal: the signal reaches the script and its pip, which takes it for a failure.
    program(tree.folder / "python", PYTHON.replace("log pip", 'trap "exit 1" INT; kill -INT 0; log pip'))
    ended = tree.setup()
    assert ended.returncode == 130
    assert ended.stdout.endswith("\nsetup: interrupted; the next run goes on from here\n")
    assert not any(line.startswith("uv ") for line in tree.asked())


def test_changed_pins_are_installed(tree: Tree) -> None:
    tree.setup(DEVICE="cuda")
    tree.asked()
    with (tree.folder / "requirements" / "cuda.txt").open("a") as pins:
        pins.write("added==1.0\n")
    tree.setup()
    assert tree.asked() == [uv_asked("cuda", ".[cuda,train,tensorboard,local,browser,test]", " --editable")]


def test_another_device_rebuilds_the_environment(tree: Tree) -> None:
    tree.setup(DEVICE="cuda")
    (tree.folder / ".venv" / "of-cuda").touch()
    tree.asked()
    done = tree.setup(DEVICE="cpu")
    assert "setup: .venv was made for cuda and is removed\n" in done.stdout
    assert tree.asked()[0] == "venv .venv"
    assert not (tree.folder / ".venv" / "of-cuda").exists()


def test_an_image_gets_only_the_extras_it_names(tree: Tree) -> None:
    into = {"INTO": "image", "DEVICE": "cpu"}
    assert tree.setup(EXTRAS="", **into).returncode == 0
    expected = uv_asked("cpu", ".", " --override requirements/override.txt").replace(".venv/", "image/")
    assert tree.asked() == ["venv image", expected]
    assert tree.setup(EXTRAS="train", **into).returncode == 0
    torch, expected = tree.asked()
    assert torch == "pip install --quiet --no-deps --require-hashes --requirement image/.torch.txt"
    assert expected.endswith(" .[train]")


# The Dockerfile and the shell scripts of deploy/. No container engine is needed, and no image is built.

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *(ROOT / "requirements").glob("*.sh")])


def test_hadolint_passes() -> None:
    linted = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_shellcheck_passes(script: Path) -> None:
    linted = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_images_do_not_run_as_root() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    named = {re.findall(r" AS (\S+)", stage)[0]: stage for stage in stages}
    for target in ("services", "models", "environment"):
        users = re.findall(r"^USER (\S+)$", named["runtime"] + named[target], flags=re.MULTILINE)
        assert users[-1] == "10001:10001"


def test_a_build_without_a_device_fails() -> None:
    [words] = re.findall(r'EXTRAS="(\$\{DEVICE:.*?\}),train,tensorboard"', DOCKERFILE)
    refused = subprocess.run(["sh", "-c", f'echo "{words}"'], env={}, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "set --build-arg DEVICE=cpu or DEVICE=cuda" in refused.stderr


def test_the_build_context_is_complete() -> None:
    """It holds what install.sh reads and what hatchling puts into the wheel, and nothing else."""
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert [path for path in sent if not (ROOT / path).exists()] == []
    of_workers = {"deploy/environment"}  # a distribution of its own
    read_by_set_up = {"pyproject.toml", "README.md", "LICENSE", "requirements", "deploy/install.sh", "deploy/device.sh"}
    packages = re.findall(r'"(\w+)"', next(line for line in _pyproject() if line.startswith("packages = ")))
    shared = [re.findall(r'^"([\w/]+)" = "share/', line) for line in _pyproject()]
    assert sent == read_by_set_up | of_workers | set(packages) | {folder for found in shared for folder in found}


def _pyproject() -> list[str]:
    return (ROOT / "pyproject.toml").read_text().splitlines()
