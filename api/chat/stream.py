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
from api.chat.lessons import HEADER as LESSONS
from api.chat.request import PreparedChat
from api.chat.sent import Room, room_left, sent_to
from api.dependencies import Services
from api.errors import CONTEXT_OVERFLOW, Problem, to_problem
from api.middleware import request_id_of, trace_headers
from api.wire.reply import ChatReply, ReplyFormat, TokenCounts
from clawloop.core.contracts.serving import ServedModel
from clawloop.core.contracts.turns import TurnKind, TurnRecord, TurnStatus
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
_STOPPING = Problem(
    503,
    "The gateway is being stopped. Send the request again.",
    "gateway_stopping",
    retry_after=str(STOP_RETRY_SECONDS),
)
# A request whose engine dies before the client got a byte is sent once more.
ATTEMPTS = 2

_EVENTS = b"text/event-stream; charset=utf-8"
_READING_CHUNK = ReadingAnswer("a chunk is not a chat chunk")
_PASSING_CHUNK = ReadingAnswer("a chunk cannot be passed on")
_READING_BODY = ReadingAnswer("the body is not a chat completion")
_PASSING_BODY = ReadingAnswer("the body cannot be passed on")


# An attempt -----------------------------------------------------------------------------------------------------------
# One request to an engine: what was sent, and what came back so far.


class Attempt:
    """
    Args:
        version: that is to answer.
        reply: writes this attempt's answer in the client's wire format.
        room: by an engine that refused a longer reply; None: not known.

    Attributes:
        engine_id: None before an engine took the request.
        sent: the request as that engine got it.
    """

    def __init__(
        self, chat: PreparedChat, version: int, reply: ReplyFormat, meter: TokenMeter, room: Room | None
    ) -> None:
        request = chat.request
        self.version = version
        self.reply = reply
        self.engine_id: str | None = None
        self.sent = sent_to(ServedModel(), chat.body, lessons=chat.lessons)
        self.capture = Capture(
            choices=len(chat.turn_ids),
            keep_logprobs=bool(request.logprobs),
            keep_ids=bool(request.return_token_ids),
            keep_reasoning=request.include_reasoning is not False,
        )
        self._chat = chat
        self._room = room
        self._meter = meter
        self._sent_bytes = 0
        meter.begin()

    def body_for(self, model: ServedModel) -> bytes:
        """The request for the engine that was chosen."""
        self.sent = sent_to(model, self._chat.body, self._room, self._chat.lessons)
        body = self._chat.engine_body(self.version, self.sent)
        self._sent_bytes = len(body)
        return body

    async def before_sending(self, grammar: GrammarSlot | None, engine: str) -> None:
        if grammar is not None:
            await grammar.on(engine)
        self._meter.sending(self._sent_bytes)

    def take_chunk(self, chunk: Chunk) -> list[ChoiceCapture]:
        """The choices that end with this chunk.

        Raises:
            EngineAnswerUnusable: it is not a chat chunk.
        """
        with _READING_CHUNK:
            chat = self.reply.as_chat(chunk)
            self._meter.take(chunk, chat)
            return self.capture.take_chunk(chat)

    def take_body(self, body: Chunk) -> list[ChoiceCapture]:
        """The choices of an answer that is not streamed.

        Raises:
            EngineAnswerUnusable: it is not a chat completion.
        """
        with _READING_BODY:
            chat = self.reply.as_chat(body)
            self._meter.take(body, chat)
            return self.capture.take_body(chat)

    @property
    def counts(self) -> TokenCounts:
        prompt, response = self.capture.prompt_ids, self.capture.choices[0].response_ids
        return TokenCounts(None if prompt is None else len(prompt), None if response is None else len(response))


# Recording ------------------------------------------------------------------------------------------------------------


class ChoiceRecorder:
    """Records each choice of one chat as a turn, once.

    Attributes:
        session: as far as it is known: named by the client, or that of a recorded choice.
    """

    def __init__(self, chat: PreparedChat, services: Services) -> None:
        self._chat = chat
        self._services = services
        self._recorded: set[int] = set()
        evidence = chat.evidence
        self.session = None if evidence.value is None else named_session_id(chat.key.id, evidence)

    @property
    def has_all(self) -> bool:
        return len(self._recorded) == len(self._chat.turn_ids)

    async def record_finished(self, attempt: Attempt, choices: Sequence[ChoiceCapture]) -> None:
        """Store the choices that ended, even if the client disconnects meanwhile."""

        async def store() -> None:
            crash_point(CrashPoint.REPLY_NOT_STORED)
            for choice in choices:
                await self._record(attempt, choice, choice.status(), choice.unusable)

        if choices:
            await asyncio.shield(self._services.spawn(store()))

    async def record_unfinished(self, attempt: Attempt, status: TurnStatus, error: str | None) -> None:
        """Store each choice that is not stored yet, with the tokens it has so far."""
        for choice in attempt.capture.choices:
            if choice.finish_reason is not None:
                await self._record(attempt, choice, choice.status(), choice.unusable)
            else:
                await self._record(attempt, choice, status, error)

    async def _record(self, attempt: Attempt, choice: ChoiceCapture, status: TurnStatus, error: str | None) -> None:
        if choice.index in self._recorded:
            return
        self._recorded.add(choice.index)
        if choice.unusable is not None:
            self._services.metrics.turns_without_tokens.inc()
        chat = self._chat
        sampling = chat.sampling(attempt.sent)
        response = choice.message()
        if response is not None:
            before, whole = whole_reply(chat.messages, response, sampling)
            self._services.versions.remember(chat.key.id, chat.policy.id, whole, attempt.version)
            if chat.policy.lessons is not None and chat.kind.kind is TurnKind.MAIN:
                self._services.lessons.remember(chat.key.id, chat.evidence, [*before, whole], chat.lessons)
        prompt_ids = attempt.capture.prompt_ids
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
            version=attempt.version,
            engine_id=attempt.engine_id,
            messages=chat.messages,
            tools=attempt.sent.body.get("tools"),
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
            lessons=chat.lessons,
        )
        self.session = await self._services.recorder.record(record) or self.session


# Writing --------------------------------------------------------------------------------------------------------------


class ReplyWriter:
    """Sends headers, events, a body or an error to the client.

    Attributes:
        has_begun: the headers were sent, so neither the status nor the engine can change.
    """

    def __init__(self, chat: PreparedChat, services: Services, recorder: ChoiceRecorder, path: str, send: Send) -> None:
        self.has_begun = False
        self._chat = chat
        self._services = services
        self._recorder = recorder
        self._path = path
        self._send = send
        self._started = time.perf_counter()

    async def events(self, attempt: Attempt, waiting: list[bytes]) -> None:
        """Send the events that wait, and empty their list."""
        if waiting:
            events = b"".join(waiting)
            waiting.clear()
            await self._send_headers(attempt, _EVENTS)
            await self._send(_body_event(events, more=True))
            crash_point(CrashPoint.MID_STREAM)

    async def end(self, attempt: Attempt) -> None:
        """End a stream."""
        await self._send(_body_event(attempt.reply.end(attempt.counts), more=False))

    async def whole(self, attempt: Attempt, content: bytes) -> None:
        await self._send_headers(attempt, b"application/json", len(content))
        await self._send(_body_event(content, more=False))

    async def problem(self, attempt: Attempt, problem: Problem) -> None:
        in_stream = problem.code == CONTEXT_OVERFLOW and self._chat.request.stream and attempt.reply.streams_overflow
        if self.has_begun or in_stream:
            await self._send_headers(attempt, _EVENTS)
            await self._send(_body_event(attempt.reply.failure(problem), more=False))
            return
        response = problem.response(self._path)
        response.headers.update(self._services.key_limits.headers(self._chat.key))
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._send(start)
        await self._send(_body_event(bytes(response.body), more=False))

    async def _send_headers(self, attempt: Attempt, media_type: bytes, length: int | None = None) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        self._services.metrics.first_token_seconds.observe(time.perf_counter() - self._started)
        headers = [(b"content-type", media_type), (b"x-clawloop-version", str(attempt.version).encode())]
        if self._recorder.session is not None:
            headers.append((b"x-clawloop-session", str(self._recorder.session).encode()))
        for name, value in self._services.key_limits.headers(self._chat.key).items():
            headers.append((name.encode(), value.encode()))
        if self._chat.lessons:
            headers.append((LESSONS.encode(), ", ".join(str(one.id) for one in self._chat.lessons).encode()))
        if ignored := (*self._chat.ignored, *attempt.sent.ignored):
            headers.append((b"x-clawloop-ignored", ", ".join(ignored).encode()))
        if changed := attempt.sent.changed(attempt.counts.prompt):
            headers.append((b"x-clawloop-changed", ", ".join(changed).encode()))
        if length is None:
            # Otherwise nginx would buffer the stream.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


# The exchange ---------------------------------------------------------------------------------------------------------


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
        self._new_reply = new_reply or (lambda: ChatReply(response_id(chat.turn_ids[0])))
        self._trace: dict[str, str] = {}
        self._request_id: str | None = None
        most = chat.body.get("max_completion_tokens") or chat.body.get("max_tokens")
        self._meter = TokenMeter(len(chat.turn_ids), most)
        self._recorder = ChoiceRecorder(chat, services)
        self._attempt = Attempt(chat, chat.version, self._new_reply(), self._meter, None)
        self._reading = ClientReading(services.limits.chat.blocked_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self._trace = trace_headers(Headers(scope=scope))
        self._request_id = request_id_of(scope)
        chat = self._chat
        writer = ReplyWriter(chat, self._services, self._recorder, path, self._reading.timed(send))
        with span("chat", "server", self._trace, path=path, policy=chat.policy.id, turn_kind=chat.kind.kind) as traced:
            traced.set(turn=str(chat.turn_ids[0]), choices=len(chat.turn_ids), stream=bool(chat.request.stream))
            await self._serve(receive, writer)
            attempt = self._attempt
            sampled = sum(len(choice.response_ids or ()) for choice in attempt.capture.choices)
            traced.set(version=attempt.version, engine=attempt.engine_id, response_tokens=sampled)

    async def _serve(self, receive: Receive, writer: ReplyWriter) -> None:
        stopped = slow = False
        with self._services.metrics.in_flight.track_inprogress():
            # Spawned, so that shutdown waits until the turn is stored.
            answering = self._services.spawn(self._answer(writer))
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
            # A whole answer whose length is announced breaks off.
            if stopped and (self._chat.request.stream or not writer.has_begun):
                await self._say_cut(writer, _STOPPING, STOP_SECONDS)
            elif slow:
                await self._say_cut(writer, self._reading.too_slow(), SLOW_SECONDS)
        elif (error := answering.exception()) is not None:
            raise error

    async def _say_cut(self, writer: ReplyWriter, problem: Problem, seconds: float) -> None:
        """End a cut answer with an error."""
        with suppress(TimeoutError):  # of a client that reads nothing
            async with asyncio.timeout(seconds):
                await writer.problem(self._attempt, problem)

    async def _answer(self, writer: ReplyWriter) -> None:
        limits, key = self._services.key_limits, self._chat.key
        try:
            with limits.admit(key):
                try:
                    await self._answer_with_retry(writer)
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
            self._services.spawn(self._recorder.record_unfinished(self._attempt, TurnStatus.ABORTED, None))
            raise
        except ClawloopError as error:
            problem = to_problem(error)
            # Without the error's message: it may be the engine's, and quote the conversation.
            log.warning("chat failed", extra={"status": problem.status, "code": problem.code, **self._log_fields()})
            if not _is_refusal(error):
                unfinished = self._recorder.record_unfinished(self._attempt, TurnStatus.ERROR, str(error))
                await asyncio.shield(self._services.spawn(unfinished))
            await writer.problem(self._attempt, problem)

    async def _answer_with_retry(self, writer: ReplyWriter) -> None:
        """Ask an engine; ask once more if it fails before the client got anything."""
        version, room = self._chat.version, None
        for number in range(1, ATTEMPTS + 1):
            attempt = self._attempt = Attempt(self._chat, version, self._new_reply(), self._meter, room)
            try:
                await self._ask(attempt, number, writer)
                return
            except EngineRejected as error:
                attempt.engine_id = error.engine_id
                if number < ATTEMPTS and (left := room_left(error)) is not None:
                    room = left
                    continue
                # The engine no longer has this version: try the active one.
                if error.status != 404 or self._chat.pinned or version == 0:
                    raise
                if number == ATTEMPTS:
                    raise EngineUnavailable("the engine no longer has the adapter it had loaded") from error
                active = self._services.directory.policy(self._chat.policy.id).active
                if version == active and error.engine_id is not None:
                    self._services.engines.mark_missing(error.engine_id, self._chat.route(version))
                version = active
            except EngineBroke as error:
                attempt.engine_id = error.engine_id or attempt.engine_id
                if writer.has_begun or number == ATTEMPTS:
                    raise

    async def _ask(self, attempt: Attempt, number: int, writer: ReplyWriter) -> None:
        chat, engines = self._chat, self._services.engines
        async with AsyncExitStack() as slot:
            grammar = None
            if chat.has_grammar:
                grammar = await slot.enter_async_context(self._services.grammar_slots.slot(chat.key.id))
            sending = partial(attempt.before_sending, grammar)
            with span("engine", "client", version=attempt.version, attempt=number) as traced:
                trace, route = traced.headers() or self._trace, chat.route(attempt.version)
                async with engines.open_chat(route, attempt.body_for, chat.engine_path, trace, sending) as answer:
                    attempt.engine_id = answer.engine_id
                    traced.set(engine=answer.engine_id)
                    if chat.request.stream:
                        await self._relay_stream(attempt, answer, writer, slot)
                    else:
                        await self._relay_whole(attempt, answer, writer)

    async def _relay_stream(
        self, attempt: Attempt, answer: EngineAnswer, writer: ReplyWriter, grammar_slot: AsyncExitStack
    ) -> None:
        async for arrived in answer.events():
            await grammar_slot.aclose()  # the first token shows that the grammar is compiled
            # What arrived together is sent together: a write to the socket costs several times what a chunk does.
            waiting: list[bytes] = []
            try:
                for data in arrived:
                    chunk = parse_chunk(data)
                    if ended := attempt.take_chunk(chunk):
                        await writer.events(attempt, waiting)
                        await self._recorder.record_finished(attempt, ended)
                    with _PASSING_CHUNK:
                        waiting.append(attempt.reply.part(chunk, attempt.counts))
            finally:  # also what precedes a chunk that cannot be read
                await writer.events(attempt, waiting)
        if not self._recorder.has_all:
            raise EngineBroke(f"engine {answer.engine_id} ended its stream before the answer's end")
        await writer.end(attempt)

    async def _relay_whole(self, attempt: Attempt, answer: EngineAnswer, writer: ReplyWriter) -> None:
        body = parse_chunk(await answer.body())
        await self._recorder.record_finished(attempt, attempt.take_body(body))
        with _PASSING_BODY:
            content = orjson.dumps(attempt.reply.whole(body, attempt.counts))
        await writer.whole(attempt, content)

    def _log_fields(self) -> dict[str, object]:
        return {
            "turn_id": str(self._chat.turn_ids[0]),
            "engine_id": self._attempt.engine_id,
            "version": self._attempt.version,
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
