"""Contracts of probes: prompts that the gate asks of a version and of its parent before the version answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from clawloop.contracts.training import VersionRef
from clawloop.contracts.turns import Message
from clawloop.ids import ProbeId
from clawloop.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeContent:
    """A probe's messages, and the content of a right answer; without `contains`, `regex` and `exact` it is unchecked.

    Args:
        tools: as a client offers them; None without tools.
        contains: texts that the answer has to contain, whatever their case.
        regex: a pattern, in the syntax of Rust's regex crate, that has to match anywhere in the answer.
        exact: the whole answer, apart from white space around it.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    contains: Sequence[str] = ()
    regex: str | None = None
    exact: str | None = None

    @property
    def is_checked(self) -> bool:
        return bool(self.contains) or self.regex is not None or self.exact is not None


@dataclass(frozen=True, slots=True)
class StoredProbe:
    """An operator's probe."""

    id: ProbeId
    content: ProbeContent
    created_at: datetime


@dataclass(frozen=True, slots=True)
class AskedProbe:
    """A probe of a check.

    Args:
        id: the operator's probe, or the praised turn that it was drawn from.
    """

    id: UUID
    content: ProbeContent


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The gate's questions about a candidate, and the versions to ask.

    Args:
        base_model: the name under which engines serve version 0.
        parent: number of the version that the candidate is compared with.
    """

    policy: str
    base_model: str
    candidate: VersionRef
    parent: int
    recipe: Recipe
    probes: Sequence[AskedProbe]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer to a probe.

    Args:
        tool_calls: the arguments of each tool call as the model wrote them, by the name it called.
        cut: the limit of tokens ended it.
    """

    text: str
    tool_calls: Sequence[tuple[str, str]] = ()
    cut: bool = False
