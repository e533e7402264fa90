"""A recipe as TOML that `read_recipe` takes, for people to change and give back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from clawloop.recipes.recipe import Recipe


def toml_of(recipe: Recipe) -> str:
    """One dotted key a line, all keys with their values."""
    content = recipe.model_dump(mode="json", exclude_none=True)
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in _dotted(content))


def _dotted(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{key}.")
        else:
            yield key, value
