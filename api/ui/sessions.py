"""`GET /ui/sessions`: sessions, each as a chat, with the tokens of its replies and the buttons that change a turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.dependencies import Services, services_of
from api.ui.logins import Login
from api.ui.page import (
    PageRoute,
    is_htmx,
    operator,
    policy_of,
    read_form,
    render,
    render_page,
    require_no_episode,
    version_number,
    viewer,
)
from api.ui.wording import OUTCOMES
from clawloop.core.contracts.serving import RouteKey
from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.contracts.views import SessionDetail, SessionFilter, Tokens
from clawloop.core.errors import EngineAnswerUnusable, EngineBroke, EngineRejected, EngineUnavailable, RequestRejected
from clawloop.core.ids import SessionId, TurnId
from clawloop.serving.rendering import PATH, texts_of, texts_request

# Sessions -------------------------------------------------------------------------------------------------------------
# `GET /ui/sessions`: sessions found by what was said and decided in them, and each as a chat.

router = APIRouter(route_class=PageRoute, include_in_schema=False)

SESSIONS_ON_A_PAGE = 50
TURNS_ON_A_PAGE = 50
# PostgreSQL counts turns in 64 bits; no session has as many pages.
LARGEST_PAGE = 2**31 - 1
Choice = TypeVar("Choice", bound=StrEnum)
_VERDICTS = {"praised": 1, "neutral": 0, "blamed": -1}
_FIELDS = ("text", "verdict", "outcome", "kind", "state", "version")


@router.get("/ui/sessions")
async def list_sessions(
    request: Request,
    policy: str | None = None,
    text: Annotated[str, Query(max_length=200)] = "",
    verdict: str = "",
    outcome: str = "",
    kind: str = "",
    state: str = "",
    version: str = "",
    after: SessionId | None = None,
) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    wanted = SessionFilter(
        policy=chosen,
        text=text.strip() or None,
        verdict=_VERDICTS.get(verdict),
        judged=False if verdict == "none" else None,
        outcome=_one_of(TurnOutcome, outcome, "outcome"),
        # A client's own side turns would hide the conversations, unless something is looked for.
        kind=_one_of(TurnKind, kind, "kind")
        if kind or verdict or outcome or version or text.strip()
        else TurnKind.MAIN,
        state=_one_of(SessionState, state, "state"),
        version=version_number(version) if version else None,
    )
    found = await services.reading.page(wanted, after=None if after is None else str(after), limit=SESSIONS_ON_A_PAGE)
    filters = {name: request.query_params.get(name, "") for name in _FIELDS}
    further = {name: value for name, value in (filters | {"policy": policy or ""}).items() if value}
    template = "_session_list.html" if is_htmx(request) and "hx-boosted" not in request.headers else "sessions.html"
    return render_page(
        request,
        login,
        template,
        chosen,
        "sessions",
        sessions=found.sessions,
        filters=filters,
        outcomes=OUTCOMES,
        more=None if found.next is None else urlencode(further | {"after": found.next}),
        is_first=after is None,
    )


@router.get("/ui/sessions/{session_id}")
async def show_session(
    request: Request,
    session_id: str,
    page: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 1,
    turn: TurnId | None = None,
) -> Response:
    login = await viewer(request)
    services = services_of(request)
    session = await services.reading.references.session(session_id)
    if turn is not None:
        page = await services.reading.position(session, turn) // TURNS_ON_A_PAGE + 1
    chat = await services.reading.session_from(session, (page - 1) * TURNS_ON_A_PAGE, TURNS_ON_A_PAGE)
    template = "_chat.html" if is_htmx(request) and "hx-boosted" not in request.headers else "session.html"
    return render_page(request, login, template, chat.session.policy, "sessions", note=None, **on_page(chat, page))


def on_page(chat: SessionDetail, page: int) -> dict[str, Any]:
    """Variables of a chat's template: turns with their messages, and their places in the session."""
    total = chat.session.main_turns + chat.session.side_turns
    return {
        "session": chat.session,
        "chat": list(zip(chat.turns, chat.conversation or (), strict=True)),
        "first": (page - 1) * TURNS_ON_A_PAGE,
        "total": total,
        "page": page,
        "pages": max(1, -(-total // TURNS_ON_A_PAGE)),
    }


@router.post("/ui/sessions/{session_id}/outcome")
async def give_outcome(request: Request, session_id: SessionId) -> Response:
    await operator(request)
    services = services_of(request)
    form = await read_form(request)
    if form.get("outcome") not in ("1", "-1"):
        raise RequestRejected("The outcome is 1 or -1.", field="outcome")
    session = (await services.reading.session(str(session_id), limit=1)).session
    require_no_episode(session.episode_id is not None)
    effect = await services.feedback.give_outcome(session.key_id, session.policy, str(session_id), int(form["outcome"]))
    if effect is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    return render(request, "_note.html", note=effect.told(of_session=True))


@router.post("/ui/sessions/{session_id}/erase")
async def erase_session(request: Request, session_id: SessionId) -> Response:
    await operator(request)
    applied = await services_of(request).session_operations.erase_session(session_id)
    if applied is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    erased = applied.result
    note = f"{erased.turns} turns are erased; {erased.expired} waiting samples expired."
    if erased.learned:
        note += f" {erased.learned} samples had been trained: their versions keep what they learned."
    response = render(request, "_note.html", note=note)
    response.headers["HX-Trigger"] = "changed"  # the chat beside it loads itself anew
    return response


def _one_of(choices: type[Choice], value: str, field: str) -> Choice | None:
    try:
        return choices(value) if value else None
    except ValueError:
        raise RequestRejected(f"`{field}` cannot be {value!r}.", field=field) from None


# One turn -------------------------------------------------------------------------------------------------------------
# `POST /ui/turns/{turn}/…`: rates a reply, has it judged again or erases it; the answer is the turn anew.

_COMMENT_CHARACTERS = 20_000
_RATINGS = {"up": 1.0, "down": -1.0}


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
    return await _turn(request, login, turn, stored.effect.told())


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


# Tokens ---------------------------------------------------------------------------------------------------------------
# `GET /ui/turns/{turn}/tokens`: a trained reply's tokens, coloured by their advantage in the step that trained it.

# A browser shows so many coloured pieces at once without delay; REST has all of them.
MOST_TOKENS = 2000
_SHADES = 3


@dataclass(frozen=True, slots=True)
class TokenLine:
    """
    Args:
        text: None if no engine gave it.
        moved: by how much the step changed its log-prob; None where that is not stored.
        colour: what the token is coloured by: its advantage, or by how much it moved where no advantage is stored.
        shade: 1 to 3 by how far that is from 0, in the colour of its sign; 0: none.
    """

    id: int
    text: str | None
    logprob: float | None
    advantage: float | None
    moved: float | None
    colour: float | None
    shade: int


@router.get("/ui/turns/{turn}/tokens")
async def tokens(request: Request, turn: TurnId) -> Response:
    login = await viewer(request)
    services = services_of(request)
    detail = await services.reading.detail(str(turn), tokens=True)
    found = detail.tokens
    if found is None or found.step is None or not found.response_ids:
        raise RequestRejected(
            "Nothing is stored of this reply's tokens: it was not trained by advantages.",
            status=404,
            code="not_found",
        )
    ids = found.response_ids[:MOST_TOKENS]
    session = (await services.reading.session(str(detail.turn.session_id), limit=1)).session
    texts = await _texts(services, session.policy, ids)
    lines = _lines(found, texts, len(ids))
    left = len(found.response_ids) - len(ids)
    return render_page(
        request, login, "_tokens.html", session.policy, "sessions", turn=turn, tokens=found, lines=lines, left=left
    )


async def _texts(services: Services, policy: str, ids: Sequence[int]) -> list[str] | None:
    """The texts of the tokens; None if no engine says them."""
    names = [known.base_model for known in services.directory.snapshot.policies if known.id == policy]
    if not names or not services.engines.healthy():
        return None
    # All versions have the base model's tokenizer.
    route = RouteKey(policy, 0, names[0], affinity="tokens")
    body = orjson.dumps({"model": names[0]} | texts_request(ids))
    try:
        async with services.engines.open_chat(route, body, PATH) as answer:
            return texts_of(orjson.loads(await answer.body()), ids)
    except (EngineAnswerUnusable, EngineBroke, EngineRejected, EngineUnavailable, orjson.JSONDecodeError):
        return None


def _lines(tokens: Tokens, texts: Sequence[str] | None, count: int) -> list[TokenLine]:
    none: Sequence[float | None] = [None] * count
    ids, advantages, moves = tokens.response_ids or (), tokens.advantages or none, tokens.moves or none
    colours = moves if tokens.advantages is None else advantages
    most = max((abs(value) for value in colours if value is not None), default=0.0)
    return [
        TokenLine(
            id=ids[at],
            text=None if texts is None else texts[at],
            logprob=None if tokens.logprobs is None else tokens.logprobs[at],
            advantage=advantages[at],
            moved=moves[at],
            colour=colours[at],
            shade=_shade(colours[at], most),
        )
        for at in range(count)
    ]


def _shade(value: float | None, most: float) -> int:
    return math.ceil(_SHADES * abs(value) / most) if value and most else 0
