"""One answer on its way from an engine to a client, recorded before its end leaves.

Knows nothing about how the request was understood. Each token goes out when the engine made it. The chunk that ends
a choice waits until its turn is stored, so what a client saw end is recorded. A client that goes away, or reads
nothing for a minute, ends the engine's request, and what was made until then is recorded as aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from api.chat.capture import Capture, ChoiceCapture, Chunk
from api.dependencies import Services
from api.errors import Problem, problem_of
from api.ports import Answer
from clawloop.contracts.turns import TurnRecord, TurnStatus
from clawloop.errors import (
    ClawloopError,
    EngineAnswerUnusable,
    EngineBroke,
    EngineRejected,
    EngineUnavailable,
)
from clawloop.ids import response_id

if TYPE_CHECKING:
    from api.chat.route import PreparedChat

log = logging.getLogger(__name__)

# A client that takes nothing for this long sleeps or hangs; its reply holds a place in the engine.
UNREAD_SECONDS = 60.0
LOOK_SECONDS = 5.0
# An engine that dies before the client saw anything costs the client nothing but time, once.
ATTEMPTS = 2


class ChatExchange(Response):
    """The response to one chat request; opens the engine's answer when it is sent."""

    def __init__(self, chat: PreparedChat, services: Services) -> None:
        super().__init__()
        self._chat = chat
        self._services = services
        self._version = chat.version
        self._engine_id: str | None = None
        self._capture = self._fresh_capture()
        self._recorded: set[int] = set()
        self._begun = False
        self._clock = time.perf_counter()
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.metrics.in_flight.track_inprogress():
            # Spawned, so that shutdown waits until what was made is stored.
            answering = self._services.spawn(self._answer(self._timed(send)))
            leaving = [asyncio.create_task(_client_leaves(receive)), asyncio.create_task(self._client_stops_reading())]
            try:
                await asyncio.wait({answering, *leaving}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                # The server stops: this client is left as one that left us.
                log.info("answer cut by shutdown", extra=self._ids())
            finally:
                for task in (answering, *leaving):
                    task.cancel()
                await asyncio.wait({answering, *leaving})
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    def _timed(self, send: Send) -> Send:
        """Sends, and notes since when it waits for the client to read."""

        async def timed(message: AsgiMessage) -> None:
            self._sending_since = time.monotonic()
            await send(message)
            self._sending_since = None

        return timed

    async def _client_stops_reading(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            since = self._sending_since
            if since is not None and time.monotonic() - since > UNREAD_SECONDS:
                log.warning("client reads nothing, its answer is cut", extra=self._ids())
                return

    async def _answer(self, send: Send) -> None:
        try:
            await self._exchange(send)
        except asyncio.CancelledError:
            # The client is gone; the turn is kept without it.
            self._services.spawn(self._record_unended(TurnStatus.ABORTED, None))
            raise
        except ClawloopError as error:
            problem = problem_of(error)
            # Not the error's words: they may be the engine's own, and hold what it was sent.
            log.warning("chat failed", extra={"status": problem.status, "code": problem.code, **self._ids()})
            if not _is_refusal(error):
                await asyncio.shield(self._services.spawn(self._record_unended(TurnStatus.ERROR, str(error))))
            await self._send_problem(send, problem)

    async def _exchange(self, send: Send) -> None:
        """Ask, and ask once more where the client need not notice."""
        for attempt in range(1, ATTEMPTS + 1):
            self._capture = self._fresh_capture()
            self._engine_id = None
            wanted = self._chat.wanted(self._version)
            try:
                async with self._services.engines.ask(wanted, self._chat.engine_body(self._version)) as answer:
                    self._engine_id = answer.engine_id
                    if self._chat.asked.stream:
                        await self._relay(answer, send)
                    else:
                        await self._reply(answer, send)
                return
            except EngineRejected as error:
                self._engine_id = error.engine_id
                # The engine no longer has this version; the active one is as good a try as any.
                if error.status != 404 or self._chat.pinned or self._version == 0:
                    raise
                if attempt == ATTEMPTS:
                    raise EngineUnavailable("it has lost what it had loaded") from error
                active = self._services.directory.policy(self._chat.policy.id).active
                if self._version == active and error.engine_id is not None:
                    self._services.engines.lost(error.engine_id, wanted)
                self._version = active
            except EngineBroke as error:
                self._engine_id = error.engine_id or self._engine_id
                if self._begun or attempt == ATTEMPTS:
                    raise

    async def _relay(self, answer: Answer, send: Send) -> None:
        async for data in answer.events():
            chunk = _parse(data)
            try:
                ended = self._capture.take_chunk(chunk)
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise EngineAnswerUnusable(f"a chunk that is not a chat chunk ({type(error).__name__})") from error
            await self._record_ended(ended)
            chunk["id"] = response_id(self._chat.turn_ids[0])
            await self._begin(send, b"text/event-stream; charset=utf-8")
            await send(_body(b"data: " + orjson.dumps(chunk) + b"\n\n", more=True))
        if len(self._recorded) < len(self._capture.choices):
            raise EngineBroke(f"engine {answer.engine_id} ended its stream before the answer's end")
        await send(_body(b"data: [DONE]\n\n", more=False))

    async def _reply(self, answer: Answer, send: Send) -> None:
        body = _parse(await answer.body())
        try:
            choices = self._capture.take_body(body)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise EngineAnswerUnusable(f"a body that is no chat completion ({type(error).__name__})") from error
        await self._record_ended(choices)
        body["id"] = response_id(self._chat.turn_ids[0])
        content = orjson.dumps(body)
        await self._begin(send, b"application/json", len(content))
        await send(_body(content, more=False))

    async def _begin(self, send: Send, media_type: bytes, length: int | None = None, status: int = 200) -> None:
        if self._begun:
            return
        self._begun = True
        self._services.metrics.first_token_seconds.observe(time.perf_counter() - self._clock)
        headers = [(b"content-type", media_type)]
        if length is None:
            # nginx would collect a stream into pages otherwise.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_problem(self, send: Send, problem: Problem) -> None:
        if self._begun:
            # The status is out already. Without [DONE] no client takes this for an answer.
            await send(_body(b"data: " + problem.openai() + b"\n\n", more=False))
            return
        response = problem.response("/v1/chat/completions")
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send(_body(bytes(response.body), more=False))

    async def _record_ended(self, choices: Sequence[ChoiceCapture]) -> None:
        """Store choices that ended; all of them, even if the client leaves meanwhile."""

        async def store() -> None:
            for choice in choices:
                await self._record(choice, choice.status(), choice.unusable)

        if choices:
            await asyncio.shield(self._services.spawn(store()))

    async def _record_unended(self, status: TurnStatus, error: str | None) -> None:
        """Store each choice that is not stored yet, as far as it came."""
        for choice in self._capture.choices:
            if choice.finish_reason is not None:
                await self._record(choice, choice.status(), choice.unusable)
            else:
                await self._record(choice, status, error)

    async def _record(self, choice: ChoiceCapture, status: TurnStatus, error: str | None) -> None:
        if choice.index in self._recorded:
            return
        self._recorded.add(choice.index)
        chat = self._chat
        response = choice.message()
        self._services.versions.remember(chat.key.id, response, self._version)
        prompt_ids = self._capture.prompt_ids
        known = prompt_ids is not None and (response is not None or bool(choice.response_ids))
        record = TurnRecord(
            turn_id=chat.turn_ids[choice.index],
            group_id=chat.turn_ids[0] if len(chat.turn_ids) > 1 else None,
            choice=choice.index,
            api_key_id=chat.key.id,
            policy=chat.policy.id,
            alias=chat.asked.model,
            evidence=chat.evidence,
            kind=chat.kind.kind,
            kind_reason=chat.kind.reason,
            status=status,
            error=error,
            version=self._version,
            engine_id=self._engine_id,
            messages=chat.messages,
            tools=chat.body.get("tools"),
            response=response,
            prompt_ids=prompt_ids,
            response_ids=choice.response_ids if known else None,
            logprobs=choice.logprobs if known else None,
            sampling=chat.sampling,
            finish_reason=choice.finish_reason,
            ends_session=chat.ends_session,
            started_at=chat.started_at,
            finished_at=datetime.now(UTC),
        )
        await self._services.recorder.record(record)

    def _fresh_capture(self) -> Capture:
        asked = self._chat.asked
        return Capture(
            choices=len(self._chat.turn_ids),
            keep_logprobs=bool(asked.logprobs),
            keep_ids=bool(asked.return_token_ids),
        )

    def _ids(self) -> dict[str, object]:
        return {
            "turn_id": str(self._chat.turn_ids[0]),
            "engine_id": self._engine_id,
            "version": self._version,
        }


def _parse(data: bytes) -> Chunk:
    """
    Raises:
        EngineBroke: the engine reports an error of its own in the stream.
        EngineAnswerUnusable: it is not a JSON object.
    """
    try:
        chunk: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineAnswerUnusable(f"not JSON ({error})") from error
    if not isinstance(chunk, dict):
        raise EngineAnswerUnusable("not a JSON object")
    if "error" in chunk:
        said = chunk["error"]
        raise EngineBroke(str(said.get("message") if isinstance(said, dict) else said))
    return chunk


def _is_refusal(error: ClawloopError) -> bool:
    """The engine never took the request: there is no turn to speak of."""
    return isinstance(error, EngineRejected) and error.status < 500


def _body(content: bytes, *, more: bool) -> AsgiMessage:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
