"""`POST /v1/completions`: text continued without a chat template; recorded as a side turn."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from api.chat.bounds import check_bounds, forced_forms
from api.chat.fields import NAMED_LIMIT, sort_fields
from api.chat.models import resolve_model
from api.chat.request import PreparedChat, cache_salt
from api.chat.schemas import ChatRequest, StreamOptions
from api.chat.stream import ChatExchange
from api.dependencies import Services, services_of
from api.json_lists import Texts, TokenIds
from api.plain_route import PlainRoute
from api.request_body import read_json
from api.wire.completions_reply import CompletionReply
from api.wire.reading import parse
from clawloop.contracts.serving import ApiKey, Scope
from clawloop.contracts.turns import KindDecision, Message, TurnKind
from clawloop.errors import RequestRejected
from clawloop.ids import completion_id, new_turn_id
from clawloop.turns.identify import identify

router = APIRouter(route_class=PlainRoute)

# Fields of a completion that a chat does not have.
_ENGINE_FIELDS = ("prompt",)
# Fields of a chat that a completion does not have; vLLM ignores them.
_CHAT_FIELDS = ("messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens")


class CompletionRequest(BaseModel):
    """The fields of `POST /v1/completions` that the gateway reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=256, examples=["policy"])]
    prompt: Annotated[str | Texts | TokenIds, Field(examples=["Once upon"])]
    """One prompt: a text, a list with one text, or token ids."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None


@router.post(
    "/v1/completions",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}},
        }
    },
)
async def complete(request: Request) -> ChatExchange:
    """Continue a text with the key's policy; streamed if `stream` is true."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    if key.episode is not None:
        raise RequestRejected(
            "An episode's key takes chats only: a plain completion could not be trained.",
            status=403,
            code="insufficient_scope",
        )
    body = await read_json(request, services.limits)
    chat = await _prepare(services, key, request.headers, body)
    name = completion_id(chat.turn_ids[0])
    keep_logprobs, keep_ids = body.get("logprobs") is not None, bool(body.get("return_token_ids"))
    return ChatExchange(chat, services, lambda: CompletionReply(name, keep_logprobs=keep_logprobs, keep_ids=keep_ids))


async def _prepare(services: Services, key: ApiKey, headers: Headers, body: dict[str, Any]) -> PreparedChat:
    """
    Raises:
        RequestRejected: names the field and the remedy.
        StoreUnavailable: the directory lacks the key's policy or cannot be refreshed.
    """
    services.recorder.require_room()
    parse(CompletionRequest, body)
    messages: list[Message] = [{"role": "user", "content": _text(body["prompt"])}]
    shared = {name: value for name, value in body.items() if name not in (*_CHAT_FIELDS, "logprobs")}
    check_bounds(shared | {"messages": messages}, services.limits.chat)
    policy, choice = await resolve_model(body["model"], key, services.directory)
    fields = sort_fields(shared, (*_ENGINE_FIELDS, *services.limits.engine_fields))
    engine = dict(policy.sampling) | {name: value for name, value in fields.engine.items() if value is not None}
    engine |= {"return_token_ids": True, "logprobs": body.get("logprobs") or 0}
    evidence = identify(headers, shared)
    not_used = tuple(sorted(name for name in _CHAT_FIELDS if body.get(name) is not None))
    return PreparedChat(
        key=key,
        policy=policy,
        request=ChatRequest.model_validate(
            {"model": body["model"], "messages": messages, "stream": body.get("stream"), "n": body.get("n")}
        ),
        body=engine,
        messages=messages,
        evidence=evidence,
        kind=KindDecision(TurnKind.SIDE, "plain completion"),
        version=policy.active if choice.version is None else choice.version,
        pinned=choice.version is not None,
        affinity=f"{key.id}/{evidence.value or messages[0]['content']}"[:256],
        ends_session=False,
        turn_ids=tuple(new_turn_id() for _ in range(body.get("n") or 1)),
        started_at=datetime.now(UTC),
        ignored=(*not_used, *fields.ignored)[:NAMED_LIMIT],
        has_grammar=bool(forced_forms(shared)),
        engine_path="/v1/completions",
        cache_salt=cache_salt(key, policy, services.limits),
    )


def _text(prompt: str | list[Any]) -> str:
    """The prompt's text; empty for token ids, which are recorded as the prompt's.

    Raises:
        RequestRejected: there are several prompts, or none.
    """
    if isinstance(prompt, str):
        return prompt
    if not prompt or (isinstance(prompt[0], str) and len(prompt) > 1):
        raise RequestRejected("`prompt`: send one prompt a request.", code="invalid_value", field="prompt")
    return prompt[0] if isinstance(prompt[0], str) else ""
