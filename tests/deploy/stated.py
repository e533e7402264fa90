"""What pyproject.toml states, and what requirements/ pins of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cpu", "cuda")
# What `make setup` installs beside the device's own extra.
EXTRAS = ("train", "tensorboard", "local", "browser", "test")


def ranges(*extras: str) -> dict[str, Requirement]:
    """The base's dependencies and those of some extras, by canonical name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines: list[str] = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def pins(device: str) -> dict[str, Version]:
    """A list's versions, by canonical name."""
    return {name: version for name, (version, _) in entries(f"{device}.txt").items()}


def entries(file: str) -> dict[str, tuple[Version, list[str]]]:
    """The versions of a list in requirements/ with their hashes, by canonical name."""
    text = (ROOT / "requirements" / file).read_text().replace("\\\n", " ")
    found: dict[str, tuple[Version, list[str]]] = {}
    for line in text.splitlines():
        pin, *hashes = line.split()
        name, version = pin.split("==")
        found[canonicalize_name(name)] = (Version(version), hashes)
    return found
