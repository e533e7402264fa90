"""OpenAI's Responses: `POST /v1/responses`, a response by its id, and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from api.chat.fields import refuse_internal
from api.chat.request import prepare
from api.chat.stored import as_completion, conversation, instructions_of, stored_turn
from api.chat.stream import ChatExchange
from api.chat.token_count import count_tokens
from api.dependencies import Services, services_of
from api.plain_route import PlainRoute
from api.request_body import read_json
from api.wire.reading import Translated
from api.wire.reply import TokenCounts
from api.wire.responses_reply import ResponsesReply, describe
from api.wire.responses_request import check, translate
from clawloop.contracts.serving import ApiKey, Scope
from clawloop.contracts.turns import Message, StoredTurn, TurnStatus
from clawloop.errors import RequestRejected
from clawloop.ids import responses_id
from clawloop.turns.files import give_back, references_in

router = APIRouter(route_class=PlainRoute)

_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ResponsesRequest"}}},
    }
}
_STATUS = {TurnStatus.ABORTED: "cancelled", TurnStatus.ERROR: "failed"}


@router.post("/v1/responses", openapi_extra=_BODY)
async def responses(request: Request) -> ChatExchange:
    """Chat with the key's policy in the wire format of OpenAI's Responses; streamed if `stream` is true."""
    services, key, body, translated = await _read(request)
    try:
        chat = await prepare(
            services, key, request.headers, translated.body, translated.ignored, translated.instructions
        )
    except RequestRejected as error:
        raise translated.blame(error) from None
    name, described, now = responses_id(chat.turn_ids[0]), describe(body, translated.body), time.time()
    origins = translated.origins
    return ChatExchange(chat, services, lambda: ResponsesReply(name, described, now, origins))


@router.post("/v1/responses/input_tokens", openapi_extra=_BODY)
async def count_input_tokens(request: Request) -> JSONResponse:
    """Number of tokens in a request's prompt; nothing is recorded."""
    services, key, _, translated = await _read(request)
    try:
        count = await count_tokens(services, key, translated.body)
    except RequestRejected as error:
        raise translated.blame(error) from None
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def stored_response(request: Request, response_id: str) -> JSONResponse:
    """A recorded reply of this key."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    stored = await stored_turn(services, key, response_id, "response_id")
    record = stored.record
    policy = await services.directory.find_policy(record.policy)
    request_again = {name: record.sampling.get(name) for name in ("temperature", "top_p")} | {"model": record.alias}
    described = describe(request_again, {"tools": record.tools})
    reply = ResponsesReply(responses_id(record.turn_id), described, record.started_at.timestamp())
    body = as_completion(stored, policy.base_model)
    body["choices"][0]["finish_reason"] = record.finish_reason or "error"
    whole = reply.whole(body, TokenCounts(None, None))
    return JSONResponse(whole | ({"status": _STATUS[record.status]} if record.status in _STATUS else {}))


async def _with_files(services: Services, stored: StoredTurn) -> list[Message]:
    """The messages of a turn and its reply, as an engine reads them."""
    messages = conversation(stored)
    wanted = references_in(messages)
    return give_back(messages, await services.files.of_session(stored.session_id, wanted)) if wanted else messages


async def _read(request: Request) -> tuple[Services, ApiKey, dict[str, Any], Translated]:
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    body = await read_json(request, services.limits)
    refuse_internal(body, services.limits.engine_fields)
    check(body)
    before, instructions = [], 0
    if (previous := body.get("previous_response_id")) is not None:
        stored = await stored_turn(services, key, previous, "previous_response_id")
        before, instructions = await _with_files(services, stored), instructions_of(stored)
    return services, key, body, translate(body, services.limits.engine_fields, before, instructions)
