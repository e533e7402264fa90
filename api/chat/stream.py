"""Relays an engine's answer to the client and records each choice as a turn.

Each chunk is sent as soon as it arrives, except the one that ends a choice: it waits until the turn is stored, so a
choice that a client saw end is recorded. A client that disconnects, reads nothing for a minute or too slowly in all,
ends the engine's request; the tokens up to then are recorded as an aborted turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from api.chat.capture import Capture, ChoiceCapture, Chunk, ReadingAnswer, parse_chunk
from api.chat.grammar_slots import GrammarSlot
from api.chat.key_limits import ClientReading, TokenMeter
from api.chat.request import PreparedChat
from api.chat.sent import Room, room_left, sent_to
from api.dependencies import Services
from api.errors import CONTEXT_OVERFLOW, Problem, to_problem
from api.middleware import request_id_of, trace_headers
from api.wire.reply import ChatReply, ReplyFormat, TokenCounts
from clawloop.core.contracts.serving import ServedModel
from clawloop.core.contracts.turns import TurnRecord, TurnStatus
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import (
    ClawloopError,
    EngineBroke,
    EngineRejected,
    EnginesBusy,
    EngineUnavailable,
    RequestRejected,
)
from clawloop.core.ids import response_id
from clawloop.core.telemetry.tracing import span
from clawloop.core.turns.continued import whole_reply
from clawloop.core.turns.identify import named_session_id
from clawloop.serving.chat import EngineAnswer

log = logging.getLogger(__name__)

STALL_CHECK_SECONDS = 5.0
# A client that reads too slowly has this long to take the error; its request holds no place on the engine by then.
SLOW_SECONDS = 30.0
# A stopping gateway waits this long for a client to take the error; the next one listens within seconds.
STOP_SECONDS = 0.5
STOP_RETRY_SECONDS = 2
# A request whose engine dies before the client got a byte is sent once more.
ATTEMPTS = 2

_EVENTS = b"text/event-stream; charset=utf-8"
_READING_CHUNK = ReadingAnswer("a chunk is not a chat chunk")
_PASSING_CHUNK = ReadingAnswer("a chunk cannot be passed on")
_READING_BODY = ReadingAnswer("the body is not a chat completion")
_PASSING_BODY = ReadingAnswer("the body cannot be passed on")


class ChatExchange(Response):
    """The response to one chat request. The engine is asked when the response is sent.

    Args:
        new_reply: makes what writes the reply in the client's wire format; None: chat completions.
    """

    def __init__(
        self, chat: PreparedChat, services: Services, new_reply: Callable[[], ReplyFormat] | None = None
    ) -> None:
        super().__init__()
        self._chat = chat
        self._services = services
        self._version = chat.version
        self._new_reply = new_reply or (lambda: ChatReply(response_id(chat.turn_ids[0])))
        self._reply = self._new_reply()
        self._path = ""
        self._trace: dict[str, str] = {}
        self._request_id: str | None = None
        evidence = chat.evidence
        self._session = None if evidence.value is None else named_session_id(chat.key.id, evidence)
        self._engine_id: str | None = None
        self._sent = sent_to(ServedModel(), chat.body)
        self._sent_bytes = 0
        self._room: Room | None = None  # by an engine that refused more
        self._capture = self._new_capture()
        most = chat.body.get("max_completion_tokens") or chat.body.get("max_tokens")
        self._meter = TokenMeter(len(chat.turn_ids), most)
        self._recorded: set[int] = set()
        self._headers_sent = False
        self._started = time.perf_counter()
        self._reading = ClientReading(services.limits.chat.blocked_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = scope["path"]
        self._trace = trace_headers(Headers(scope=scope))
        self._request_id = request_id_of(scope)
        chat = self._chat
        with span(
            "chat", "server", self._trace, path=self._path, policy=chat.policy.id, turn_kind=chat.kind.kind
        ) as traced:
            traced.set(turn=str(chat.turn_ids[0]), choices=len(chat.turn_ids), stream=bool(chat.request.stream))
            await self._serve(receive, send)
            sampled = sum(len(choice.response_ids or ()) for choice in self._capture.choices)
            traced.set(version=self._version, engine=self._engine_id, response_tokens=sampled)

    async def _serve(self, receive: Receive, send: Send) -> None:
        stopped = slow = False
        with self._services.metrics.in_flight.track_inprogress():
            # Spawned, so that shutdown waits until the turn is stored.
            answering = self._services.spawn(self._answer(self._reading.timed(send)))
            watching = asyncio.create_task(_wait_for_disconnect(receive))
            tasks = {answering, watching}
            try:
                while not (await asyncio.wait(tasks, timeout=STALL_CHECK_SECONDS, return_when=FIRST_COMPLETED))[0]:
                    if self._reading.stalls():
                        log.warning("answer cut: the client reads nothing", extra=self._log_fields())
                        break
                    if self._reading.is_too_slow():
                        log.warning("answer cut: the client reads too slowly", extra=self._log_fields())
                        slow = True
                        break
            except asyncio.CancelledError:
                # The server stops: recorded as if the client had disconnected.
                log.info("answer cut by shutdown", extra=self._log_fields())
                stopped = True
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        if answering.cancelled():
            if stopped:
                await self._say_stopped(send)
            elif slow:
                await self._say_cut(send, self._reading.too_slow(), SLOW_SECONDS)
        elif (error := answering.exception()) is not None:
            raise error

    async def _say_stopped(self, send: Send) -> None:
        """End a cut answer with an error; a whole one whose length is announced breaks off."""
        if self._headers_sent and not self._chat.request.stream:
            return
        message = "The gateway is being stopped. Send the request again."
        problem = Problem(503, message, "gateway_stopping", retry_after=str(STOP_RETRY_SECONDS))
        await self._say_cut(send, problem, STOP_SECONDS)

    async def _say_cut(self, send: Send, problem: Problem, seconds: float) -> None:
        with suppress(TimeoutError):  # of a client that reads nothing
            async with asyncio.timeout(seconds):
                await self._send_problem(send, problem)

    async def _answer(self, send: Send) -> None:
        limits, key = self._services.key_limits, self._chat.key
        try:
            with limits.admit(key):
                try:
                    await self._answer_with_retry(send)
                except asyncio.CancelledError:
                    limits.charge(key, self._meter.total_of_cut(limits.pace))
                    raise
                except ClawloopError:
                    limits.charge(key, self._meter.total())
                    raise
                limits.charge(key, self._meter.total())
                self._meter.set_pace(limits.pace)
        except asyncio.CancelledError:
            # The client disconnected or stalled.
            self._services.spawn(self._record_unfinished(TurnStatus.ABORTED, None))
            raise
        except ClawloopError as error:
            problem = to_problem(error)
            # Without the error's message: it may be the engine's, and quote the conversation.
            log.warning("chat failed", extra={"status": problem.status, "code": problem.code, **self._log_fields()})
            if not _is_refusal(error):
                await asyncio.shield(self._services.spawn(self._record_unfinished(TurnStatus.ERROR, str(error))))
            await self._send_problem(send, problem)

    async def _answer_with_retry(self, send: Send) -> None:
        """Ask an engine; ask once more if it fails before the client got anything."""
        for attempt in range(1, ATTEMPTS + 1):
            self._capture = self._new_capture()
            self._reply = self._new_reply()
            self._meter.begin()
            self._engine_id = None
            route = self._chat.route(self._version)
            try:
                async with AsyncExitStack() as slot:
                    grammar = None
                    if self._chat.has_grammar:
                        slots = self._services.grammar_slots
                        grammar = await slot.enter_async_context(slots.slot(self._chat.key.id))
                    path, sending = self._chat.engine_path, partial(self._before_sending, grammar)
                    with span("engine", "client", version=self._version, attempt=attempt) as traced:
                        trace, engines = traced.headers() or self._trace, self._services.engines
                        async with engines.open_chat(route, self._body_for, path, trace, sending) as answer:
                            self._engine_id = answer.engine_id
                            traced.set(engine=answer.engine_id)
                            if self._chat.request.stream:
                                await self._send_stream(answer, send, slot)
                            else:
                                await self._send_whole(answer, send)
                return
            except EngineRejected as error:
                self._engine_id = error.engine_id
                if self._room is None and (room := room_left(error)) is not None and attempt < ATTEMPTS:
                    self._room = room
                    continue
                # The engine no longer has this version: try the active one.
                if error.status != 404 or self._chat.pinned or self._version == 0:
                    raise
                if attempt == ATTEMPTS:
                    raise EngineUnavailable("the engine no longer has the adapter it had loaded") from error
                active = self._services.directory.policy(self._chat.policy.id).active
                if self._version == active and error.engine_id is not None:
                    self._services.engines.mark_missing(error.engine_id, route)
                self._version = active
            except EngineBroke as error:
                self._engine_id = error.engine_id or self._engine_id
                if self._headers_sent or attempt == ATTEMPTS:
                    raise

    def _body_for(self, model: ServedModel) -> bytes:
        """The request for the engine that was chosen."""
        self._sent = sent_to(model, self._chat.body, self._room)
        body = self._chat.engine_body(self._version, self._sent)
        self._sent_bytes = len(body)
        return body

    async def _before_sending(self, grammar: GrammarSlot | None, engine: str) -> None:
        if grammar is not None:
            await grammar.on(engine)
        self._meter.sending(self._sent_bytes)

    async def _send_stream(self, answer: EngineAnswer, send: Send, grammar_slot: AsyncExitStack) -> None:
        async for arrived in answer.events():
            await grammar_slot.aclose()  # the first token shows that the grammar is compiled
            # What arrived together is sent together: a write to the socket costs several times what a chunk does.
            waiting: list[bytes] = []
            try:
                for data in arrived:
                    chunk = parse_chunk(data)
                    if ended := self._take_chunk(chunk):
                        await self._send_events(send, waiting)
                        await self._record_finished(ended)
                    with _PASSING_CHUNK:
                        waiting.append(self._reply.part(chunk, self._token_counts()))
            finally:  # also what precedes a chunk that cannot be read
                await self._send_events(send, waiting)
        if len(self._recorded) < len(self._capture.choices):
            raise EngineBroke(f"engine {answer.engine_id} ended its stream before the answer's end")
        await send(_body_event(self._reply.end(self._token_counts()), more=False))

    def _take_chunk(self, chunk: Chunk) -> list[ChoiceCapture]:
        """The choices that end with this chunk.

        Raises:
            EngineAnswerUnusable: it is not a chat chunk.
        """
        with _READING_CHUNK:
            chat = self._reply.as_chat(chunk)
            self._meter.take(chunk, chat)
            return self._capture.take_chunk(chat)

    async def _send_events(self, send: Send, waiting: list[bytes]) -> None:
        if waiting:
            events = b"".join(waiting)
            waiting.clear()
            await self._send_headers(send, _EVENTS)
            await send(_body_event(events, more=True))
            crash_point(CrashPoint.MID_STREAM)

    async def _send_whole(self, answer: EngineAnswer, send: Send) -> None:
        body = parse_chunk(await answer.body())
        with _READING_BODY:
            chat = self._reply.as_chat(body)
            self._meter.take(body, chat)
            choices = self._capture.take_body(chat)
        await self._record_finished(choices)
        with _PASSING_BODY:
            content = orjson.dumps(self._reply.whole(body, self._token_counts()))
        await self._send_headers(send, b"application/json", len(content))
        await send(_body_event(content, more=False))

    async def _send_headers(self, send: Send, media_type: bytes, length: int | None = None, status: int = 200) -> None:
        if self._headers_sent:
            return
        self._headers_sent = True
        self._services.metrics.first_token_seconds.observe(time.perf_counter() - self._started)
        headers = [(b"content-type", media_type), (b"x-clawloop-version", str(self._version).encode())]
        if self._session is not None:
            headers.append((b"x-clawloop-session", str(self._session).encode()))
        for name, value in self._services.key_limits.headers(self._chat.key).items():
            headers.append((name.encode(), value.encode()))
        if ignored := (*self._chat.ignored, *self._sent.ignored):
            headers.append((b"x-clawloop-ignored", ", ".join(ignored).encode()))
        if changed := self._sent.changed(self._token_counts().prompt):
            headers.append((b"x-clawloop-changed", ", ".join(changed).encode()))
        if length is None:
            # Otherwise nginx would buffer the stream.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_problem(self, send: Send, problem: Problem) -> None:
        if self._headers_sent:
            # The status was sent already.
            await send(_body_event(self._reply.failure(problem), more=False))
            return
        if problem.code == CONTEXT_OVERFLOW and self._chat.request.stream and self._reply.streams_overflow:
            await self._send_headers(send, _EVENTS)
            await send(_body_event(self._reply.failure(problem), more=False))
            return
        response = problem.response(self._path)
        response.headers.update(self._services.key_limits.headers(self._chat.key))
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send(_body_event(bytes(response.body), more=False))

    async def _record_finished(self, choices: Sequence[ChoiceCapture]) -> None:
        """Store the choices that ended, even if the client disconnects meanwhile."""

        async def store() -> None:
            crash_point(CrashPoint.REPLY_NOT_STORED)
            for choice in choices:
                await self._record(choice, choice.status(), choice.unusable)

        if choices:
            await asyncio.shield(self._services.spawn(store()))

    async def _record_unfinished(self, status: TurnStatus, error: str | None) -> None:
        """Store each choice that is not stored yet, with the tokens it has so far."""
        for choice in self._capture.choices:
            if choice.finish_reason is not None:
                await self._record(choice, choice.status(), choice.unusable)
            else:
                await self._record(choice, status, error)

    async def _record(self, choice: ChoiceCapture, status: TurnStatus, error: str | None) -> None:
        if choice.index in self._recorded:
            return
        self._recorded.add(choice.index)
        if choice.unusable is not None:
            self._services.metrics.turns_without_tokens.inc()
        chat = self._chat
        sampling = chat.sampling(self._sent)
        response = choice.message()
        if response is not None:
            _, whole = whole_reply(chat.messages, response, sampling)
            self._services.versions.remember(chat.key.id, chat.policy.id, whole, self._version)
        prompt_ids = self._capture.prompt_ids
        has_tokens = prompt_ids is not None and (response is not None or bool(choice.response_ids))
        record = TurnRecord(
            turn_id=chat.turn_ids[choice.index],
            group_id=chat.turn_ids[0] if len(chat.turn_ids) > 1 else None,
            choice=choice.index,
            api_key_id=chat.key.id,
            policy=chat.policy.id,
            alias=chat.request.model,
            evidence=chat.evidence,
            kind=chat.kind.kind,
            kind_reason=chat.kind.reason,
            status=status,
            error=error,
            version=self._version,
            engine_id=self._engine_id,
            messages=chat.messages,
            tools=self._sent.body.get("tools"),
            response=response,
            prompt_ids=prompt_ids,
            response_ids=choice.response_ids if has_tokens else None,
            logprobs=choice.logprobs if has_tokens else None,
            sampling=sampling,
            finish_reason=choice.finish_reason,
            ends_session=chat.ends_session,
            started_at=chat.started_at,
            finished_at=datetime.now(UTC),
            episode_id=chat.key.episode,
        )
        self._session = await self._services.recorder.record(record) or self._session

    def _token_counts(self) -> TokenCounts:
        prompt, response = self._capture.prompt_ids, self._capture.choices[0].response_ids
        return TokenCounts(None if prompt is None else len(prompt), None if response is None else len(response))

    def _new_capture(self) -> Capture:
        request = self._chat.request
        return Capture(
            choices=len(self._chat.turn_ids),
            keep_logprobs=bool(request.logprobs),
            keep_ids=bool(request.return_token_ids),
            keep_reasoning=request.include_reasoning is not False,
        )

    def _log_fields(self) -> dict[str, object]:
        return {
            "turn_id": str(self._chat.turn_ids[0]),
            "engine_id": self._engine_id,
            "version": self._version,
            "request_id": self._request_id,
        }


def _is_refusal(error: ClawloopError) -> bool:
    """No engine accepted the request, so there is no turn to record."""
    refused = isinstance(error, EngineRejected) and 400 <= error.status < 500
    return refused or isinstance(error, RequestRejected | EnginesBusy)


def _body_event(content: bytes, *, more: bool) -> AsgiMessage:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
