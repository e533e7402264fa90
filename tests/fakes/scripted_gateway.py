"""A fake gateway for the demo over HTTP, with one policy that improves with each version and without model or judge.

It answers requests of the demo's world in either style. Each batch of eight reactions makes a version, and each version
answers a larger share of requests in the preferred style.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from clawloop.app.demo.world import STYLES, Axis, Request, Style, answer, draw_preference, every_request, flipped
from clawloop.core.contracts.answers import VersionList
from clawloop.core.contracts.training import VersionView
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.contracts.views import SessionDetail, SessionPage, SessionView, TurnView, View
from tests.fakes.engine import serving
from tests.records import session_view, turn_view

BATCH = 8
_SPACE = UUID(int=7)
_REQUESTS: dict[str, Request] = {request.text: request for axis in Axis for request in every_request(axis)}


@dataclass
class ScriptedGateway:
    """The state of the fake gateway.

    Attributes:
        improvement: share by which a version is better than the previous one.
        failures: failures of the next chat requests, in order: `500`, `BREAK` (mid-stream), `ERROR` (event); empty for
            none.
        sessions: main turns by session name; by_last_turn: all session names, side turns included, the newest last.
        headers: of each chat request; feedback: bodies; temperatures: of side turns (True) and of main turns.
        side_turn_models: model of each side turn.
        gone: a version that is not loaded any more when it is asked, as the next one is active.
        judging_stuck: judging never ends.
        pause_reason: why training paused itself.
        publish_delay: requests for the training status until a version is active.
        arrival_delay: requests for the sessions until their turns are stored.
        lacks_scope: the key may not read sessions.
        flip, flip_after: the axes that flip, and the number of main turns before the flip.
    """

    seed: int = 1
    improvement: float = 0.3
    url: str = ""
    failures: list[str] = field(default_factory=list)
    sessions: dict[str, list[TurnView]] = field(default_factory=dict)
    by_last_turn: dict[str, None] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)
    feedback: list[dict[str, str]] = field(default_factory=list)
    side_turn_models: list[str] = field(default_factory=list)
    temperatures: dict[bool, set[float | None]] = field(default_factory=lambda: {True: set(), False: set()})
    gone: int | None = None
    judging_stuck: bool = False
    pause_reason: str | None = None
    publish_delay: int = 2
    arrival_delay: int = 0
    lacks_scope: bool = False
    flip: tuple[Axis, ...] = ()
    flip_after: int = 0
    flip_version: int | None = None
    version: int = 0
    samples: int = 0
    polls: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    async def chat(self, request: HttpRequest) -> Response:
        body = json.loads(await request.body())
        self.headers.append(dict(request.headers))
        side = request.headers.get("x-turn-type") == "side"
        self.temperatures[side].add(body.get("temperature"))
        failure = (self.failures.pop(0) if self.failures else None) or None
        if failure == "500":
            return JSONResponse({"error": {"message": "on purpose", "type": "x", "code": None, "param": None}}, 500)
        if side and self.gone is not None and self._version_of(body["model"]) == self.gone:
            self.version = self.gone + 1
            error = {"message": "it does not exist here", "type": "x", "code": "model_not_found", "param": "model"}
            return JSONResponse({"error": error}, 404)
        text = self._answer(body["messages"][-1]["content"], self._version_of(body["model"]))
        self.by_last_turn.pop(request.headers.get("x-session-id", ""), None)
        self.by_last_turn[request.headers.get("x-session-id", "")] = None
        if side:
            self.side_turn_models.append(body["model"])
        elif failure is None:
            self._record_turn(request.headers["x-session-id"], request.headers.get("x-session-done") == "true")
        if body.get("stream"):
            return StreamingResponse(self._stream(text, failure), media_type="text/event-stream")
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return JSONResponse(_completion("chat.completion") | {"choices": [choice]})

    async def take_feedback(self, request: HttpRequest) -> Response:
        self.feedback.append(await request.json())
        return JSONResponse({"feedback_id": str(uuid5(_SPACE, "f")), "effect": "amends", "message": "Saved."}, 202)

    async def training(self, request: HttpRequest) -> Response:
        assert request.headers["authorization"].startswith("Bearer ")
        if self.samples >= BATCH:
            self.polls += 1
            if self.polls >= self.publish_delay:
                self.samples, self.polls, self.version = self.samples - BATCH, 0, self.version + 1
        training = self.samples >= BATCH
        state = "paused" if self.pause_reason else "training" if training else "waiting"
        return JSONResponse(
            {
                "policy": request.query_params["policy"],
                "state": state,
                "reason": self.pause_reason or "waits for samples",
                "ready": self.samples % BATCH,
                "needed": BATCH,
                "judging": 1 if self.judging_stuck else 0,
                "step": self.version + 1,
                "version": self.version,
                "head": self.version,
                "pinned": None,
            }
        )

    async def versions(self, request: HttpRequest) -> Response:
        state = VersionView(
            n=0,
            parent=None,
            state="",
            active=False,
            pinned=False,
            engines=(),
            metrics=None,
            created_at=datetime.now(UTC),
        )
        return _answer_of(VersionList(versions=[replace(state, n=n) for n in range(self.version + 1)]))

    async def roll_back(self, request: HttpRequest) -> Response:
        assert await request.json() == {"version": 0}
        self.version = 0
        self.sessions.clear()
        return JSONResponse({})

    async def list_sessions(self, request: HttpRequest) -> Response:
        if self.lacks_scope:
            return JSONResponse({"title": "Forbidden", "status": 403, "code": "insufficient_scope"}, 403)
        self.arrival_delay = max(0, self.arrival_delay - 1)
        newest = list(reversed(self.by_last_turn))[: int(request.query_params["limit"])]
        sessions = [self._session(name) for name in newest]
        return _answer_of(SessionPage(sessions=sessions, total=len(sessions), folded=0, next=None))

    async def show_session(self, request: HttpRequest) -> Response:
        name = next(name for name in self.sessions if str(uuid5(_SPACE, name)) == request.path_params["id"])
        turns = [] if self.arrival_delay else self.sessions[name]
        return _answer_of(SessionDetail(session=self._session(name), turns=turns, earlier=None))

    def _session(self, name: str) -> SessionView:
        stored = 0 if self.arrival_delay else len(self.sessions.get(name, []))
        return session_view(id=uuid5(_SPACE, name), external_id=name, main_turns=stored)

    def _record_turn(self, session: str, last: bool) -> None:
        turns = self.sessions.setdefault(session, [])
        if turns:  # the new message is the feedback on the last answer
            self.samples += 1
            learned = {"outcome": TurnOutcome.TRAINED, "verdict": 1, "step": self.version + 1}
            turns[-1] = turns[-1].model_copy(update=learned)
        if sum(map(len, self.sessions.values())) == self.flip_after:
            self.flip_version = self.version
        ended = {"outcome": TurnOutcome.NO_FEEDBACK, "why": "nothing followed"} if last else {}
        turns.append(turn_view(id=uuid5(_SPACE, f"{session}-{len(turns)}"), version=self.version, **ended))

    def _version_of(self, model: str) -> int:
        if model == "policy":
            return self.version
        return int(model.rsplit("-v", 1)[1]) if "-v" in model else 0

    def _answer(self, text: str, version: int) -> str:
        request = _REQUESTS[text.rsplit("\n", 1)[-1]]
        axes = () if self.flip_version is None else self.flip
        liked = flipped(draw_preference(self.seed), axes)[request.axis]
        styles: tuple[Style, Style] = STYLES[request.axis]
        learned = self.rng.random() < (version - (self.flip_version or 0)) * self.improvement
        return answer(request, liked if learned else self.rng.choice(styles))

    async def _stream(self, text: str, failure: str | None) -> AsyncIterator[bytes]:
        chunk = _completion("chat.completion.chunk")
        yield _event(chunk | {"choices": [{"index": 0, "delta": {"content": text[:5]}, "finish_reason": None}]})
        if failure == "BREAK":
            return
        if failure == "ERROR":
            yield _event({"error": {"message": "engine died", "type": "x", "code": 500}})
            return
        yield _event(chunk | {"choices": [{"index": 0, "delta": {"content": text[5:]}, "finish_reason": "stop"}]})
        yield b"data: [DONE]\n\n"


def _answer_of(view: View) -> Response:
    return Response(view.model_dump_json(), media_type="application/json")


def _completion(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "tiny"}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@asynccontextmanager
async def scripted_gateway(port: int = 0, **options: Any) -> AsyncIterator[ScriptedGateway]:
    gateway = ScriptedGateway(**options)
    # As a gateway: a connection that closes as a client sends again is a failed request.
    async with serving(_app(gateway), port, idle_seconds=75) as url:
        gateway.url = url
        yield gateway


def _app(gateway: ScriptedGateway) -> Starlette:
    return Starlette(
        routes=[
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route("/v1/feedback", gateway.take_feedback, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/healthz", _health),
            Route("/admin/v1/training", gateway.training),
            Route("/admin/v1/policies/{policy}/versions", gateway.versions),
            Route("/admin/v1/policies/{policy}/roll-back", gateway.roll_back, methods=["POST"]),
            Route("/admin/v1/sessions", gateway.list_sessions),
            Route("/admin/v1/sessions/{id}", gateway.show_session),
        ]
    )


async def _models(request: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model", "parent": None}]})


async def _health(request: HttpRequest) -> Response:
    return Response()


if __name__ == "__main__":
    # Runs as a process: the file descriptor of the socket to listen on.
    import socket
    import sys

    import uvicorn

    config = uvicorn.Config(_app(ScriptedGateway(improvement=0.5)), log_level="warning")
    uvicorn.Server(config).run([socket.socket(fileno=int(sys.argv[1]))])
