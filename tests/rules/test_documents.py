"""The documents list exactly the settings, commands, routes, metrics, errors, tables and Temporal names of the code."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import AliasChoices, BaseModel
from starlette.routing import Route

from api.app import create_app
from clawloop.cli.main import app as clawloop
from clawloop.contracts.turns import TurnOutcome
from clawloop.settings import Settings
from db.invariants import INVARIANTS
from db.tables import Base
from workflows import names

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/*.md"))
TEXT = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
OPERATING, LEARNING, ARCHITECTURE = TEXT["operating.md"], TEXT["learning.md"], TEXT["architecture.md"]
PACKAGES = ("activities", "api", "clawloop", "db", "workflows")

# Options of most commands, explained once above the table.
COMMON_OPTIONS = {"--data", "--json", "--help"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `clawloop`, e.g. `session list`, with all its options, and those that its table row lists."""

    name: str
    options: frozenset[str]
    shown: frozenset[str]


def _commands(command: Any, name: str = "") -> Iterator[Command]:
    if not hasattr(command, "commands") or command.invoke_without_command:
        options = {option: parameter for parameter in command.params for option in _flags(parameter)}
        shown = {option for option, parameter in options.items() if not getattr(parameter, "hidden", False)}
        yield Command(name, frozenset(options) | {"--help"}, frozenset(shown - COMMON_OPTIONS))
    for word, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {word}".strip())


def _flags(parameter: Any) -> list[str]:
    return [option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--")]


COMMANDS = {command.name: command for command in _commands(typer.main.get_command(clawloop))}


def _section(text: str, heading: str) -> str:
    """The text from a heading to the next one of its level."""
    level = heading.split()[0]
    return text.split(f"\n{heading}\n", 1)[1].split(f"\n{level} ", 1)[0]


def _rows(section: str) -> list[list[str]]:
    """The cells of the table rows that begin with code."""
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def _codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_readme_is_short() -> None:
    assert len(TEXT["README.md"].splitlines()) <= 150


def test_every_setting_is_documented_and_no_other() -> None:
    settings = set()
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        if isinstance(field.default, BaseModel):
            settings |= {f"CLAWLOOP_{name.upper()}__{nested.upper()}" for nested in type(field.default).model_fields}
            continue
        settings.add(str(alias.choices[0]) if isinstance(alias, AliasChoices) else f"CLAWLOOP_{name.upper()}")
    assert {_codes(row[0])[0] for row in _rows(_section(OPERATING, "## Settings"))} == settings
    named = {name for text in TEXT.values() for name in re.findall(r"\bCLAWLOOP_[A-Z_]+", text)}
    # Programs of their own, inside the engine and in foreign environments, which read their variables themselves.
    guard = {
        name
        for file in ("serving/engine_guard.py", "serving/engine_log.py", "cli/remote_environment.py")
        for name in re.findall(r'"(CLAWLOOP_[A-Z_]+)"', (ROOT / "clawloop" / file).read_text("utf-8"))
    }
    options = {
        name
        for file in (ROOT / "clawloop" / "cli").glob("*.py")
        for name in re.findall(r'envvar="(CLAWLOOP_[A-Z_]+)"', file.read_text("utf-8"))
    }
    assert named - settings - guard - options == set()
    assert (guard | options) - named == set()


def test_every_command_is_documented_with_its_options_and_no_other() -> None:
    documented = {}
    for row in _rows(_section(OPERATING, "## Command line")):
        name, *codes = _codes(row[0])
        words = [word for word in name.removeprefix("clawloop ").split() if word.islower()]
        documented[" ".join(words)] = {option for code in codes for option in code.split("/")} - COMMON_OPTIONS
    assert documented == {command.name: command.shown for command in COMMANDS.values()}


def test_every_route_is_documented_and_no_other() -> None:
    application = create_app(lambda: pytest.fail("no service is needed to list routes"))
    routes = {
        f"{method} {route.path}"
        for route in application.routes
        if isinstance(route, Route) and route.path != "/openapi.json"
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {_codes(row[0])[0] for row in _rows(_section(OPERATING, "## HTTP")) if " /" in row[0]} == routes
    paths = {re.sub(r"\{[\w:]+\}", "{}", route) for route in routes}
    named = {
        (document, re.sub(r"\{[\w:]+\}", "{}", route))
        for document, text in TEXT.items()
        for route in re.findall(r"`((?:GET|POST|PUT|DELETE) /[\w/{}:-]+)", text)
    }
    assert {(document, route) for document, route in named if route not in paths} == set()


def test_every_metric_is_documented_and_no_other() -> None:
    counted = r"clawloop_(?:gateway|worker|trainer|engine|environment)_[a-z_0-9]+"
    metrics = {name for text in _sources("clawloop") for name in re.findall(rf'"({counted})"', text)}
    assert metrics
    named = {name for text in TEXT.values() for name in re.findall(counted, text)}
    assert named == metrics


def test_every_error_code_is_documented_and_no_other() -> None:
    found = set()
    for source in _sources(*PACKAGES):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                found |= _error_codes(node)
            elif isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["code"]:
                found |= _strings(node.value)
    documented = {code for line in _section(OPERATING, "## Errors").splitlines() for code in _error_cell(line)}
    # The default code, which no call names.
    assert documented == found | {"invalid_request"}


def _error_codes(call: ast.Call) -> set[str]:
    found = {text for keyword in call.keywords if keyword.arg == "code" for text in _strings(keyword.value)}
    if isinstance(call.func, ast.Name) and call.func.id == "Problem" and len(call.args) > 2:
        found |= _strings(call.args[2])
    return found


def _strings(value: ast.AST) -> set[str]:
    """The string constants that an expression can evaluate to, such as both sides of a conditional."""
    sides = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    return {side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)}


def _error_cell(line: str) -> list[str]:
    cells = line.strip("| ").split(" | ")
    return _codes(cells[1]) if cells[0].isdigit() else []


def test_every_outcome_of_a_turn_is_documented_and_no_other() -> None:
    rows = _rows(_section(LEARNING, "## What became of a turn"))
    assert [_codes(row[0])[0] for row in rows] == [outcome.value for outcome in TurnOutcome]


def test_every_table_and_invariant_is_in_the_architecture() -> None:
    tables = {_codes(row[0])[0] for row in _rows(_section(ARCHITECTURE, "## Tables"))}
    assert tables == set(Base.metadata.tables)
    listed = {line.removeprefix("- ").rstrip(".;") for line in _section(ARCHITECTURE, "## Invariants").splitlines()}
    assert {invariant for invariant in INVARIANTS if invariant not in listed} == set()


def test_every_temporal_name_is_in_the_architecture() -> None:
    known = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    known |= {key.name for key in names.SEARCH_ATTRIBUTES}
    known |= {
        name for text in _sources("activities") for name in re.findall(r"@activity\.defn\n    async def (\w+)", text)
    }
    known |= {name for text in _sources("workflows") for name in re.findall(r'workflow\.patched\("([\w-]+)"', text)}
    documented = set(_codes(_section(ARCHITECTURE, "## Temporal names")))
    assert {name for name in known if not any(code.startswith(name) for code in documented)} == set()


def test_the_layers_are_those_that_import_linter_checks() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in checked if contract["type"] == "layers")
    assert "\n".join(layers) in ARCHITECTURE


def test_every_path_in_a_document_exists() -> None:
    folders = "activities|api|benchmarks|clawloop|db|deploy|docs|migrations|requirements|tests|workflows"
    named = {(name, path) for name, text in TEXT.items() for path in re.findall(rf"`((?:{folders})/[\w/.-]*)`", text)}
    assert named
    assert sorted((name, path) for name, path in named if not (ROOT / path).exists()) == []


def test_documents_and_code_refer_to_nothing_outside_the_repository() -> None:
    outside = "DES" + "IGN"  # a design document that is not part of the repository
    assert [name for name, text in TEXT.items() if outside in text or "shared/" in text] == []
    folders = ("activities", "api", "benchmarks", "clawloop", "db", "tests", "workflows")
    assert [source.splitlines()[0] for source in _sources(*folders) if outside in source] == []


def test_every_link_has_a_target() -> None:
    broken = []
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[path.name]):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists() or (anchor and anchor not in _anchors(there)):
                broken.append((path.name, target))
    assert broken == []


def _anchors(document: Path) -> set[str]:
    """Anchors of the headings as GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_command_in_a_document_exists() -> None:
    wrong = []
    for document, text in TEXT.items():
        for words in _shown_commands(text, "clawloop"):
            command = _command_of(words)
            options = {word.split("=")[0] for word in words if word.startswith("--")}
            if command is None or options - command.options:
                wrong.append((document, " ".join(words)))
    assert wrong == []


def test_every_option_in_a_document_exists() -> None:
    known = {option for command in COMMANDS.values() for option in command.options}
    known |= {option for text in _sources("clawloop", "benchmarks") for option in re.findall(r'"(--[a-z-]+)"', text)}
    known |= {"--api-key", "--middleware"}  # of vLLM
    named = {(name, option) for name, text in TEXT.items() for option in re.findall(r"`(--[a-z-]+)", text)}
    assert named
    assert sorted((name, option) for name, option in named if option not in known) == []


def test_every_make_target_in_a_document_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^([a-z-]+):[^\n]*\n((?:\t[^\n]*\n)+)", makefile, flags=re.MULTILINE))
    wrong = []
    for document, text in TEXT.items():
        for target, *rest in _shown_commands(text, "make"):
            options = {word for argument in rest for word in argument.removeprefix("ARGS=").split() if word[:2] == "--"}
            if target not in recipes or options - _options_of(recipes[target]):
                wrong.append((document, target, sorted(options)))
    assert wrong == []


def _options_of(recipe: str) -> frozenset[str]:
    """The options that `ARGS` of a make target accepts: those of a command, or those in a benchmark's source."""
    if found := re.search(r"/clawloop ((?:\w+ ?)+)", recipe):
        command = _command_of(found[1].split())
        return frozenset() if command is None else command.options
    if found := re.search(r"-m benchmarks\.(\w+)", recipe):
        source = (ROOT / "benchmarks" / f"{found[1]}.py").read_text(encoding="utf-8")
        return frozenset(re.findall(r'"(--[a-z-]+)"', source))
    if re.search(r"-m benchmarks ", recipe):
        return frozenset(option for text in _sources("benchmarks") for option in re.findall(r'"(--[a-z-]+)"', text))
    return frozenset()


def _shown_commands(text: str, program: str) -> Iterator[list[str]]:
    """The arguments of each command of a program, in code blocks and inline code."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fence.findall(text) if language in ("", "sh", "bash")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = fence.sub("", text)
    for shown in [*lines, *re.findall(r"`([^`\n]+)`", inline)]:
        if found := re.match(rf"(?:\S*/)?{program} (.+)", shown.strip()):
            yield shlex.split(found[1], comments=True)


def _command_of(words: list[str]) -> Command | None:
    """The command that these words begin with; None for a group of commands."""
    for end in range(len(words), 0, -1):
        if (command := COMMANDS.get(" ".join(words[:end]))) is not None:
            return command
    return None


def _sources(*packages: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for package in packages for path in (ROOT / package).rglob("*.py")]
