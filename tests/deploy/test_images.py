"""The Dockerfile and the scripts of deploy/, as far as they can be read without a container engine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.containers import BIN, DEPLOY
from tests.deploy.stated import ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *(ROOT / "requirements").glob("*.sh")])


def test_the_linter_has_nothing_to_say_about_the_dockerfile() -> None:
    linted = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_the_linter_has_nothing_to_say_about_scripts(script: Path) -> None:
    linted = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_every_image_ends_as_a_user_without_rights() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    named = {re.findall(r" AS (\S+)", stage)[0]: stage for stage in stages}
    for target in ("services", "models"):
        users = re.findall(r"^USER (\S+)$", named["runtime"] + named[target], flags=re.MULTILINE)
        assert users[-1] == "10001:10001"


def test_an_image_for_no_device_is_refused() -> None:
    [words] = re.findall(r'EXTRAS="(\$\{DEVICE:.*?\}),train"', DOCKERFILE)
    refused = subprocess.run(["bash", "-c", f'echo "{words}"'], env={}, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "say --build-arg DEVICE=cpu or DEVICE=cuda" in refused.stderr


def test_all_that_is_installed_is_sent_to_the_builder() -> None:
    """Set-up reads it or hatchling puts it into the wheel; what is left out cannot be missed before a build."""
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert [path for path in sent if not (ROOT / path).exists()] == []
    read_by_set_up = {"pyproject.toml", "README.md", "LICENSE", "requirements", "deploy/install.sh", "deploy/device.sh"}
    packages = re.findall(r'"(\w+)"', next(line for line in _pyproject() if line.startswith("packages = ")))
    shared = [re.findall(r'^"([\w/]+)" = "share/', line) for line in _pyproject()]
    assert sent == read_by_set_up | set(packages) | {folder for found in shared for folder in found}


def _pyproject() -> list[str]:
    return (ROOT / "pyproject.toml").read_text().splitlines()
