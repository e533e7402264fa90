"""Stores JSON exactly: key order, number types, NUL characters and lone surrogates are preserved.

Columns are `json`, never `jsonb`, which drops key order, refuses NUL and rewrites numbers. Compare values by their
texts, as in Python `1 == 1.0 == True`.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import JsonValue
from sqlalchemy.types import UserDefinedType

from clawloop.errors import RecordUnusable

_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ESCAPED = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def exact_json(value: JsonValue) -> str:
    """The value as compact JSON text.

    Raises:
        RecordUnusable: the value holds NaN or infinity, which JSON cannot represent, or is nested too deeply.
    """
    try:
        text = _PLAIN.encode(value)
    except ValueError as error:
        raise RecordUnusable(f"a number cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise RecordUnusable("the JSON is nested too deeply") from error
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be stored escaped
        return _ESCAPED.encode(value)
    return text


class ExactJson(UserDefinedType[Any]):
    """A `json` column: takes the text of `exact_json`, returns the value."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "JSON"


def storable(text: str) -> str:
    """Text with NUL and lone surrogates replaced, which PostgreSQL text columns refuse."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
