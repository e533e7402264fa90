"""`GET /ui/turns/{turn}/tokens`: a trained reply's tokens, coloured by their advantage in the step that trained it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import Services, services_of
from api.ui.page import PageRoute, render_page, viewer
from clawloop.contracts.serving import RouteKey
from clawloop.contracts.views import Tokens
from clawloop.errors import EngineAnswerUnusable, EngineBroke, EngineRejected, EngineUnavailable, RequestRejected
from clawloop.ids import TurnId
from clawloop.serving.token_texts import PATH, texts_of, texts_request

router = APIRouter(route_class=PageRoute, include_in_schema=False)

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
