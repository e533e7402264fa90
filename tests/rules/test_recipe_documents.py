"""docs/learning.md explains every key of a recipe, and the symbols of the formulas that recipe files open with."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rules.tables import KEYS, RECIPES, ROOT, head, with_recipe_headings

LEARNING = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
SYMBOLS = LEARNING.split("## Symbols")[1].split("\n## ")[0]


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
