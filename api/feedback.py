"""`POST /v1/feedback`: what a user thinks of a reply, said outside the conversation, at once or days later.

Knows nothing about judging. A rating or score is the verdict; text is evidence for the judge.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from api.dependencies import Services, services_of
from api.middleware import read_json
from clawloop.contracts.serving import Scope
from clawloop.contracts.sessions import FeedbackEffect
from clawloop.errors import RequestRejected
from clawloop.ids import ApiKeyId, FeedbackId, TurnId, turn_id_of

router = APIRouter()

_RATINGS = {"up": 1.0, "down": -1.0}


def _no_bool(said: object) -> object:
    # To Python true is 1, and a literal takes it for that even when strict.
    if isinstance(said, bool):
        raise ValueError("input should be -1 or 1")
    return said


class FeedbackRequest(BaseModel):
    """Which reply (`response_id`, or `session_id` and `turn`), and what is said about it; or a session's outcome."""

    model_config = ConfigDict(extra="forbid", strict=True)

    response_id: Annotated[str, Field(max_length=256)] | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    turn: Annotated[int, Field(ge=1)] | None = None
    """Which main turn of the session, from 1."""
    rating: Literal["up", "down"] | None = None
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    text: Annotated[str, Field(min_length=1, max_length=20_000)] | None = None
    outcome: Annotated[Literal[-1, 1], BeforeValidator(_no_bool)] | None = None
    """Whether the task of the whole session succeeded: with `session_id` and nothing else."""


_SCHEMA = FeedbackRequest.model_json_schema()


class FeedbackTaken(BaseModel):
    """
    Args:
        effect: whether it amends the judgement, makes a new sample, or is only recorded.
    """

    feedback_id: FeedbackId
    effect: FeedbackEffect


class OutcomeTaken(BaseModel):
    """
    Args:
        effect: whether it amends what is learned from the session, or is only recorded.
    """

    session_id: str
    outcome: int
    effect: FeedbackEffect


@router.post(
    "/v1/feedback",
    status_code=202,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": FeedbackRequest.model_json_schema()}},
        }
    },
)
async def give_feedback(request: Request) -> FeedbackTaken | OutcomeTaken:
    """Rate or comment on a reply, or say whether a session's task succeeded."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.CHAT)
    asked = _check(await read_json(request, services.limits))
    if asked.outcome is not None:
        return await _give_outcome(services, key.id, asked.session_id or "", asked.outcome)
    turn = await _turn(services, key.id, asked)
    score = asked.score if asked.rating is None else _RATINGS[asked.rating]
    stored = None if turn is None else await services.feedback.give(key.id, turn, score, asked.text)
    if stored is None:
        # Whether another key has it is not ours to say.
        raise RequestRejected("This key has no such reply.", status=404, code="not_found")
    services.notifications.add_feedback(stored)
    return FeedbackTaken(feedback_id=stored.given.feedback_id, effect=stored.effect)


async def _give_outcome(services: Services, key: ApiKeyId, session: str, outcome: int) -> OutcomeTaken:
    effect = await services.feedback.give_outcome(key, session, outcome)
    if effect is None:
        raise RequestRejected("This key has no such session.", status=404, code="not_found")
    return OutcomeTaken(session_id=session, outcome=outcome, effect=effect)


def _check(body: dict[str, Any]) -> FeedbackRequest:
    try:
        asked = FeedbackRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RequestRejected(f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}.", field=field) from None
    if asked.outcome is not None:
        others = asked.model_dump(exclude={"outcome", "session_id"}, exclude_none=True)
        if asked.session_id is None or others:
            said = f", not with `{next(iter(others))}`" if others else ""
            problem = f"`outcome` is about a whole session: give it with `session_id` alone{said}."
            raise RequestRejected(problem, field="outcome" if others else "session_id")
        return asked
    if (asked.response_id is None) == (asked.session_id is None or asked.turn is None):
        raise RequestRejected("Say which reply: `response_id`, or `session_id` with `turn`.", field="response_id")
    if asked.rating is not None and asked.score is not None:
        raise RequestRejected("Give `rating` or `score`, not both.", field="score")
    if asked.rating is None and asked.score is None and asked.text is None:
        raise RequestRejected("Give a `rating`, a `score` or a `text`.", field="rating")
    return asked


async def _turn(services: Services, key: ApiKeyId, asked: FeedbackRequest) -> TurnId | None:
    if asked.response_id is not None:
        return turn_id_of(asked.response_id)
    assert asked.session_id is not None
    assert asked.turn is not None
    return await services.feedback.turn_of(key, asked.session_id, asked.turn)
