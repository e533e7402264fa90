"""`POST /v1/chat/completions`: from a request to what an engine is asked, and what will be recorded.

Knows nothing about how the answer travels (api/chat/stream.py) or where turns are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import JsonValue
from starlette.datastructures import Headers

from api.chat.models import find_model
from api.chat.schemas import ChatRequest, check_chat_request
from api.chat.stream import ChatExchange
from api.dependencies import Services, services_of
from api.middleware import read_json
from clawloop.contracts.serving import ApiKey, Policy, RouteKey, Scope
from clawloop.contracts.turns import KindDecision, Message, SessionEvidence, SessionSource
from clawloop.ids import TurnId, new_turn_id, version_name
from clawloop.turns.canonical import is_volatile, prefix_digests, seed_digest
from clawloop.turns.classify import classify
from clawloop.turns.identify import ends_session, identify

router = APIRouter()

# Ours; the engine need not see them.
_OURS = frozenset({"session_id", "session_done", "turn_type"})
# What is not a sampling setting of the turn: recorded elsewhere, or about the client and not the tokens.
_NOT_SAMPLING = frozenset(
    {
        "messages",
        "tools",
        "model",
        "stream",
        "stream_options",
        "user",
        "safety_identifier",
        "metadata",
        "store",
    }
    | {"prompt_cache_key", "return_token_ids", "logprobs", "top_logprobs"}
)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """One request, understood.

    Args:
        asked: the checked request.
        body: what the engine is sent, but for `model`.
        version: the version that is to answer.
        pinned: the client named the version, so no other may answer.
        affinity: what keeps a session on one engine.
        turn_ids: one for each choice.
    """

    key: ApiKey
    policy: Policy
    asked: ChatRequest
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

    @property
    def sampling(self) -> dict[str, JsonValue]:
        """Every setting that shaped the tokens, as the engine was given it."""
        return {name: value for name, value in self.body.items() if name not in _NOT_SAMPLING}

    def wanted(self, version: int) -> RouteKey:
        model = version_name(self.policy.id, version, self.policy.base_model)
        return RouteKey(policy=self.policy.id, version=version, model=model, affinity=self.affinity)

    def engine_body(self, version: int) -> bytes:
        return orjson.dumps(self.body | {"model": self.wanted(version).model})


async def prepare(services: Services, key: ApiKey, headers: Headers, body: dict[str, Any]) -> PreparedChat:
    """Check a request and decide what it is.

    Raises:
        RequestRejected: names the field and the remedy.
        StoreUnavailable: this gateway does not know the key's policy yet.
    """
    asked = check_chat_request(body)
    policy, choice = await find_model(asked.model, key, services.directory)
    evidence = identify(headers, body)
    messages: list[Message] = body["messages"]
    version = choice.version
    if version is None:
        version = await services.versions.choose(key.id, policy, evidence, messages)
        if not services.engines.has(policy.id, version):
            version = policy.active
    return PreparedChat(
        key=key,
        policy=policy,
        asked=asked,
        body=_engine_fields(body, asked, policy),
        messages=messages,
        evidence=evidence,
        kind=classify(headers, body, side_alias=choice.side),
        version=version,
        pinned=choice.version is not None,
        affinity=_affinity(key, evidence, messages),
        ends_session=ends_session(headers, body),
        turn_ids=tuple(new_turn_id() for _ in range(asked.n or 1)),
        started_at=datetime.now(UTC),
    )


def _engine_fields(body: dict[str, Any], asked: ChatRequest, policy: Policy) -> dict[str, Any]:
    """The client's fields, what it left out of the sampling filled in, and what capture needs."""
    fields = {name: value for name, value in body.items() if name not in _OURS}
    for name, value in policy.sampling.items():
        if fields.get(name) is None:
            fields[name] = value
    fields["return_token_ids"] = True
    if not asked.logprobs:
        fields["logprobs"] = True
        fields["top_logprobs"] = 0
    return fields


def _affinity(key: ApiKey, evidence: SessionEvidence, messages: list[Message]) -> str:
    if evidence.source is not SessionSource.CONVERSATION:
        return f"{key.id}/{evidence.value}"
    # What stands up to the first user message stays while a conversation grows; the prefix cache begins with it.
    opening = next((n for n, said in enumerate(messages) if said.get("role") == "user" and not is_volatile(said)), 0)
    return prefix_digests(seed_digest(key.id, evidence.narrowing), messages[: opening + 1])[-1].hex()


@router.post(
    "/v1/chat/completions",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}},
        }
    },
)
async def chat_completions(request: Request) -> ChatExchange:
    """Chat with the key's policy; streamed if `stream` is true."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    body = await read_json(request, services.limits)
    return ChatExchange(await prepare(services, key, request.headers, body), services)
