"""Puts into the wheel what its program imports of this tree, and what those packages read beside their modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAM = "clawloop.app.cli.remote_environment"
PACKAGE = "clawloop"
# They have names that other packages have, too.
FOREIGN = ("activities", "api", "db", "migrations", "workflows")
# A program, or a folder of them, that is read and not imported.
READ = ("inside.py", "inside")


class ImportedFiles(BuildHookInterface[Any]):
    """Hatchling finds it by this base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        tree = Path(self.root).resolve().parents[1]
        build_data["force_include"] = {str(tree / path): path for path in imported_files(tree)}


def imported_files(tree: Path) -> list[str]:
    """Paths in the tree.

    Raises:
        ValueError: a module imports a package that is no part of the wheel.
    """
    found: dict[str, Path] = {}
    waiting = [PROGRAM]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        folder = tree.joinpath(*name.split("."))
        found[name] = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        waiting += {name.rpartition(".")[0]} - {""}
        for imported in _imported(found[name], tree):
            if imported.split(".")[0] in FOREIGN:
                raise ValueError(f"{name} imports {imported}, which has no place in a foreign environment")
            waiting += [imported] if imported.split(".")[0] == PACKAGE else []
    files = set(found.values())
    for folder in {path.parent for path in files}:
        for read in (folder / name for name in READ):
            inner = read.rglob("*") if read.is_dir() else [read]
            files |= {path for path in inner if path.is_file() and "__pycache__" not in path.parts}
    return sorted(path.relative_to(tree).as_posix() for path in files)


def _imported(module: Path, tree: Path) -> Iterator[str]:
    """Names of the modules that one imports, at its top or later; not those for type checkers alone."""
    parsed = ast.parse(module.read_text(encoding="utf-8"))
    checked = [node for node in ast.walk(parsed) if isinstance(node, ast.If) and _is_type_checking(node.test)]
    left_out = {inner for node in checked for inner in ast.walk(node)}
    for node in ast.walk(parsed):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            for alias in node.names:
                inner = tree.joinpath(*node.module.split("."), alias.name)
                if inner.with_suffix(".py").is_file() or inner.is_dir():
                    yield f"{node.module}.{alias.name}"


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
