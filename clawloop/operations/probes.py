"""Operators' probes of a policy: read from what a person wrote, added, listed, removed.

Of several probes with one that cannot be used none is added, and each fault is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from clawloop.core.contracts.training import ProbeContent, StoredProbe
from clawloop.core.errors import AmbiguousId, NotFound
from clawloop.core.gate.checks import pattern_problem
from clawloop.core.ids import ProbeId, ids_beginning

MOST_PROBES = 200
"""Each costs two answers a version: with more a check would take minutes of an engine."""
_LONGEST = 100_000  # characters of a probe's messages: about 25,000 tokens, which most engines take

_Text = Annotated[str, Field(min_length=1, max_length=_LONGEST)]
_Check = Annotated[str, Field(min_length=1, max_length=1000)]


class ProbeStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time, NotFound without such a policy."""

    async def add(self, policy: str, probes: Sequence[ProbeContent], most: int) -> list[StoredProbe]:
        """Add probes, in their order.

        Raises:
            StateConflict: the policy would have more than `most`.
        """

    async def all(self, policy: str) -> list[StoredProbe]:
        """The policy's probes, oldest first."""

    async def remove(self, policy: str, probe: ProbeId) -> bool:
        """Remove a probe; False if the policy has none of this id."""


def find_probe(policy: str, probes: Sequence[StoredProbe], reference: str) -> ProbeId:
    """The probe of a policy with this id or beginning of an id.

    Raises:
        NotFound, AmbiguousId
    """
    span = ids_beginning(reference)
    found = [] if span is None else [probe.id for probe in probes if span[0] <= probe.id <= span[1]]
    if not found:
        raise NotFound(
            f"policy {policy!r} has no probe {reference}; `clawloop probe list` shows them",
            code="probe_not_found",
            field="probe",
        )
    if len(found) > 1:
        raise AmbiguousId(f"{reference!r} begins the id of several probes; give more of it", field="probe")
    return found[0]


class _WrittenProbe(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: _Text | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    contains: list[_Check] | _Check | None = None
    regex: _Check | None = None
    exact: _Text | None = None

    @field_validator("messages")
    @classmethod
    def _are_messages(cls, messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if messages is not None:
            if not all(isinstance(message.get("role"), str) for message in messages):
                raise ValueError("each message needs a role")
            if messages[-1]["role"] not in ("user", "tool"):
                raise ValueError("the last message must be the user's or a tool's, so that an answer follows")
            if len(json.dumps(messages)) > _LONGEST:
                raise ValueError(f"longer than {_LONGEST} characters")
        return messages

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None and (problem := pattern_problem(pattern)) is not None:
            raise ValueError(problem)
        return pattern

    @model_validator(mode="after")
    def _asks_once(self) -> _WrittenProbe:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def content(self) -> ProbeContent:
        contains = [self.contains] if isinstance(self.contains, str) else self.contains or []
        messages = self.messages or [{"role": "user", "content": self.prompt}]
        return ProbeContent(messages=messages, tools=self.tools, contains=contains, regex=self.regex, exact=self.exact)


def read_probes(written: Sequence[object]) -> tuple[list[ProbeContent], dict[int, str]]:
    """The valid probes, and the fault of each other entry by its place from 0."""
    probes, faults = [], {}
    for place, one in enumerate(written):
        try:
            probes.append(_WrittenProbe.model_validate(one).content())
        except ValidationError as error:
            faults[place] = _fault(error)
    return probes, faults


def read_probe_lines(text: str) -> tuple[list[ProbeContent], dict[int, str]]:
    """The valid probes of a file of JSON lines, and the fault of each other line by its number from 1."""
    written: dict[int, object] = {}
    faults: dict[int, str] = {}
    # Not `splitlines`: a JSON text may hold what Unicode calls a line's end.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            written[number] = json.loads(line)
        except (ValueError, RecursionError) as error:
            faults[number] = f"not JSON: {error}"
    probes, wrong = read_probes(list(written.values()))
    numbers = list(written)
    faults |= {numbers[place]: fault for place, fault in wrong.items()}
    return probes, dict(sorted(faults.items()))


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # If a key takes a text or a list, pydantic's location ends with the type that was tried.
    field = ".".join(str(part) for part in first["loc"] if part in _WrittenProbe.model_fields)
    known = ", ".join(_WrittenProbe.model_fields)
    if first["type"] == "extra_forbidden":
        return f"unknown key {first['loc'][0]!r}; a probe has {known}"
    if first["type"] == "model_type":
        return f"no JSON object; a probe has {known}"
    words = first["msg"].removeprefix("Value error, ")
    return f"{field}: {words}" if field else words
