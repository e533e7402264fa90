"""Tables of the documents are what the code says, and what documents name exists: commands, paths, metrics, errors."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules import tables
from tests.rules.tables import COMMANDS, KEYS, RECIPES, ROOT, Command, codes, head, with_recipe_headings
from workflows import names

DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/*.md"))
TEXT = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
REFERENCE, ARCHITECTURE = TEXT["reference.md"], TEXT["architecture.md"]
PACKAGES = ("activities", "api", "clawloop", "db", "workflows")


def _section(text: str, heading: str) -> str:
    """The text from a heading to the next one of its level."""
    level = heading.split()[0]
    return text.split(f"\n{heading}\n", 1)[1].split(f"\n{level} ", 1)[0]


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_what_the_code_says(name: str) -> None:
    """`make docs` writes them."""
    assert tables.DOCUMENTS[name](TEXT[name]) == TEXT[name]


def test_every_row_of_a_table_has_a_meaning() -> None:
    rows = [line for text in TEXT.values() for line in text.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if not tables.cells(row)[1]] == []


def test_every_setting_in_a_document_exists_and_every_variable_is_named() -> None:
    named = {name for text in TEXT.values() for name in re.findall(r"\bCLAWLOOP_[A-Z_]+", text)}
    # Programs of their own, inside the engine and in foreign environments, which read their variables themselves.
    guard = {
        name
        for file in ("serving/engine_guard.py", "serving/engine_log.py", "app/cli/remote_environment.py")
        for name in re.findall(r'"(CLAWLOOP_[A-Z_]+)"', (ROOT / "clawloop" / file).read_text("utf-8"))
    }
    options = {
        name
        for file in (ROOT / "clawloop" / "app" / "cli").glob("*.py")
        for name in re.findall(r'envvar="(CLAWLOOP_[A-Z_]+)"', file.read_text("utf-8"))
    }
    assert named - tables.settings() - guard - options == set()
    assert (guard | options) - named == set()


def test_every_metric_is_documented_and_no_other() -> None:
    counted = r"clawloop_(?:gateway|worker|trainer|engine|environment)_[a-z_0-9]+"
    metrics = {name for text in _sources("clawloop") for name in re.findall(rf'"({counted})"', text)}
    assert metrics
    named = {name for text in TEXT.values() for name in re.findall(counted, text)}
    assert named == metrics


def test_every_error_code_is_documented_and_no_other() -> None:
    found: set[str] = set()
    for source in _sources(*PACKAGES):
        # A code that other modules compare is a constant of its module.
        constants = dict(re.findall(r'^([A-Z_]+) = "(\w+)"$', source, re.M))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                found |= _errorcodes(node)
            elif isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["code"]:
                named = constants.get(node.value.id) if isinstance(node.value, ast.Name) else None
                found |= _strings(node.value) if named is None else {named}
    documented = {code for line in _section(REFERENCE, "## Errors").splitlines() for code in _error_cell(line)}
    # The default code, which no call names.
    assert documented == found | {"invalid_request"}


def _errorcodes(call: ast.Call) -> set[str]:
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
    return codes(cells[1]) if cells[0].isdigit() else []


def test_every_temporal_name_is_in_the_architecture() -> None:
    known = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    known |= {key.name for key in names.SEARCH_ATTRIBUTES}
    known |= {
        name for text in _sources("activities") for name in re.findall(r"@activity\.defn\n    async def (\w+)", text)
    }
    known |= {name for text in _sources("workflows") for name in re.findall(r'workflow\.patched\("([\w-]+)"', text)}
    documented = set(codes(_section(ARCHITECTURE, "## Temporal names")))
    assert {name for name in known if not any(code.startswith(name) for code in documented)} == set()


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


# docs/learning.md explains every key of a recipe, and the symbols of the formulas that recipe files open with.

SYMBOLS = TEXT["learning.md"].split("## Symbols")[1].split("\n## ")[0]


def test_every_key_has_a_meaning_that_fits_a_table_and_names_its_choices() -> None:
    assert [key.name for key in KEYS if not key.meaning or "|" in key.meaning] == []
    unnamed = [(key.name, choice) for key in KEYS for choice in key.choices if f"`{choice}`" not in key.meaning]
    assert unnamed == []


def _formula(path: Path) -> str:
    """The indented lines of that comment, joined."""
    lines = [line for line in head(path).splitlines() if line.startswith("  ")]
    return " ".join(" ".join(lines).split()).replace(" · ", "·")


def test_every_symbol_of_a_formula_is_explained() -> None:
    explained = set(re.findall(r"`([^`]+)`", SYMBOLS))
    used = {symbol for path in RECIPES for symbol in re.findall(r"[A-Za-zΣπ]+_\w+|\b[AKLmOr]\b|[ρμλ]", _formula(path))}
    assert used
    assert used - explained == set()
    assert {"k2(base)", "clip(x, a, b)", "gap"} <= explained


def test_a_recipe_without_a_heading_gets_one_after_the_others() -> None:
    text = "# Learning\n\n### `a`\n\nFirst.\n\n### `b`\n\nSecond.\n\n## All recipe keys\n"
    made = with_recipe_headings(text, ["a", "b", "c"])
    assert made == text.replace("Second.\n", "Second.\n\n### `c`\n")
    assert with_recipe_headings(made, ["a", "b", "c"]) == made
    assert with_recipe_headings("\n### `a`\n\nAlone.\n", ["a", "b"]) == "\n### `a`\n\nAlone.\n\n### `b`\n"
