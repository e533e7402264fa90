"""A Python environment of its own for a worker without a database, with verifiers in a pinned version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.deploy.stated import ROOT

VERIFIERS = "verifiers==0.4.0"
FOREIGN = Path(__file__).parent / "foreign"
_UV = str(Path(sys.prefix) / "bin" / "uv")


def foreign_python(scratch: Path) -> Path:
    """Its `bin` folder. verifiers is fetched once, 240 MB; our distribution is built from the tree as it is now."""
    folder = Path(sys.prefix) / "clients" / VERIFIERS.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([_UV, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        subprocess.run([_UV, "pip", "install", "--quiet", "--python", python, VERIFIERS], check=True)
        (folder / "complete").touch()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(scratch)]
    subprocess.run(build, cwd=ROOT / "deploy" / "environment", check=True)
    [wheel] = scratch.glob("clawloop_environment-*.whl")
    install = [_UV, "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*install, "--reinstall-package", "clawloop-environment", str(wheel)], check=True)
    return folder / "bin"
