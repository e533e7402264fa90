"""Clients in pinned versions, each in a folder of its own beside the virtual environment, fetched once.

LiteLLM asks for an older `openai` than ours, and LangChain for 76 MB, so neither is a dependency of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.packages import NpmPackage

_FOLDER = Path(sys.prefix) / "clients"
_PINS = Path(__file__).parent / "pins"
OPENAI_JS = NpmPackage("openai", "7.57.0", "2e39589ca8d5a71aff84b921da8b7712d4ec7f0b1917b41fb0b7e69c34c609ce")


def python_client(name: str) -> Path:
    """A folder with all packages of `pins/NAME.txt`, to be the only entry of a PYTHONPATH."""
    pins = (_PINS / f"{name}.txt").read_text()
    folder = _FOLDER / name
    installed = folder / "pins.txt"
    if installed.is_file() and installed.read_text() == pins:
        return folder
    uv = [str(Path(sys.prefix) / "bin" / "uv"), "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    subprocess.run([*uv, "--target", str(folder), "--requirements", str(_PINS / f"{name}.txt")], check=True)
    installed.write_text(pins)  # complete or not there
    return folder


def openai_js() -> Path:
    """The folder of the official SDK for JavaScript; it needs no other package."""
    folder = _FOLDER / f"openai-js-{OPENAI_JS.version}"
    if not folder.is_dir():
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as scratch:
            OPENAI_JS.fetch(Path(scratch)).rename(folder)
    return folder
