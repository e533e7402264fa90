"""Check of an answer against the content that its probe asks for.

Patterns are matched by pydantic's regular expressions, which take time linear in the answer for every pattern.
"""

from __future__ import annotations

from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from clawloop.contracts.probes import ProbeContent


def is_right(content: ProbeContent, text: str) -> bool | None:
    """True if the text passes each of the probe's checks; None if the probe has none."""
    if not content.is_checked:
        return None
    folded = text.casefold()
    return (
        all(part.casefold() in folded for part in content.contains)
        and (content.regex is None or _matches(content.regex, text))
        and (content.exact is None or content.exact.strip() == text.strip())
    )


def pattern_problem(pattern: str) -> str | None:
    """The problem with a pattern; None if it can be used."""
    try:
        _validator(pattern)
    except SchemaError as error:
        return " ".join(str(error).split())[:300]
    return None


@lru_cache(maxsize=256)
def _validator(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def _matches(pattern: str, text: str) -> bool:
    try:
        _validator(pattern).validate_python(text)
    except ValidationError:
        return False
    return True
