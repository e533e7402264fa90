"""`make docs`: writes into the documents what the code says. A test says when that has to be done.

Written whole: the tables of metrics and recipe keys, the section of each recipe, the list of layers. Of other tables
the code says which rows there are and how they begin: the command writes a new row with an empty meaning, which a
person fills in, and drops the row of what is gone.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import AliasChoices, BaseModel
from pydantic_core import PydanticUndefined
from starlette.routing import Route

from api.app import create_app
from clawloop.app.cli.main import app as clawloop
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.recipes import recipe as recipes
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.settings import Settings
from db.tables import Base

ROOT = Path(__file__).resolve().parents[2]
METRICS = ROOT / "clawloop" / "core" / "telemetry" / "metrics.py"
RECIPES = sorted((ROOT / "deploy" / "recipes").glob("*.toml"))
# Options of most commands, explained once above the table.
COMMON_OPTIONS = {"--data", "--json", "--help"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `clawloop`, e.g. `session list`.

    Attributes:
        arguments: as usage shows them.
        options: all that it takes.
        shown: those that its row lists, in the order of `--help`; `--x/--no-x` is one.
    """

    name: str
    arguments: tuple[str, ...]
    options: frozenset[str]
    shown: tuple[str, ...]

    @property
    def cell(self) -> str:
        return " ".join(f"`{code}`" for code in (" ".join(("clawloop", self.name, *self.arguments)), *self.shown))


def _commands(command: Any, name: str = "") -> Iterator[Command]:
    if not hasattr(command, "commands") or command.invoke_without_command:
        options, shown, arguments = {"--help"}, [], []
        for parameter in command.params:
            flags = _flags(parameter)
            options |= set(flags)
            if parameter.param_type_name == "argument":
                arguments.append(parameter.metavar or parameter.name.upper())
            elif flags and not getattr(parameter, "hidden", False) and not COMMON_OPTIONS & set(flags):
                shown.append("/".join(flags))
        yield Command(name, tuple(arguments), frozenset(options), tuple(shown))
    for word, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {word}".strip())


def _flags(parameter: Any) -> list[str]:
    return [option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--")]


COMMANDS = {command.name: command for command in _commands(typer.main.get_command(clawloop))}


@cache
def settings() -> frozenset[str]:
    """The environment variables of `Settings`."""
    found = set()
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        if isinstance(field.default, BaseModel):
            found |= {f"CLAWLOOP_{name.upper()}__{nested.upper()}" for nested in type(field.default).model_fields}
        else:
            found.add(str(alias.choices[0]) if isinstance(alias, AliasChoices) else f"CLAWLOOP_{name.upper()}")
    return frozenset(found)


@cache
def routes() -> frozenset[str]:
    """The gateway's routes, e.g. `GET /v1/models`."""

    def nothing() -> Any:
        raise AssertionError("no service is needed to list routes")

    return frozenset(
        f"{method} {route.path}"
        for route in create_app(nothing).routes
        if isinstance(route, Route) and route.path != "/openapi.json"
        for method in (route.methods or set()) - {"HEAD"}
    )


@dataclass(frozen=True, slots=True)
class Key:
    """A recipe key whose value is not a table, with its default as TOML ("" if none) and its docstring."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...]

    @property
    def row(self) -> str:
        return f"| `{self.name}` | {f'`{self.default}`' if self.default else '–'} | {self.meaning} |"


def _docstrings() -> dict[tuple[str, str], str]:
    """Docstrings by class and field, from the source: Python does not store docstrings of fields."""
    docstrings = {}
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(recipes.__file__).parent.glob("*.py")]
    for table in (node for module in modules for node in module.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(table.body, table.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                docstrings[table.name, field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return docstrings


def _keys(table: type[BaseModel], docstrings: Mapping[tuple[str, str], str], prefix: str = "") -> Iterator[Key]:
    for name, field in table.model_fields.items():
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is not None:
            yield from _keys(inner, docstrings, f"{prefix}{name}.")
            continue
        default = "" if field.default is PydanticUndefined else json.dumps(field.default)
        choices = tuple(choice for choice in get_args(field.annotation) if isinstance(choice, str))
        yield Key(prefix + name, default, docstrings.get((table.__name__, name), ""), choices)


KEYS = list(_keys(Recipe, _docstrings()))


def head(path: Path) -> str:
    """The comment at the start of a recipe file, without the comment signs."""
    lines = re.split(r"\n(?!#)", path.read_text(encoding="utf-8"), maxsplit=1)[0].splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def cells(line: str) -> list[str]:
    within = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in re.split(r" \|(?= )", within)]


def part(text: str, heading: str) -> str:
    """The text from a heading to the next one of any level."""
    return re.split(r"\n#+ ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1)[0]


def with_recipe_headings(text: str, names: Iterable[str]) -> str:
    """The text with a heading for each recipe: a missing one is put after the section of the last that is there."""
    names = list(names)
    missing = [name for name in names if f"\n### `{name}`\n" not in text]
    last = max(text.index(f"\n### `{name}`\n") for name in names if name not in missing)
    end = last + 1 + re.search(r"\n#+ |\Z", text[last + 1 :]).start()  # type: ignore[union-attr]
    return text[:end] + "".join(f"\n### `{name}`\n" for name in missing) + text[end:]


def _with_part(text: str, heading: str, change: Callable[[str], str]) -> str:
    before = part(text, heading)
    return text.replace(f"\n{heading}\n{before}", f"\n{heading}\n{change(before)}", 1)


def _with_rows(
    section: str, wanted: Mapping[str, str], key_of: Callable[[str], str] = lambda cell: codes(cell)[0]
) -> str:
    """The section whose table has a row for each wanted key, and for no other.

    Args:
        wanted: the first cell of each key. A row that names the same things in another order stays as it is.
    """
    lines = section.split("\n")
    rows = [at for at, line in enumerate(lines) if line.startswith("| `")]
    kept: dict[str, str] = {}
    for at in rows:
        cell, *rest = cells(lines[at])
        if (key := key_of(cell)) in wanted:
            same = _named(cell) == _named(wanted[key])
            kept[key] = lines[at] if same else f"| {' | '.join([wanted[key], *rest])} |"
    columns = len(cells(lines[rows[0]])) - 1
    new = [f"| {first} |{' |' * columns}" for key, first in wanted.items() if key not in kept]
    return "\n".join([*lines[: rows[0]], *kept.values(), *new, *lines[rows[-1] + 1 :]])


def _named(cell: str) -> set[str]:
    """The options of a command's cell, or the one name of another; a command's arguments stay as people wrote them."""
    name, *options = codes(cell)
    listed = {option for code in options for option in code.split("/")} - COMMON_OPTIONS
    return listed if name.startswith("clawloop ") else {name}


def _coded(names: Iterable[str]) -> dict[str, str]:
    return {name: f"`{name}`" for name in names}


def _command_key(cell: str) -> str:
    """`session show` of `clawloop session show ID`: arguments are not in lower case."""
    words = codes(cell)[0].removeprefix("clawloop ").split()
    return " ".join(word for word in words if re.fullmatch(r"[a-z-]+", word))


def _with_whole_table(section: str, rows: Iterable[str]) -> str:
    lines = section.split("\n")
    at = [number for number, line in enumerate(lines) if line.startswith("| `")]
    return "\n".join([*lines[: at[0]], *rows, *lines[at[-1] + 1 :]])


def _recipe_section(path: Path) -> str:
    """The comment of a recipe's file, its formula as a block."""
    return "\n" + re.sub(
        r"(?m)(?:^  .*\n?)+",
        lambda found: "```\n" + re.sub(r"(?m)^  ", "", found[0].rstrip("\n")) + "\n```\n",
        head(path) + "\n",
    )


def _layers() -> str:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return "\n".join(next(contract["layers"] for contract in checked if contract["type"] == "layers"))


def _metrics() -> Iterator[str]:
    """A row for each metric: its name, kind, labels and help, from the calls that make the metrics."""
    for node in ast.walk(ast.parse(METRICS.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Counter", "Gauge", "Histogram"):
            name, meaning, *labels = map(ast.literal_eval, node.args)
            shown = ", ".join(f"`{label}`" for label in labels[0]) if labels else ""
            yield f"| `{name}` | {ast.unparse(node.func).lower()} | {shown} | {meaning} |"


def reference(text: str) -> str:
    text = _with_part(text, "## Settings", lambda section: _with_rows(section, _coded(sorted(settings()))))
    commands = {command.name: command.cell for command in COMMANDS.values()}
    text = _with_part(text, "## Command line", lambda section: _with_rows(section, commands, _command_key))
    on_page = {route for route in routes() if re.search(r" /ui\b", route)}
    for heading, listed in (("## HTTP", routes() - on_page), ("### The page", on_page)):
        wanted = _coded(sorted(listed))
        text = _with_part(text, heading, lambda section, wanted=wanted: _with_rows(section, wanted))  # type: ignore[misc]
    return _with_part(text, "## Metrics", lambda section: _with_whole_table(section, sorted(_metrics())))


def learning(text: str) -> str:
    outcomes = _coded(outcome.value for outcome in TurnOutcome)
    text = _with_part(text, "## What became of a turn", lambda section: _with_rows(section, outcomes))
    text = with_recipe_headings(text, (path.stem for path in RECIPES))
    for path in RECIPES:
        text = _with_part(text, f"### `{path.stem}`", lambda _, path=path: _recipe_section(path))  # type: ignore[misc]
    return _with_part(text, "## All recipe keys", lambda section: _with_whole_table(section, (key.row for key in KEYS)))


def architecture(text: str) -> str:
    tables = _coded(Base.metadata.tables)
    text = _with_part(text, "## Tables", lambda section: _with_rows(section, tables))
    intro = "Imports go down this list only, and not between packages of one line:\n\n```\n"
    before, rest = text.split(intro)
    return f"{before}{intro}{_layers()}\n```{rest.split('```', 1)[1]}"


DOCUMENTS = {"reference.md": reference, "learning.md": learning, "architecture.md": architecture}


def main() -> None:
    for name, write in DOCUMENTS.items():
        path = ROOT / "docs" / name
        text = path.read_text(encoding="utf-8")
        path.write_text(write(text), encoding="utf-8")


if __name__ == "__main__":
    main()
