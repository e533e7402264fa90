"""Has an idle engine answer a recorded request again, without lessons, and makes a turn of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from api.chat.capture import Capture, ReadingAnswer
from api.chat.fields import tools_for_engine
from api.chat.sent import sent_to
from clawloop.core.contracts.serving import Directory, Engine, ServedModel
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.errors import EngineRejected, EngineUnavailable
from clawloop.core.ids import new_turn_id, version_name
from clawloop.core.lessons.practice import Practice, PractisedReply, request_again
from clawloop.core.lessons.prompt import has_system
from clawloop.serving.endpoints import AFTER_CHATS, Endpoint, JsonClient, NoReply
from clawloop.serving.engine_secret import Secret

# A reply of the most tokens on a slow CPU.
ANSWER_SECONDS = 600.0
# The engine restarted and lacks the version, which its agent loads again; or it is of the moment.
_RETRYABLE = frozenset({401, 404, 408, 409, 425, 429})
_READING = ReadingAnswer("the answer is not a chat completion")


class PracticeClient:
    """Satisfies `activities.practice.AnswerAgain`. Use as an async context manager.

    Args:
        directory: current policies and engines.
        secret: the engines'.
    """

    def __init__(self, directory: Callable[[], Directory], secret: Secret, *, seconds: float = ANSWER_SECONDS) -> None:
        self._directory = directory
        self._secret = secret
        self._client = JsonClient(seconds)

    async def __aenter__(self) -> PracticeClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def answer(self, practice: Practice) -> PractisedReply | None:
        """The reply to a request without lessons; None while no engine that has the version is idle.

        Raises:
            EngineUnavailable: the engine did not answer; retry later.
            EngineRejected: it will never take this request.
            EngineAnswerUnusable: what it answered is no chat completion.
        """
        for engine, endpoint in self._engines(practice):
            model = await self._client.model_of(endpoint)
            if model is not None and await self._client.requests_on(endpoint) == 0:
                return await self._answer(practice, engine, endpoint, model)
        return None

    async def _answer(
        self, practice: Practice, engine: Engine, endpoint: Endpoint, model: ServedModel
    ) -> PractisedReply:
        source, started_at = practice.source, datetime.now(UTC)
        request = request_again(source)
        sent = sent_to(model, request)
        fields: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0, **AFTER_CHATS}
        if "tools" in sent.body:
            fields["tools"] = tools_for_engine(sent.body)
        body = await self._post(endpoint, sent.body | fields)
        capture = Capture(choices=1, keep_logprobs=False, keep_ids=False)
        with _READING:
            (choice,) = capture.take_body(body)
        has_tokens = capture.prompt_ids is not None
        record = replace(
            source,
            turn_id=new_turn_id(),
            group_id=None,
            choice=0,
            kind=TurnKind.PRACTICE,
            kind_reason=f"practice of the request of {source.turn_id}",
            status=choice.status(),
            error=choice.unusable,
            version=practice.version,
            engine_id=engine.id,
            tools=sent.body.get("tools"),
            response=choice.message(),
            prompt_ids=capture.prompt_ids,
            response_ids=choice.response_ids if has_tokens else None,
            logprobs=choice.logprobs if has_tokens else None,
            sampling=sent.sampling,
            finish_reason=choice.finish_reason,
            ends_session=False,
            started_at=started_at,
            finished_at=datetime.now(UTC),
            lessons=(),
        )
        return PractisedReply(record, "" if has_system(source.messages) else model.default_system)

    def _engines(self, practice: Practice) -> Sequence[tuple[Engine, Endpoint]]:
        policy, version, now = practice.source.policy, practice.version, self._directory()
        base = next((each.base_model for each in now.policies if each.id == policy), None)
        return [
            (engine, Endpoint(engine.url, version_name(policy, version, base), self._secret()))
            for engine in now.engines
            if base is not None and not engine.draining
            if version == 0 or version in engine.versions.get(policy, frozenset())
        ]

    async def _post(self, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._client.post([endpoint], "/v1/chat/completions", body)
        except NoReply as error:
            raise EngineUnavailable(f"no answer to a practised request: {error}") from error
        if reply.status >= 500 or reply.status in _RETRYABLE:
            raise EngineUnavailable(f"an engine answered {reply.status} to a practised request")
        if reply.status != 200 or reply.body is None:
            raise EngineRejected(reply.status, {"message": "the engine refused a practised request"})
        return reply.body
