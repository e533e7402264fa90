"""The chat routes in all four wire formats, and recorded replies by their id."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from api.chat.bounds import check_bounds, check_counted, forced_forms
from api.chat.fields import NAMED_LIMIT, refuse_internal, sort_fields, take_sampling_as_meant, tools_for_engine
from api.chat.models import chat_key, load_named, resolve_model
from api.chat.request import INSTRUCTIONS, ORIGINS, PreparedChat, cache_salt, prepare
from api.chat.schemas import ChatRequest, StreamOptions
from api.chat.sent import sent_to
from api.chat.stream import ChatExchange
from api.dependencies import Services, services_of
from api.json_bounds import Texts, TokenIds
from api.plain_route import PlainRoute
from api.request_body import read_json
from api.wire.messages import CountTokensRequest, MessagesReply, MessagesRequest, check_version, translate_messages
from api.wire.reading import Translated, parse
from api.wire.reply import Chunk, CompletionReply, TokenCounts
from api.wire.responses import ResponsesReply, check, describe, translate_responses
from api.wire.responses_tools import origins_of
from clawloop.core.contracts.serving import ApiKey, RouteKey
from clawloop.core.contracts.turns import KindDecision, Message, StoredTurn, TurnKind, TurnOutcome, TurnStatus
from clawloop.core.errors import EngineAnswerUnusable, RequestRejected, StoreUnavailable
from clawloop.core.ids import (
    completion_id,
    message_id,
    new_turn_id,
    response_id,
    responses_id,
    turn_id_of,
    version_name,
)
from clawloop.core.turns.continued import whole_reply
from clawloop.core.turns.files import give_back, references_in
from clawloop.core.turns.identify import identify

# Recorded turns -------------------------------------------------------------------------------------------------------
# Recorded turns of a key, as its client gets them back: `previous_response_id`, and replies by their id.

# A turn that PostgreSQL did not take in time waits on a gateway's disk for about as long.
_MAY_BE_ON_DISK_SECONDS = 30.0
_FIELDS = ("role", "content", "reasoning_content", "tool_calls")


async def stored_turn(services: Services, key: ApiKey, reply: str, field: str) -> StoredTurn:
    """The turn of this key that has this reply.

    Args:
        reply: its id.
        field: the client's field that has it.

    Raises:
        RequestRejected: 404; this key has no such reply, or it was erased.
        StoreUnavailable: it may be on its way to PostgreSQL.
    """
    turn_id = turn_id_of(reply)
    stored = None if turn_id is None else await services.turns.load(turn_id)
    if stored is not None and stored.record.api_key_id == key.id and stored.outcome is not TurnOutcome.ERASED:
        return stored
    if stored is None and turn_id is not None and turn_id.version == 7:
        age_seconds = time.time() - (turn_id.int >> 80) / 1000
        if 0 <= age_seconds < _MAY_BE_ON_DISK_SECONDS:
            raise StoreUnavailable(f"the turn {turn_id} is not stored yet")
    # The same answer for a reply of another key: keys must not learn of each other's replies.
    raise RequestRejected(
        f"`{field}`: this key has no such reply, or it was erased.", status=404, code="not_found", field=field
    )


def conversation(stored: StoredTurn) -> list[Message]:
    """The messages of a turn and its reply."""
    record = stored.record
    if record.response is None:
        return list(record.messages)
    before, reply = whole_reply(record.messages, record.response, record.sampling)
    return [*before, {name: reply[name] for name in _FIELDS if name in reply}]


def instructions_of(stored: StoredTurn) -> int:
    """Number of characters of the conversation's system message that are a request's `instructions`."""
    found = stored.record.sampling.get(INSTRUCTIONS)
    return found if isinstance(found, int) else 0


def as_completion(stored: StoredTurn, base_model: str) -> Chunk:
    """A stored turn as the chat completion it was."""
    record = stored.record
    message = record.response or {"role": "assistant", "content": ""}
    prompt, response = len(record.prompt_ids or ()), len(record.response_ids or ())
    return {
        "id": "",
        "object": "chat.completion",
        "created": int(record.started_at.timestamp()),
        "model": version_name(record.policy, record.version, base_model),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": record.finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response},
    }


# Chat completions -----------------------------------------------------------------------------------------------------
# `POST /v1/chat/completions`, and a completion by its id.

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
    key = await chat_key(services, request.headers)
    body = await read_json(request, services.limits)
    return ChatExchange(await prepare(services, key, request.headers, body), services)


@router.get("/v1/chat/completions/{completion_id}")
async def stored_completion(request: Request, completion_id: str) -> JSONResponse:
    """A recorded reply of this key."""
    services = services_of(request)
    key = await chat_key(services, request.headers)
    stored = await stored_turn(services, key, completion_id, "completion_id")
    policy = await services.directory.find_policy(stored.record.policy)
    return JSONResponse(as_completion(stored, policy.base_model) | {"id": response_id(stored.record.turn_id)})


# Plain completions ----------------------------------------------------------------------------------------------------
# `POST /v1/completions`: text continued without a chat template; recorded as a side turn.

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
    key = await chat_key(services, request.headers)
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
    take_sampling_as_meant(body)
    parse(CompletionRequest, body)
    messages: list[Message] = [{"role": "user", "content": _text(body["prompt"])}]
    shared = {name: value for name, value in body.items() if name not in (*_CHAT_FIELDS, "logprobs")}
    check_bounds(shared | {"messages": messages}, services.limits.chat)
    policy, choice = await resolve_model(body["model"], key, services.directory)
    await load_named(services, policy, choice)
    fields = sort_fields(shared, (*_ENGINE_FIELDS, *services.limits.engine_fields))
    engine = dict(policy.sampling) | {name: value for name, value in fields.engine.items() if value is not None}
    engine |= {"return_token_ids": True, "logprobs": body.get("logprobs") or 0}
    evidence = replace(identify(headers, shared), policy=key.chosen_policy)
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


# Anthropic's Messages -------------------------------------------------------------------------------------------------
# Anthropic's Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.


def _body_schema(name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


@router.post("/v1/messages", openapi_extra=_body_schema("MessagesRequest"))
async def messages(request: Request) -> ChatExchange:
    """Chat with the key's policy in Anthropic's wire format; streamed if `stream` is true."""
    services, key, translated = await _read_messages(request, MessagesRequest)
    try:
        chat = await prepare(services, key, request.headers, translated.body, translated.ignored)
    except RequestRejected as error:
        raise translated.blame(error) from None
    turn, model = chat.turn_ids[0], chat.request.model
    return ChatExchange(chat, services, lambda: MessagesReply(message_id(turn), model))


@router.post("/v1/messages/count_tokens", openapi_extra=_body_schema("CountTokensRequest"))
async def count_message_tokens(request: Request) -> JSONResponse:
    """Number of tokens in a request's prompt; nothing is recorded."""
    services, key, translated = await _read_messages(request, CountTokensRequest)
    try:
        count = await count_tokens(services, key, translated.body)
    except RequestRejected as error:
        raise translated.blame(error) from None
    return JSONResponse({"input_tokens": count})


async def _read_messages(request: Request, schema: type[CountTokensRequest]) -> tuple[Services, ApiKey, Translated]:
    services = services_of(request)
    key = await chat_key(services, request.headers)
    check_version(request.headers)
    body = await read_json(request, services.limits)
    refuse_internal(body, services.limits.engine_fields)
    return services, key, translate_messages(body, services.limits.engine_fields, schema)


# Counting tokens ------------------------------------------------------------------------------------------------------
# Number of tokens in a request's prompt, by the engine's own template.
#
# An engine splits all texts into tokens on one thread, which chats need too. So the counting for a key is bounded, and
# done one request after the other.

_PROMPT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def count_tokens(services: Services, key: ApiKey, chat: dict[str, Any]) -> int:
    """The tokens of a chat request's prompt.

    Raises:
        RequestRejected: the model's name stands for nothing, `chat_template_kwargs` is no object, the request exceeds a
            bound, or its key a limit.
        EngineAnswerUnusable, EngineBroke, EngineRejected, EngineUnavailable
    """
    check_bounds(chat, services.limits.chat)
    check_counted(chat, services.limits.chat)
    own = chat.get("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        raise RequestRejected(
            "`chat_template_kwargs`: input should be an object.", code="invalid_value", field="chat_template_kwargs"
        )
    policy, _ = await resolve_model(chat["model"], key, services.directory)
    # Adapters do not change the template, so the base model counts for all versions.
    prompt: dict[str, Any] = {name: chat[name] for name in _PROMPT_FIELDS if name in chat}
    if "tools" in prompt:
        prompt["tools"] = tools_for_engine(chat)
    if (effort := chat.get("reasoning_effort")) is not None:
        # As vLLM fills it in for a chat.
        prompt["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | (own or {})
    route = RouteKey(policy.id, 0, policy.base_model, affinity=str(key.id))
    async with (
        services.key_limits.admit_count(key),
        services.engines.open_chat(
            route, lambda model: orjson.dumps(sent_to(model, prompt).body | {"model": policy.base_model}), "/tokenize"
        ) as answer,
    ):
        raw = await answer.body()
    try:
        count = orjson.loads(raw)["count"]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise EngineAnswerUnusable(f"it has no count of tokens ({type(error).__name__})") from error
    if not isinstance(count, int):
        raise EngineAnswerUnusable("its count of tokens is no number")
    return count


# OpenAI's Responses ---------------------------------------------------------------------------------------------------
# OpenAI's Responses: `POST /v1/responses`, a response by its id, and `POST /v1/responses/input_tokens`.

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
    services, key, body, translated = await _read_responses(request)
    try:
        chat = await prepare(
            services, key, request.headers, translated.body, translated.ignored, _recorded_beside(translated)
        )
    except RequestRejected as error:
        raise translated.blame(error) from None
    name, described, now = responses_id(chat.turn_ids[0]), describe(body, translated.body), time.time()
    origins = translated.origins
    return ChatExchange(chat, services, lambda: ResponsesReply(name, described, now, origins))


@router.post("/v1/responses/input_tokens", openapi_extra=_BODY)
async def count_input_tokens(request: Request) -> JSONResponse:
    """Number of tokens in a request's prompt; nothing is recorded."""
    services, key, _, translated = await _read_responses(request)
    try:
        count = await count_tokens(services, key, translated.body)
    except RequestRejected as error:
        raise translated.blame(error) from None
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def stored_response(request: Request, response_id: str) -> JSONResponse:
    """A recorded reply of this key."""
    services = services_of(request)
    key = await chat_key(services, request.headers)
    stored = await stored_turn(services, key, response_id, "response_id")
    record = stored.record
    policy = await services.directory.find_policy(record.policy)
    request_again = {name: record.sampling.get(name) for name in ("temperature", "top_p")} | {"model": record.alias}
    origins = origins_of(record.sampling.get(ORIGINS))
    described = describe(request_again, {"tools": record.tools}, origins)
    reply = ResponsesReply(responses_id(record.turn_id), described, record.started_at.timestamp(), origins)
    body = as_completion(stored, policy.base_model)
    body["choices"][0]["finish_reason"] = record.finish_reason or "error"
    whole = reply.whole(body, TokenCounts(None, None))
    return JSONResponse(whole | ({"status": _STATUS[record.status]} if record.status in _STATUS else {}))


def _recorded_beside(translated: Translated) -> dict[str, JsonValue]:
    beside: dict[str, JsonValue] = {INSTRUCTIONS: translated.instructions} if translated.instructions else {}
    if translated.origins:
        beside[ORIGINS] = {name: list(astuple(origin)) for name, origin in translated.origins.items()}
    return beside


async def _with_files(services: Services, stored: StoredTurn) -> list[Message]:
    """The messages of a turn and its reply, as an engine reads them."""
    messages = conversation(stored)
    wanted = references_in(messages)
    return give_back(messages, await services.files.of_session(stored.session_id, wanted)) if wanted else messages


async def _read_responses(request: Request) -> tuple[Services, ApiKey, dict[str, Any], Translated]:
    services = services_of(request)
    key = await chat_key(services, request.headers)
    body = await read_json(request, services.limits)
    refuse_internal(body, services.limits.engine_fields)
    check(body)
    before, instructions = [], 0
    if (previous := body.get("previous_response_id")) is not None:
        stored = await stored_turn(services, key, previous, "previous_response_id")
        before, instructions = await _with_files(services, stored), instructions_of(stored)
    return services, key, body, translate_responses(body, services.limits.engine_fields, before, instructions)
