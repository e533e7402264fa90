"""The wheel holds every file that is read at run time, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from clawloop.app.processes.install_check import TOP_LEVEL_NAMES
from tests.deploy.stated import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

# Recipes for `clawloop recipe set`, and OpenClaw's configuration.
SHARED = {"recipes": ROOT / "deploy" / "recipes", "openclaw": ROOT / "deploy" / "openclaw"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


def files_below(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in found}


def test_the_wheel_is_complete(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    home = wheel.name.removesuffix("-py3-none-any.whl")
    expected = {
        f"{package}/{name}" for package in ("clawloop", *TOP_LEVEL_NAMES) for name in files_below(ROOT / package)
    }
    expected.add("clawloop/app/models/models.txt")  # requirements/models.txt
    for kind, folder in SHARED.items():
        expected |= {f"{home}.data/data/share/clawloop/{kind}/{name}" for name in files_below(folder)}
    assert {name for name in names if not name.startswith(f"{home}.dist-info/")} == expected
    assert {
        "clawloop/app/demo/models/chat/model.safetensors",
        "clawloop/app/demo/words/english.toml",
        "clawloop/app/local/chat_template.jinja",
    } <= names


def test_the_source_distribution_has_what_make_setup_reads(built: Path) -> None:
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "pyproject.toml", "deploy/install.sh", "requirements/cpu.txt", "requirements/cuda.txt"}
    assert needed - names == set()
