"""`clawloop-environment`: what it holds, and that it runs on its own dependencies alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.deploy.imports import closure
from tests.deploy.stated import ROOT, ranges

FOLDER = ROOT / "deploy" / "environment"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "vllm", "sqlalchemy", "psycopg", "fastapi", "pydantic_settings", "cryptography")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=FOLDER, check=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and the packages that it needs."""
    folder = tmp_path_factory.mktemp("alone")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in closure(map(Requirement, PROJECT["dependencies"])):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def run_alone(alone: Path, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With -S only the standard library and the folder can be imported."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(alone), **variables}
    command = [sys.executable, "-S", "-c", program, *arguments]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.long
def test_it_has_one_top_level_package_and_what_that_reads(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"clawloop"}
    read = {"clawloop/sandboxes/inside.py", "clawloop/environments/inside/harness.py"}
    read |= {f"clawloop/environments/{name}" for name in ("swe/inside/check.py", "tool_call/inside/verify.py")}
    assert read <= names
    without = (
        "clawloop/training",
        "clawloop/app/processes/gateway",
        "clawloop/core/encryption",
        "clawloop/core/settings",
    )
    assert [name for name in names if name.startswith(without)] == []


def test_it_has_the_version_and_dependencies_of_ours() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PROJECT["version"] == ours["version"]
    stated = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
    assert set(stated) <= set(ranges())
    for name, requirement in stated.items():
        assert requirement.specifier.contains(distribution(name).version), name


@pytest.mark.slow
@pytest.mark.long
def test_it_runs_without_our_gateways_and_trainers_packages(alone: Path) -> None:
    imported = run_alone(alone, "import clawloop.app.cli.remote_environment, sys; print(*sys.modules)")
    assert imported.returncode == 0, imported.stderr
    loaded = imported.stdout.split()
    assert {*HEAVY, "api", "db", "workflows", "activities"}.isdisjoint(loaded)
    program = "from clawloop.app.cli.remote_environment import main; main()"
    for arguments, variables, message in (
        ((), {}, "no key: set CLAWLOOP_WORKER_KEY"),
        ((), {"CLAWLOOP_WORKER_KEY": "k"}, "no Temporal: set TEMPORAL_ADDRESS"),
        (("--temporal", "h:1"), {"CLAWLOOP_WORKER_KEY": "k"}, "nothing to run"),
        (("--temporal", "h:1", "--verifiers", "x"), {"CLAWLOOP_WORKER_KEY": "k"}, "no verifiers 0.4 in this Python"),
    ):
        failed = run_alone(alone, program, *arguments, **variables)
        assert failed.returncode == 1
        [line] = failed.stderr.splitlines()
        assert line.startswith(f"clawloop-environment: {message}")


def test_a_module_that_needs_a_foreign_package_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / "clawloop" / "app" / "cli").mkdir(parents=True)
    for folder in ("clawloop", "clawloop/app", "clawloop/app/cli"):
        (tmp_path / folder / "__init__.py").touch()
    program = tmp_path / "clawloop" / "app" / "cli" / "remote_environment.py"
    program.write_text("def main() -> None:\n    import db.schema\n")
    with pytest.raises(ValueError, match=r"imports db\.schema"):
        _hook().imported_files(tmp_path)
    program.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import db.schema\n")
    assert "clawloop/app/cli/remote_environment.py" in _hook().imported_files(tmp_path)


def _hook() -> Any:
    spec = spec_from_file_location("imported_files", FOLDER / "imported_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
