"""Anthropic's Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from api.chat.fields import refuse_internal
from api.chat.request import prepare
from api.chat.stream import ChatExchange
from api.chat.token_count import count_tokens
from api.dependencies import Services, services_of
from api.plain_route import PlainRoute
from api.request_body import read_json
from api.wire.messages_reply import MessagesReply
from api.wire.messages_request import CountTokensRequest, MessagesRequest, check_version, translate
from api.wire.reading import Translated
from clawloop.contracts.serving import ApiKey, Scope
from clawloop.errors import RequestRejected
from clawloop.ids import message_id

router = APIRouter(route_class=PlainRoute)


def _body_schema(name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


@router.post("/v1/messages", openapi_extra=_body_schema("MessagesRequest"))
async def messages(request: Request) -> ChatExchange:
    """Chat with the key's policy in Anthropic's wire format; streamed if `stream` is true."""
    services, key, translated = await _read(request, MessagesRequest)
    try:
        chat = await prepare(services, key, request.headers, translated.body, translated.ignored)
    except RequestRejected as error:
        raise translated.blame(error) from None
    turn, model = chat.turn_ids[0], chat.request.model
    return ChatExchange(chat, services, lambda: MessagesReply(message_id(turn), model))


@router.post("/v1/messages/count_tokens", openapi_extra=_body_schema("CountTokensRequest"))
async def count_message_tokens(request: Request) -> JSONResponse:
    """Number of tokens in a request's prompt; nothing is recorded."""
    services, key, translated = await _read(request, CountTokensRequest)
    try:
        count = await count_tokens(services, key, translated.body)
    except RequestRejected as error:
        raise translated.blame(error) from None
    return JSONResponse({"input_tokens": count})


async def _read(request: Request, schema: type[CountTokensRequest]) -> tuple[Services, ApiKey, Translated]:
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    check_version(request.headers)
    body = await read_json(request, services.limits)
    refuse_internal(body, services.limits.engine_fields)
    return services, key, translate(body, services.limits.engine_fields, schema)
