"""References (`$ref`) in the schemas of a request, followed before an engine has to.

An engine ends a request whose references go round in a circle with an error of its own, after the client was told
nothing; those that lead nowhere it quotes in its log; and none of them may name another address.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import orjson

from clawloop.core.errors import RequestRejected

# Keywords whose value is a schema, a list of schemas, or schemas by name. Those in place describe the same value as
# the schema they stand in: a circle of them never comes to a value.
_IN_PLACE = frozenset({"not", "if", "then", "else"})
_IN_PLACE_LISTS = frozenset({"allOf", "anyOf", "oneOf"})
_SINGLE = frozenset(
    {
        "items",
        "additionalItems",
        "additionalProperties",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contains",
        "propertyNames",
    }
)
_LISTS = frozenset({"prefixItems", "items"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# vLLM's own bound; beyond it xgrammar might run out of stack.
SCHEMA_LEVELS = 64
_SHOWN = 80


def check_references(name: str, form: Any) -> None:
    """Follow each reference in the schemas of a field that forces a form.

    Args:
        name: the field.
        form: as `api.chat.bounds.forced_forms` gives it, and within its bounds.

    Raises:
        RequestRejected: a schema is nested too deeply; or a reference leads elsewhere, nowhere, or back to itself.
    """
    for schema in _schemas(name, form):
        if _levels(schema) > SCHEMA_LEVELS:
            raise _refused(name, f"a schema has more than {SCHEMA_LEVELS} levels of objects and arrays", "Flatten it")
        _check_schema(name, schema)


def _schemas(name: str, form: Any) -> Iterator[Any]:
    if name == "tools":
        for tool in form:
            function = tool.get("function") if isinstance(tool, dict) else None
            yield function.get("parameters") if isinstance(function, dict) else None
        return
    if not isinstance(form, dict):
        return
    wrapper = form.get("json_schema")
    if isinstance(wrapper, dict):
        yield wrapper.get("schema")
    yield _parsed(form.get("json"))
    if wrapper is not None or "json" in form:
        return
    waiting: list[Any] = [_parsed(form["structural_tag"]) if "structural_tag" in form else form]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        for key, value in part.items() if isinstance(part, dict) else ():
            if key in ("schema", "json_schema"):
                yield value
            else:
                waiting.append(value)


def _levels(schema: Any) -> int:
    levels, level = 0, [schema]
    while level := [part for part in level if isinstance(part, dict | list)]:
        levels += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return levels


def _check_schema(name: str, root: Any) -> None:
    """Walk through a schema and all that it refers to, depth first."""
    done: set[int] = set()
    # Schemas in place of which the current one stands, each with those that are left to look at.
    path: list[tuple[int, Iterator[Any]]] = []
    on_path: set[int] = set()
    later = [root]
    while later:
        start = later.pop()
        if not isinstance(start, dict) or id(start) in done:
            continue
        path.append((id(start), _in_place(name, start, root)))
        on_path.add(id(start))
        later.extend(_inside(start))
        while path:
            inner = next((part for part in path[-1][1] if isinstance(part, dict)), None)
            if inner is None:
                finished, _ = path.pop()
                on_path.discard(finished)
                done.add(finished)
            elif id(inner) in on_path:
                raise _refused(name, "a reference leads back to its own schema before any value", "Remove the circle")
            elif id(inner) not in done:
                path.append((id(inner), _in_place(name, inner, root)))
                on_path.add(id(inner))
                later.extend(_inside(inner))


def _in_place(name: str, schema: dict[str, Any], root: Any) -> Iterator[Any]:
    reference = schema.get("$ref")
    if reference is not None:
        yield _resolve(name, reference, root)
    for key, value in schema.items():
        if key in _IN_PLACE:
            yield value
        elif key in _IN_PLACE_LISTS and isinstance(value, list):
            yield from value


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """Schemas of parts of the value."""
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif key in _LISTS and isinstance(value, list):
            yield from value
        elif key in _SINGLE:
            yield value


# By hand: engines read a reference from the schema's root alone, and the library `referencing` goes by `$id`; it also
# raises AttributeError for an `$id` that is no text, and for a reference to an entry of a list.
def _resolve(name: str, reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refused(name, f"{_shown(reference)} is no reference within its own schema", "Write it as `#/$defs/NAME`")
    target = root
    for part in reference.split("/")[1:]:
        step = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdecimal() and len(step) < 10 and int(step) < len(target):
            target = target[int(step)]
        else:
            raise _refused(name, f"{_shown(reference)} leads to nothing in its schema", "Correct it")
    if not isinstance(target, dict | bool):
        raise _refused(name, f"{_shown(reference)} does not lead to a schema", "Correct it")
    return target


def _parsed(schema: Any) -> Any:
    return orjson.loads(schema) if isinstance(schema, str) else schema


def _shown(reference: Any) -> str:
    text = orjson.dumps(reference).decode()
    return f"`$ref` {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"


def _refused(name: str, problem: str, remedy: str) -> RequestRejected:
    return RequestRejected(f"`{name}`: {problem}. {remedy}.", code="invalid_value", field=name)
