"""What deploy/recipes says of the recipes, and its README of their keys, is what recipes and code say."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from clawloop import recipe as recipes
from clawloop.recipe import Recipe

FOLDER = Path(__file__).parents[2] / "deploy" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is no table, with its default as TOML ("" if it has none) and its docstring."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...]

    @property
    def row(self) -> str:
        return f"| `{self.name}` | {f'`{self.default}`' if self.default else '–'} | {self.meaning} |"


def _docstrings() -> dict[tuple[str, str], str]:
    """By class and field: Python keeps no docstrings of fields."""
    found = {}
    module = ast.parse(Path(recipes.__file__).read_text(encoding="utf-8"))
    for table in (node for node in module.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(table.body, table.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                found[table.name, field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def _keys(table: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    docstrings = _docstrings()
    for name, field in table.model_fields.items():
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")
            continue
        default = "" if field.default is PydanticUndefined else json.dumps(field.default)
        choices = tuple(choice for choice in get_args(field.annotation) if isinstance(choice, str))
        yield Key(prefix + name, default, docstrings.get((table.__name__, name), ""), choices)


KEYS = list(_keys(Recipe))


def test_the_readme_lists_every_key_with_its_default_and_docstring() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    assert rows == [key.row for key in KEYS]


def test_every_key_has_a_meaning_that_fits_a_table_and_names_its_choices() -> None:
    assert [key.name for key in KEYS if not key.meaning or "|" in key.meaning] == []
    unnamed = [(key.name, choice) for key in KEYS for choice in key.choices if f"`{choice}`" not in key.meaning]
    assert unnamed == []


def _head(path: Path) -> str:
    """The comment that a recipe opens with, without its marks."""
    lines = re.split(r"\n(?!#)", path.read_text(encoding="utf-8"), maxsplit=1)[0].splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def _formula(path: Path) -> str:
    """Its indented lines as one."""
    lines = [line for line in _head(path).splitlines() if line.startswith("  ")]
    return " ".join(" ".join(lines).split()).replace(" · ", "·")


def test_the_readme_says_of_each_recipe_what_its_file_says() -> None:
    sections = re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", README, flags=re.MULTILINE | re.DOTALL)
    told = {name: text.replace("```", "").split() for name, text in sections}
    assert told == {path.stem: _head(path).split() for path in RECIPES}


def test_every_symbol_of_a_formula_is_explained() -> None:
    symbols = README.split("## Symbols")[1].split("\n## ")[0]
    explained = set(re.findall(r"`([^`]+)`", symbols))
    used = {symbol for path in RECIPES for symbol in re.findall(r"[A-Za-zΣπ]+_\w+|\b[AKLmOr]\b|[ρμλ]", _formula(path))}
    assert used
    assert used - explained == set()
    assert {"k2(base)", "clip(x, a, b)", "gap"} <= explained
