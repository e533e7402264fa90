"""`POST /v1/chat/completions`, and a completion by its id."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from api.chat.request import prepare
from api.chat.stored import as_completion, stored_turn
from api.chat.stream import ChatExchange
from api.dependencies import services_of
from api.plain_route import PlainRoute
from api.request_body import read_json
from clawloop.contracts.serving import Scope
from clawloop.ids import response_id

router = APIRouter(route_class=PlainRoute)


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


@router.get("/v1/chat/completions/{completion_id}")
async def stored_completion(request: Request, completion_id: str) -> JSONResponse:
    """A recorded reply of this key."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    stored = await stored_turn(services, key, completion_id, "completion_id")
    policy = await services.directory.find_policy(stored.record.policy)
    return JSONResponse(as_completion(stored, policy.base_model) | {"id": response_id(stored.record.turn_id)})
