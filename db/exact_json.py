"""JSON that comes back as it went in: key order, number types, NUL characters, lone surrogates.

Knows nothing about what it holds. Columns are `json`, never `jsonb`, which drops key order, refuses NUL and
rewrites numbers. Two values are the same exactly when their texts are (in Python `1 == 1.0 == True`).
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
    """
    Raises:
        RecordUnusable: it holds NaN or infinity, which JSON has no words for, or is nested too deeply.
    """
    try:
        text = _PLAIN.encode(value)
    except ValueError as error:
        raise RecordUnusable(f"a number in it cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise RecordUnusable("it is nested too deeply") from error
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only its escape can be stored
        return _ESCAPED.encode(value)
    return text


class ExactJson(UserDefinedType[Any]):
    """A `json` column: goes in as the text of `exact_json`, comes out as the value."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "JSON"


def storable(text: str) -> str:
    """What text columns can hold of a client's text, for people to read: PostgreSQL refuses NUL and half pairs."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
