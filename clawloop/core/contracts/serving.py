"""Records that the gateway routes by: keys, policies, engines."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import JsonValue

from clawloop.core.contracts.lessons import PolicyLessons
from clawloop.core.families.orders import Rule
from clawloop.core.ids import ApiKeyId, EpisodeId

ANY_POLICY = "*"
"""Among the policies that a key may choose: all of them, also those made later."""


class Scope(StrEnum):
    """A permission of a key."""

    CHAT = "chat"  # /v1
    ADMIN = "admin"  # /admin/v1 and the page
    READ = "read"  # the page, without any button
    WORKER = "worker"  # /admin/v1/worker: what an environment worker without a database needs


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; `None`: unlimited.

    Args:
        requests_per_minute, tokens_per_minute: of chats; tokens are those of prompts and replies.
        concurrency: chats at once.
        stored_mib: MiB of turns and comments that are stored.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    stored_mib: int | None = None


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key's limits and use, as shown to operators.

    Args:
        prefix: the public part.
        last_turn_at: of its newest turn; None without one.
        stored_bytes: of its turns and comments.
    """

    prefix: str
    name: str
    policy: str
    limits: KeyLimits
    expires_at: datetime | None
    revoked_at: datetime | None
    last_turn_at: datetime | None
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An authenticated API key.

    Args:
        policy: its own, or of one request the policy that its header chose.
        episode: the episode whose key it is; None for a key of a person or program.
        expires_at: None if it does not expire.
        policies: what a header may choose besides its own policy, or `ANY_POLICY`.
        is_chosen: a header chose `policy`, which is not the key's own.
    """

    id: ApiKeyId
    policy: str
    scopes: frozenset[Scope]
    episode: EpisodeId | None = None
    expires_at: datetime | None = None
    limits: KeyLimits = KeyLimits()
    policies: frozenset[str] = frozenset()
    is_chosen: bool = False

    def may_choose(self, policy: str) -> bool:
        return not self.policies.isdisjoint((policy, ANY_POLICY))

    @property
    def chosen_policy(self) -> str | None:
        """The policy that a header chose; None: the key's own."""
        return self.policy if self.is_chosen else None


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """The facts shown of a key.

    Args:
        prefix: the public part, `cl-` included.
        revoked_at: None if the key was not revoked.
        expires_at: None if it does not expire.
        policies: what a header may choose besides `policy`, or `ANY_POLICY`.
    """

    id: ApiKeyId
    name: str
    prefix: str
    policy: str
    scopes: frozenset[Scope]
    created_at: datetime
    revoked_at: datetime | None
    expires_at: datetime | None
    policies: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Policy:
    """A base model plus a tree of adapter versions.

    Args:
        base_model: the name under which engines serve version 0.
        aliases: model names of this policy besides `policy` and `policy-side`.
        active: the version that answers new requests.
        sampling: defaults of sampling fields that a client leaves out.
        canary: a version that a share of the conversations gets instead of the active one; None if there is none.
        canary_share: that share, 0 to 1.
        kept: versions above 0 that have their files, so that engines can load them.
        lessons: None: its recipe has lessons off.
    """

    id: str
    base_model: str
    aliases: tuple[str, ...]
    active: int
    sampling: dict[str, JsonValue]
    canary: int | None = None
    canary_share: float = 0.0
    kept: frozenset[int] = frozenset()
    lessons: PolicyLessons | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """One vLLM server.

    Args:
        versions: loaded adapter versions per policy; version 0 needs no loading.
        draining: takes no new requests.
        problem: its agent's reason why it lacks a version or does not answer; None: it works, or has no agent. Routing
            uses `versions` and each gateway's own health checks, not this.
    """

    id: str
    url: str
    versions: dict[str, frozenset[int]]
    draining: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Context length and template rules of an engine's model.

    Args:
        context: tokens of a prompt and its reply; None: not known.
        rules: of the chat template, by which messages are brought into an order that it takes (families/orders.py).
        default_system: what the template says in place of a system message; empty if it says nothing.
    """

    context: int | None = None
    rules: frozenset[Rule] = frozenset()
    default_system: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """Policies and engines, read from PostgreSQL about once a second and cached while it is down."""

    policies: tuple[Policy, ...]
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class RouteKey:
    """The requirements of a request on its engine.

    Args:
        model: the version's name on the engine.
        affinity: requests with the same value go to the same healthy engine, for its prefix cache.
        owner: whose request it is; owners get places on engines in turn.
        choices: sequences that the engine is to sample; 0: none.
    """

    policy: str
    version: int
    model: str
    affinity: str
    owner: str = ""
    choices: int = 0


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """A version's directory on disk; only the database knows whether its step was committed.

    Args:
        path: as in `clawloop.core.contracts.training.VersionRef`.
    """

    policy: str
    n: int
    path: str
