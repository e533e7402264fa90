"""`POST /v1/feedback`: a rating, score or comment on a reply, or the outcome of a session's task, at any later time.

A rating or score is the verdict; text is evidence for the judge.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, computed_field

from api.chat.models import chat_key
from api.dependencies import Services, services_of
from api.errors import first_invalid_field
from api.request_body import read_json
from clawloop.core.contracts.serving import ApiKey
from clawloop.core.contracts.sessions import FeedbackEffect, RepeatableRequest
from clawloop.core.contracts.views import FeedbackList
from clawloop.core.errors import AlreadyAnswered, RequestRejected
from clawloop.core.ids import ApiKeyId, FeedbackId, TurnId, turn_id_of

router = APIRouter(tags=["feedback"])

# A position among a session's turns; PostgreSQL counts no further.
LARGEST_TURN = 2**31 - 1
_RATINGS = {"up": 1.0, "down": -1.0}


def _no_bool(value: object) -> object:
    # In Python True == 1, so a strict Literal[-1, 1] accepts it.
    if isinstance(value, bool):
        raise ValueError("input should be -1 or 1")
    return value


class FeedbackRequest(BaseModel):
    """Feedback on a reply (`response_id`, or `session_id` and `turn`), or the outcome of a session's task."""

    model_config = ConfigDict(extra="forbid", strict=True)

    response_id: Annotated[str, Field(max_length=256)] | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    turn: Annotated[int, Field(ge=1, le=LARGEST_TURN)] | Literal["last"] | None = None
    """Number of the session's main turn, from 1; `last` is its newest, or without `session_id` the key's newest."""
    rating: Literal["up", "down"] | None = None
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    text: Annotated[str, Field(min_length=1, max_length=20_000)] | None = None
    outcome: Annotated[Literal[-1, 1], BeforeValidator(_no_bool)] | None = None
    """1 if the task of the whole session succeeded, -1 if not: with `session_id` and nothing else."""


class FeedbackTaken(BaseModel):
    """
    Args:
        effect: whether the feedback amends the judgement, makes a new sample, or is only recorded.
    """

    feedback_id: FeedbackId
    effect: FeedbackEffect

    @computed_field
    def message(self) -> str:
        """The effect in words, for the person who gave the feedback."""
        return self.effect.told()


class OutcomeTaken(BaseModel):
    """
    Args:
        effect: whether the outcome amends what is learned from the session, or is only recorded.
    """

    session_id: str
    outcome: int
    effect: FeedbackEffect

    @computed_field
    def message(self) -> str:
        """The effect in words, for the person who gave the outcome."""
        return self.effect.told(of_session=True)


@router.get("/v1/feedback")
async def read_feedback(
    request: Request,
    response_id: Annotated[str | None, Query(max_length=256)] = None,
    session_id: Annotated[str | None, Query(min_length=1, max_length=1024)] = None,
    turn: Annotated[
        Annotated[int, Field(ge=1, le=LARGEST_TURN)] | Literal["last"] | None,
        Query(description="which main turn, from 1, or `last`"),
    ] = None,
) -> FeedbackList:
    """The feedback on one reply of this key, oldest first."""
    services = services_of(request)
    key = await chat_key(services, request.headers)
    named = FeedbackRequest(response_id=response_id, session_id=session_id, turn=turn)
    _require_one_reply(named)
    found = await _find_turn(services, key, named)
    given = None if found is None else await services.feedback.given_on(key.id, found)
    if given is None:
        raise RequestRejected("This key has no such reply.", status=404, code="not_found")
    return FeedbackList(feedback=given)


@router.post(
    "/v1/feedback",
    status_code=202,
    responses={
        409: {
            "description": "`idempotency_key_reused`",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}},
        }
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": FeedbackRequest.model_json_schema()}},
        }
    },
)
async def give_feedback(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            max_length=255,
            description="with the same body again: the first answer, and no further effect",
        ),
    ] = None,
) -> FeedbackTaken | OutcomeTaken:
    """Rate or comment on a reply, or report whether a session's task succeeded."""
    services = services_of(request)
    key = await chat_key(services, request.headers)
    if key.episode is not None:
        raise RequestRejected(
            "An episode's key gives no feedback: its verifier alone decides its reward.",
            status=403,
            code="insufficient_scope",
        )
    if len(request.headers.getlist("Idempotency-Key")) > 1:
        raise RequestRejected("`Idempotency-Key`: send one.", code="invalid_value", field="Idempotency-Key")
    feedback = _parse(await read_json(request, services.limits))
    services.key_limits.require_room(key)
    if idempotency_key is None:
        return await _give(services, key, feedback, None)
    once = _repeatable(idempotency_key, key, feedback)
    if (answer := await _earlier_answer(services, key.id, feedback, once)) is not None:
        return answer
    try:
        return await _give(services, key, feedback, once)
    except AlreadyAnswered:
        answer = await _earlier_answer(services, key.id, feedback, once)
        assert answer is not None  # it was stored a moment ago, and is kept for weeks
        return answer


def _repeatable(idempotency_key: str, key: ApiKey, feedback: FeedbackRequest) -> RepeatableRequest:
    name = idempotency_key.encode()
    body = f"{key.policy}\0{feedback.model_dump_json(exclude_none=True)}".encode()
    return RepeatableRequest(hashlib.sha256(name).digest(), hashlib.sha256(name + b"\0" + body).digest())


async def _earlier_answer(
    services: Services, key: ApiKeyId, feedback: FeedbackRequest, request: RepeatableRequest
) -> FeedbackTaken | OutcomeTaken | None:
    """The answer that the same request got before; None if it is new.

    Raises:
        RequestRejected: a different request had this Idempotency-Key.
    """
    answer = await services.feedback.answer_to(key, request)
    if answer is None:
        return None
    if answer.body_sha256 != request.body_sha256:
        message = "This `Idempotency-Key` was used with another body or policy: repeat those, or take a new key."
        raise RequestRejected(message, status=409, code="idempotency_key_reused", field="Idempotency-Key")
    if answer.feedback_id is not None:
        return FeedbackTaken(feedback_id=answer.feedback_id, effect=answer.effect)
    assert feedback.outcome is not None  # the bodies are equal
    return OutcomeTaken(session_id=feedback.session_id or "", outcome=feedback.outcome, effect=answer.effect)


async def _give(
    services: Services, key: ApiKey, feedback: FeedbackRequest, once: RepeatableRequest | None
) -> FeedbackTaken | OutcomeTaken:
    if feedback.outcome is not None:
        return await _give_outcome(services, key, feedback.session_id or "", feedback.outcome, once)
    turn = await _find_turn(services, key, feedback)
    score = feedback.score if feedback.rating is None else _RATINGS[feedback.rating]
    stored = None if turn is None else await services.feedback.give(key.id, turn, score, feedback.text, once)
    if stored is None:
        # The same answer for a reply of another key: keys must not learn of each other's replies.
        newest = feedback.turn == "last" and feedback.session_id is None
        said = "This key has had no reply yet." if newest else "This key has no such reply."
        raise RequestRejected(said, status=404, code="not_found")
    services.notifications.add_feedback(stored)
    return FeedbackTaken(feedback_id=stored.given.feedback_id, effect=stored.effect)


async def _give_outcome(
    services: Services, key: ApiKey, session: str, outcome: int, once: RepeatableRequest | None
) -> OutcomeTaken:
    effect = await services.feedback.give_outcome(key.id, key.policy, session, outcome, once)
    if effect is None:
        raise RequestRejected("This key has no such session.", status=404, code="not_found")
    return OutcomeTaken(session_id=session, outcome=outcome, effect=effect)


def _parse(body: dict[str, Any]) -> FeedbackRequest:
    try:
        feedback = FeedbackRequest.model_validate(body)
    except ValidationError as error:
        field, message = first_invalid_field(error)
        raise RequestRejected(message, field=field.partition(".")[0]) from None  # without the kind of a union's member
    if feedback.outcome is not None:
        others = feedback.model_dump(exclude={"outcome", "session_id"}, exclude_none=True)
        if feedback.session_id is None or others:
            excess = f", not with `{next(iter(others))}`" if others else ""
            message = f"`outcome` is about a whole session: give it with `session_id` alone{excess}."
            raise RequestRejected(message, field="outcome" if others else "session_id")
        return feedback
    _require_one_reply(feedback)
    if feedback.rating is not None and feedback.score is not None:
        raise RequestRejected("Give `rating` or `score`, not both.", field="score")
    if feedback.rating is None and feedback.score is None and feedback.text is None:
        raise RequestRejected("Give a `rating`, a `score` or a `text`.", field="rating")
    return feedback


def _require_one_reply(feedback: FeedbackRequest) -> None:
    by_place = feedback.turn == "last" or (feedback.session_id is not None and feedback.turn is not None)
    if (feedback.response_id is None) != by_place:
        message = "Name the reply: `response_id`, or `session_id` with `turn`, or `turn` as `last`."
        raise RequestRejected(message, field="response_id")


async def _find_turn(services: Services, key: ApiKey, feedback: FeedbackRequest) -> TurnId | None:
    if feedback.response_id is not None:
        return turn_id_of(feedback.response_id)
    number = None if feedback.turn == "last" else feedback.turn
    return await services.feedback.turn_of(key.id, key.policy, feedback.session_id, number)
