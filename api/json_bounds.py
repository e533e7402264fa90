"""Bounds on JSON that a gateway accepts: its depth, and its lists' wrong entries."""

from __future__ import annotations

import json
from typing import Annotated, Any

import orjson
from pydantic import Field

# Depth ----------------------------------------------------------------------------------------------------------------
# Limit on the nesting of JSON for engines and PostgreSQL, which read it by recursion.

# Storing wraps a request in a few more levels, and pydantic reads a spooled turn up to about 200. No real tool schema
# is this deep. orjson writes at most 254 levels, which checks the depth without a walk through the value in Python.
DEPTH_LIMIT = 128
_SPARE_LEVELS = 254 - DEPTH_LIMIT
# Python's own parser, which engines use, takes about 900 levels less those of the stack; so many are left to an engine.
_KEPT_LEVELS = 400


def is_too_deep(value: Any) -> bool:
    """True for a value, as orjson parses it, of more than `DEPTH_LIMIT` levels."""
    for _ in range(_SPARE_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def is_text_too_deep(text: str) -> bool:
    """True for JSON text of more than `DEPTH_LIMIT` levels, and for other text on which a parser would run out of
    stack."""
    if text.count("{") + text.count("[") <= DEPTH_LIMIT:
        return False
    try:
        return is_too_deep(orjson.loads(text))
    except orjson.JSONDecodeError:
        return _exhausts_parser(text)


def _exhausts_parser(text: str) -> bool:
    # An engine may still read text that is no JSON for orjson, or too deep for it, up to its first error.
    try:
        json.loads("[" * _KEPT_LEVELS + text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return False


# Lists ----------------------------------------------------------------------------------------------------------------
# Lists whose first wrong entry ends their validation: a million errors would hold a gateway for seconds.

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
