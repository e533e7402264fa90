"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from api.chat.request import prepare
from api.chat.stream import ChatExchange
from api.dependencies import services_of
from api.request_body import read_json
from clawloop.contracts.serving import Scope

router = APIRouter()


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
