"""Has an idle engine answer a recorded request again, without lessons or with them, and makes a turn of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from api.chat.capture import Capture, ReadingAnswer
from api.chat.fields import tools_for_engine
from api.chat.sent import sent_to
from clawloop.core.contracts.serving import Directory, Engine, ServedModel
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.ids import new_turn_id
from clawloop.core.lessons.practice import Practice, PractisedReply, request_again
from clawloop.core.lessons.prompt import has_system
from clawloop.serving.endpoints import PRACTICE_BEHIND, Endpoint, place_in_queue
from clawloop.serving.engine_secret import Secret
from clawloop.serving.versions import VersionClient

# A reply of the most tokens on a slow CPU.
ANSWER_SECONDS = 600.0
_READING = ReadingAnswer("the answer is not a chat completion")


class PracticeClient(VersionClient):
    """Satisfies `activities.practice.AnswerAgain`."""

    def __init__(self, directory: Callable[[], Directory], secret: Secret, *, seconds: float = ANSWER_SECONDS) -> None:
        super().__init__(directory, secret, seconds)

    async def answer(self, practice: Practice) -> PractisedReply | None:
        """The reply to a request; None while no engine that has the version is idle.

        Raises:
            EngineUnavailable: the engine did not answer; retry later.
            EngineRejected: it will never take this request.
            EngineAnswerUnusable: what it answered is no chat completion.
        """
        for engine, endpoint in self._engines(practice.source.policy, practice.version):
            model = await self._client.model_of(endpoint)
            if model is not None and await self._client.requests_on(endpoint) == 0:
                return await self._answer(practice, engine, endpoint, model)
        return None

    async def _answer(
        self, practice: Practice, engine: Engine, endpoint: Endpoint, model: ServedModel
    ) -> PractisedReply:
        source, started_at = practice.source, datetime.now(UTC)
        request = request_again(source)
        why = "practice" if practice.measured is None else "yardstick"
        sent = sent_to(model, request, lessons=practice.shown)
        fields: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        fields |= place_in_queue(PRACTICE_BEHIND)
        if "tools" in sent.body:
            fields["tools"] = tools_for_engine(sent.body)
        body = await self._completion([endpoint], sent.body | fields, "a practised request")
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
            kind_reason=f"{why} of the request of {source.turn_id}",
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
            lessons=practice.shown,
        )
        return PractisedReply(record, "" if has_system(source.messages) else model.default_system)
