"""`POST /ui/turns/{turn}/…`: rates a reply, has it judged again or erases it; the answer is the turn anew."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.logins import Login
from api.ui.page import PageRoute, operator, read_form, render_page, require_no_episode, viewer
from clawloop.contracts.sessions import FeedbackEffect
from clawloop.errors import RequestRejected
from clawloop.ids import TurnId

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_COMMENT_CHARACTERS = 20_000
_RATINGS = {"up": 1.0, "down": -1.0}
_EFFECTS = {
    FeedbackEffect.AMENDS: "Recorded; the reply is judged with it.",
    FeedbackEffect.NEW_SAMPLE: "Recorded; the reply was trained already, and becomes another sample.",
    FeedbackEffect.RECORDED: "Recorded; this reply cannot be trained.",
}


@router.get("/ui/turns/{turn}")
async def show_turn(request: Request, turn: TurnId) -> Response:
    return await _turn(request, await viewer(request), turn, None)


@router.post("/ui/turns/{turn}/feedback")
async def give_feedback(request: Request, turn: TurnId) -> Response:
    login = await operator(request)
    services = services_of(request)
    form = await read_form(request)
    comment = form.get("text", "").strip()
    rating = _RATINGS.get(form.get("rating", ""))
    if rating is None and not comment:
        raise RequestRejected("Give a rating or write a comment.", field="text")
    if len(comment) > _COMMENT_CHARACTERS:
        raise RequestRejected(f"A comment has at most {_COMMENT_CHARACTERS:,} characters.", field="text")
    view = await services.reading.turn(str(turn))
    require_no_episode(view.episode_id is not None)
    session = (await services.reading.session(str(view.session_id), limit=1)).session
    # In the name of the key whose turn it is: nobody else's feedback is taken for it.
    stored = await services.feedback.give(session.key_id, turn, rating, comment or None)
    if stored is None:
        raise _missing(turn)
    services.notifications.add_feedback(stored)
    return await _turn(request, login, turn, _EFFECTS[stored.effect])


@router.post("/ui/turns/{turn}/judge")
async def judge_again(request: Request, turn: TurnId) -> Response:
    login = await operator(request)
    result = await services_of(request).session_operations.rejudge_turn(turn)
    if result is None:
        raise _missing(turn)
    note = "The turn is judged again; the result will appear here."
    if result.refused is not None:
        note = f"It cannot be judged again: {result.refused}."
    return await _turn(request, login, turn, note)


@router.post("/ui/turns/{turn}/erase")
async def erase_turn(request: Request, turn: TurnId) -> Response:
    login = await operator(request)
    applied = await services_of(request).session_operations.erase_turn(turn)
    if applied is None:
        raise _missing(turn)
    erased = applied.result
    note = f"{erased.turns} turns are erased, this one and what continued it."
    if erased.learned:
        note += f" {erased.learned} samples had been trained: their versions keep what they learned."
    return await _turn(request, login, turn, note)


async def _turn(request: Request, login: Login, turn: TurnId, note: str | None) -> Response:
    view, exchange = await services_of(request).reading.exchange(str(turn))
    shown = {"turn": view, "exchange": exchange, "note": note}
    return render_page(request, login, "_turn.html", login.key.policy, "sessions", **shown)


def _missing(turn: TurnId) -> RequestRejected:
    return RequestRejected(f"There is no turn {turn}, or it was erased.", status=404, code="not_found")
