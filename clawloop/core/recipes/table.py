"""Tables of a recipe: strict keys, a hash of their content, types of values, and errors that name the key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from clawloop.core.errors import RecipeRejected

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Weight: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class Table(BaseModel):
    # Strict: "3" is not 3, and true is not 1. TOML has NaN, but no setting can be NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    later: ClassVar[frozenset[str]] = frozenset()
    """Keys added after the first release: left out of content and hash while they have their default.

    The default of such a key never changes: a stored recipe without the key means that default.
    """

    @property
    def hash(self) -> str:
        """SHA-256 of the content in hex; independent of the order of keys."""
        content = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def content(self) -> dict[str, JsonValue]:
        """The content to hash and store: all keys with defaults filled in, except `later` keys at their default."""
        return {
            name: value.content if isinstance(value, Table) else value
            for name, value in self
            if name not in self.later or value != type(self).model_fields[name].default
        }


# Comparing takes a second for each million characters, and recipes also arrive over HTTP.
_NAME_LIMIT = 100
# Names of the same settings in other trainers, where they are too different from ours for a close match.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "batch_samples",
    "max_grad_norm": "grad_clip",
    "num_train_epochs": "epochs",
    "kl_coef": "kl",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lambda": "process_weight",
}


def as_rejection(error: ValidationError, model: type[BaseModel]) -> RecipeRejected:
    """Pydantic's problems, each with the dotted key and the nearest valid key or value.

    Unknown keys come first: a misspelt key can make a required one missing.
    """
    problems = sorted(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    return RecipeRejected.of([_rejection(problem, model) for problem in problems])


def _rejection(problem: ErrorDetails, model: type[BaseModel]) -> RecipeRejected:
    path = [str(part) for part in problem["loc"]]
    field = ".".join(path)
    if problem["type"] == "extra_forbidden":
        if (near := _near_key(path, model)) is not None:
            return RecipeRejected("unknown key", field=field, near=near)
        here = [key[-1] for key in _keys(model, ()) if key[:-1] == tuple(path[:-1])]
        return RecipeRejected(f"unknown key; the keys here are {', '.join(here)}", field=field)
    near = None
    if problem["type"] == "literal_error":
        choices = [choice.strip("'") for choice in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        near = next(iter(get_close_matches(str(problem["input"]).lower()[:_NAME_LIMIT], choices, n=1)), None)
    return RecipeRejected(problem["msg"][0].lower() + problem["msg"][1:], field=field, near=near)


def _near_key(path: list[str], model: type[BaseModel]) -> str | None:
    """The key with the same name in another case or table, or with the same meaning; else the most similar name."""
    known = list(_keys(model, ()))
    here = [key for key in known if key[:-1] == tuple(path[:-1])]
    name = path[-1].lower()[:_NAME_LIMIT]
    for keys, likeness in ((here, 1.0), (known, 1.0), (here, 0.6), (known, 0.6)):
        match = get_close_matches(_OTHER_NAMES.get(name, name), [key[-1] for key in keys], n=1, cutoff=likeness)
        if match:
            return ".".join(next(key for key in keys if key[-1] == match[0]))
    return None


def _keys(model: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, (*prefix, name))
