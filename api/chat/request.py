"""Turns an HTTP request into a `PreparedChat`: the policy, version, session and kind, and the body for the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from pydantic import JsonValue
from starlette.datastructures import Headers

from api.chat.bounds import check_bounds, forced_forms
from api.chat.fields import NAMED_LIMIT, sort_fields, take_as_meant, tools_for_engine, trainable_fields
from api.chat.lessons import wants_lessons
from api.chat.models import load_named, resolve_model
from api.chat.schemas import ChatRequest, parse_chat_request
from api.chat.sent import Sent
from api.dependencies import Limits, Services
from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.serving import ApiKey, Policy, RouteKey
from clawloop.core.contracts.turns import KindDecision, Message, SessionEvidence, SessionSource
from clawloop.core.ids import TurnId, new_turn_id, version_name
from clawloop.core.turns.canonical import is_volatile, prefix_digests, seed_digest
from clawloop.core.turns.classify import classify
from clawloop.core.turns.identify import ends_session, identify, namespace
from clawloop.serving.endpoints import place_in_queue

# Recorded beside the sampling settings: so that `previous_response_id` can replace them, and that a response is shown
# with the tools that its client knows.
INSTRUCTIONS = "instructions_length"
ORIGINS = "tool_origins"


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """One checked chat request, ready to be sent to an engine.

    Args:
        request: the checked request.
        body: the engine's request body, without `model`, before it is changed for an engine's model.
        version: the version that is to answer.
        pinned: the client named the version, so no other may answer.
        affinity: requests with the same value go to the same engine.
        turn_ids: one for each choice.
        asked: sampling settings of an episode's client that were not sent, as the trainer cannot use them.
        ignored: names of the client's fields that were dropped.
        has_grammar: the engine compiles a grammar before the first token.
        engine_path: the engine's route.
        beside: what is recorded beside the sampling settings, of a response's `instructions` and tools.
        cache_salt: the engine finds beginnings of prompts again among requests with the same value; None: among all.
        lessons: that the prompt is to hold beside the messages, in their order.
    """

    key: ApiKey
    policy: Policy
    request: ChatRequest
    body: dict[str, Any]
    messages: list[Message]
    evidence: SessionEvidence
    kind: KindDecision
    version: int
    pinned: bool
    affinity: str
    ends_session: bool
    turn_ids: tuple[TurnId, ...]
    started_at: datetime
    ignored: tuple[str, ...]
    has_grammar: bool
    engine_path: str = "/v1/chat/completions"
    asked: dict[str, JsonValue] = field(default_factory=dict)
    beside: Mapping[str, JsonValue] = field(default_factory=dict)
    cache_salt: str | None = None
    lessons: tuple[ShownLesson, ...] = ()

    def sampling(self, sent: Sent) -> dict[str, JsonValue]:
        """Every setting that shaped the tokens, as sent to the engine; `asked` has what a client asked for instead."""
        settings = {**sent.sampling, **self.beside}
        return settings | {"asked": self.asked} if self.asked else settings

    def route(self, version: int) -> RouteKey:
        model = version_name(self.policy.id, version, self.policy.base_model)
        return RouteKey(self.policy.id, version, model, self.affinity, self.owner, len(self.turn_ids))

    @property
    def owner(self) -> str:
        """Name of the queue in which the request waits for an engine: one for each key, one for a policy's episodes."""
        return _owner(self.key, self.policy)

    def engine_body(self, version: int, sent: Sent) -> bytes:
        own: dict[str, JsonValue] = {"model": self.route(version).model, **place_in_queue()}
        if self.cache_salt is not None:
            own["cache_salt"] = self.cache_salt
        if "tools" in sent.body:
            own["tools"] = tools_for_engine(sent.body)
        return orjson.dumps(sent.body | own)


async def prepare(
    services: Services,
    key: ApiKey,
    headers: Headers,
    body: dict[str, Any],
    ignored: tuple[str, ...] = (),
    beside: Mapping[str, JsonValue] | None = None,
) -> PreparedChat:
    """Check a request, and choose its policy, version, session and kind.

    Args:
        ignored: names of fields that were dropped before.
        beside: what is recorded beside the sampling settings.

    Raises:
        RequestRejected: names the field and the remedy; or the turn might be lost, and the operator wants no such
            chat.
        StoreUnavailable: the directory lacks the key's policy or cannot be refreshed.
    """
    services.recorder.require_room()
    take_as_meant(body)
    request = parse_chat_request(body)
    check_bounds(body, services.limits.chat)
    policy, choice = await resolve_model(request.model, key, services.directory)
    evidence = replace(identify(headers, body), policy=key.chosen_policy)
    messages: list[Message] = body["messages"]
    version = choice.version
    affinity = _affinity(key, evidence, messages)
    sorted_fields = sort_fields(body, services.limits.engine_fields)
    fields = _engine_fields(sorted_fields.engine, request, policy)
    asked: dict[str, JsonValue] = {}
    if key.episode is not None:
        # Its turns follow the active version, and its client's settings must not keep them from being trained.
        version = policy.active if version is None else version
        fields, asked = trainable_fields(fields, body)
    await load_named(services, policy, choice)
    if version is None:
        version = await services.versions.choose(key.id, policy, evidence, messages, affinity)
        if not services.engines.has_version(policy.id, version):
            version = policy.active
    kind = classify(headers, body, side_alias=choice.side, patterns=key.episode is None)
    taught = policy.lessons if wants_lessons(headers) else None
    return PreparedChat(
        key=key,
        policy=policy,
        request=request,
        body=fields,
        asked=asked,
        messages=messages,
        evidence=evidence,
        kind=kind,
        version=version,
        pinned=choice.version is not None,
        affinity=affinity,
        ends_session=ends_session(headers, body),
        turn_ids=tuple(new_turn_id() for _ in range(request.n or 1)),
        started_at=datetime.now(UTC),
        ignored=(*ignored, *sorted_fields.ignored)[:NAMED_LIMIT],
        has_grammar=bool(forced_forms(body)),
        beside=beside or {},
        cache_salt=cache_salt(key, policy, services.limits),
        lessons=await services.lessons.choose(key, taught, evidence, kind, messages),
    )


def cache_salt(key: ApiKey, policy: Policy, limits: Limits) -> str | None:
    """Salt of the engine's prefix cache, which keeps the prompts of different keys apart.

    A prompt that begins like an earlier one is answered sooner, so a client that shared the cache could find out the
    prompts of others by trying. No client can send a salt, so it need not be a secret.
    """
    if not limits.cache_per_key:
        return None
    if key.episode is None:
        return str(key.id)
    # Attempts at one task share their prompt, and the operator chose the task. As a digest, because vLLM refuses salts
    # with "/", "@" or a backslash, or longer than 128 characters.
    return hashlib.sha256(f"episodes {policy.id}".encode()).hexdigest()


def _owner(key: ApiKey, policy: Policy) -> str:
    return f"episodes {policy.id}" if key.episode is not None else str(key.id)


def _engine_fields(fields: dict[str, Any], request: ChatRequest, policy: Policy) -> dict[str, Any]:
    """The client's fields, the policy's sampling where the client gave none, and the fields that capture needs."""
    for name, value in policy.sampling.items():
        if fields.get(name) is None:
            fields[name] = value
    fields["return_token_ids"] = True
    if not request.logprobs:
        fields["logprobs"] = True
        fields["top_logprobs"] = 0
    return fields


def _affinity(key: ApiKey, evidence: SessionEvidence, messages: list[Message]) -> str:
    if evidence.source is not SessionSource.CONVERSATION:
        return f"{key.id}/{evidence.value}"
    # The messages up to the first user message stay the same while a conversation grows, and begin its prefix cache.
    first_user = next(
        (n for n, message in enumerate(messages) if message.get("role") == "user" and not is_volatile(message)), 0
    )
    seed = seed_digest(namespace(key.id, evidence), evidence.narrowing)
    return prefix_digests(seed, messages[: first_user + 1])[-1].hex()
