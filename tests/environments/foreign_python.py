"""A Python environment of its own for a worker without a database, with what its environments need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.deploy.stated import ROOT

VERIFIERS = "verifiers==0.4.0"
FOREIGN = Path(__file__).parent / "foreign"
_UV = str(Path(sys.prefix) / "bin" / "uv")


def foreign_python(scratch: Path, *packages: str, version: str = sys.executable) -> Path:
    """Its `bin` folder. The packages are fetched once; our distribution is built from the tree as it is now.

    Args:
        packages: in pinned versions; none: verifiers, 240 MB.
        version: of Python, as uv finds it, or fetches it where it may.
    """
    packages = packages or (VERIFIERS,)
    folder = Path(sys.prefix) / "clients" / re.sub(r"[^\w.]+", "-", packages[0])
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([_UV, "venv", "--quiet", "--clear", "--python", version, folder], check=True)
        subprocess.run([_UV, "pip", "install", "--quiet", "--python", python, *packages], check=True)
        (folder / "complete").touch()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(scratch)]
    subprocess.run(build, cwd=ROOT / "deploy" / "environment", check=True)
    [wheel] = scratch.glob("clawloop_environment-*.whl")
    install = [_UV, "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*install, "--reinstall-package", "clawloop-environment", str(wheel)], check=True)
    return folder / "bin"
