"""What the gateway routes by: keys, policies, engines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue

from clawloop.ids import ApiKeyId


class Scope(StrEnum):
    """What a key may do."""

    CHAT = "chat"  # /v1
    ADMIN = "admin"  # /admin/v1


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that was presented and found to be good."""

    id: ApiKeyId
    policy: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class Policy:
    """A base model plus a tree of adapter versions.

    Args:
        base_model: the name under which engines serve version 0.
        aliases: model names that mean this policy, beside `policy` and `policy-side`.
        active: the version new requests get.
        sampling: what fills the sampling fields a client leaves out.
    """

    id: str
    base_model: str
    aliases: tuple[str, ...]
    active: int
    sampling: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Engine:
    """One vLLM server.

    Args:
        versions: per policy, the adapter versions it has loaded; version 0 needs no loading.
        draining: takes no new requests.
        problem: why its agent says it lacks something or does not answer; None: it works, or has no agent. Requests
            go by `versions` and by each gateway's own look at its health, not by this.
    """

    id: str
    url: str
    versions: dict[str, frozenset[int]]
    draining: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Directory:
    """What the gateway routes by, read from Postgres about once a second and kept when that is away."""

    policies: tuple[Policy, ...]
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What a request needs of an engine.

    Args:
        model: the name the engine serves it under.
        affinity: requests with the same value go to the same engine while it is healthy, for its prefix cache.
    """

    policy: str
    version: int
    model: str
    affinity: str
