"""What all tables of a recipe have in common: strict keys, a hash of their content, and types of values."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Weight: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class Table(BaseModel):
    # Strict: "3" is not 3, and true is not 1. TOML has NaN, but no setting can be NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    later: ClassVar[frozenset[str]] = frozenset()
    """Keys added after the first stored recipes: left out of content and hash while they have their default.

    Every new key goes here, and its default never changes: a stored recipe without the key means that default.
    """

    @property
    def hash(self) -> str:
        """SHA-256 of the content in hex; independent of the order of keys."""
        content = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def content(self) -> dict[str, JsonValue]:
        """What is hashed and stored: all keys with defaults filled in, except `later` keys at their default."""
        return {
            name: value.content if isinstance(value, Table) else value
            for name, value in self
            if name not in self.later or value != type(self).model_fields[name].default
        }
