"""The Dockerfile and the shell scripts of deploy/. No container engine is needed, and no image is built."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.containers import BIN, DEPLOY
from tests.deploy.stated import ROOT

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
