"""Admin routes about what was recorded: sessions, turns, files, judging again, erasing, export."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from api.dependencies import Services, admin_services
from api.request_body import RequestBody, check, described, read_json
from clawloop.core.contracts.answers import ContentGone, Rejudged, RejudgeList
from clawloop.core.contracts.sessions import Erasure, SessionState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.contracts.views import SessionDetail, SessionFilter, SessionPage, TurnDetail, TurnView
from clawloop.core.errors import RequestRejected
from clawloop.core.recipes.recipe import parse_recipe
from clawloop.core.turns.files import picture_type
from clawloop.operations.applied import Applied
from clawloop.operations.export import ExportFilter, ExportKind, Record
from clawloop.operations.history import MOST_COMPARED_TURNS, ComparedHistory, JudgePrecision, judge_precision
from clawloop.operations.reading import MOST_SESSIONS, MOST_TURNS

# Sessions and turns ---------------------------------------------------------------------------------------------------
# `GET /admin/v1/sessions` and `/admin/v1/turns/{turn}`: sessions, their turns, and all that is stored of a turn.

router = APIRouter(prefix="/admin/v1", tags=["sessions"])

SessionReference = Annotated[
    str,
    Path(
        description="An id or the beginning of one, the client's own id, the id of a reply, or `last`.",
        examples=["last"],
    ),
]
TurnReference = Annotated[
    str,
    Path(
        description="An id or the beginning of one, the id of a reply (`chatcmpl-…`), `SESSION:N` for the n-th main"
        " turn of a session, or `last`.",
        examples=["last"],
    ),
]


@router.get("/sessions")
async def list_sessions(
    request: Request,
    policy: Annotated[str | None, Query(description="only sessions of this policy")] = None,
    state: Annotated[SessionState | None, Query(description="only sessions in this state")] = None,
    after: Annotated[str | None, Query(description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_SESSIONS)] = 50,
    fold: Annotated[
        bool, Query(description="leave out sessions without a main turn, and closed ones with a single one")
    ] = False,
    text: Annotated[
        str | None,
        Query(max_length=200, description="only sessions in which this was said, in upper or lower case"),
    ] = None,
    verdict: Annotated[int | None, Query(ge=-1, le=1, description="only those with a turn of this verdict")] = None,
    judged: Annotated[bool | None, Query(description="only those with a turn that has a verdict, or has none")] = None,
    outcome: Annotated[TurnOutcome | None, Query(description="only those with a turn of this outcome")] = None,
    kind: Annotated[TurnKind | None, Query(description="only those with a turn of this kind")] = None,
    version: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="only those with a turn that this version answered")
    ] = None,
) -> SessionPage:
    """Sessions, the one with the newest turn first. One turn has to fit all that is said of turns; `fold` is then not
    used, and `total` null."""
    services = await admin_services(request)
    wanted = SessionFilter(
        policy=policy,
        state=state,
        text=(text or "").strip() or None,
        verdict=verdict,
        judged=judged,
        outcome=outcome,
        kind=kind,
        version=version,
        fold=fold,
    )
    return await services.reading.page(wanted, after=after, limit=limit)


@router.get("/sessions/{session_id}")
async def show_session(
    request: Request,
    session_id: SessionReference,
    before: Annotated[str | None, Query(description="`earlier` of the page with later turns")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_TURNS, description="at most so many turns, the newest ones")] = 500,
    content: Annotated[bool, Query(description="also what was said, the judges' answers and feedback")] = False,
) -> SessionDetail:
    """A session with its turns, each with its outcome and the reason for it."""
    services = await admin_services(request)
    return await services.reading.session(session_id, before=before, limit=limit, content=content)


@router.get("/turns/{turn}")
async def show_turn(
    request: Request,
    turn: TurnReference,
    tokens: Annotated[bool, Query(description="also token ids and log-probs")] = False,
) -> TurnDetail:
    """A turn with its messages, response, votes, hints, feedback and sample."""
    services = await admin_services(request)
    return await services.reading.detail(turn, tokens=tokens)


@router.get("/turns/{turn}/why")
async def explain_turn(request: Request, turn: TurnReference) -> TurnView:
    """A turn's outcome and the reason, without what was said."""
    services = await admin_services(request)
    return await services.reading.turn(turn)


# Files ----------------------------------------------------------------------------------------------------------------
# `GET /admin/v1/files/{sha256}`: an image, or another file, of a recorded message.

Sha256 = Annotated[
    str, Path(description="the `sha256` of a reference in a message", pattern="^[0-9a-f]{64}$", examples=["0" * 64])
]
# A client chose the bytes: a browser runs none of them, and takes them for nothing but what their header says.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # it may be erased
}


@router.get("/files/{sha256}", response_class=Response)
async def show_file(request: Request, sha256: Sha256) -> Response:
    """The file itself: PNG, JPEG, WebP and GIF as images, all else as a download."""
    return await file_response(await admin_services(request), sha256)


async def file_response(services: Services, sha256: str) -> Response:
    """
    Raises:
        RequestRejected: 404; there is no such file, or its last turn was erased.
        StoreUnavailable
    """
    content = await services.files.read(sha256)
    if content is None:
        raise RequestRejected(
            f"There is no file {sha256[:12]}…, or the turns that had it were erased.", status=404, code="not_found"
        )
    shown = picture_type(content)
    disposition = "inline" if shown else f'attachment; filename="{sha256[:12]}.bin"'
    return Response(
        content,
        headers=_HEADERS | {"Content-Disposition": disposition},
        media_type=shown or "application/octet-stream",
    )


# Judging again --------------------------------------------------------------------------------------------------------
# `POST /admin/v1/turns/{turn}/judge` and, for many turns, `/sessions/{session_id}/judge` and `/unjudged/judge`.
#
# Has turns judged again. Needs the scope `admin`. The answer means that the session's workflow has the request; the
# turn shows the result. `GET /admin/v1/judge/precision` compares votes with outcomes.

judging_router = APIRouter(prefix="/admin/v1", tags=["judging"])


@judging_router.post("/turns/{turn}/judge", status_code=202)
async def rejudge(request: Request, turn: TurnReference) -> Rejudged:
    """Have a turn judged again, by its id or its reply's (`chatcmpl-…`)."""
    services = await admin_services(request)
    turn_id = await services.reading.references.turn(turn)
    result = await services.session_operations.rejudge_turn(turn_id)
    if result is None:  # a turn of an episode: its rollout group alone decides
        raise RequestRejected(
            "A turn of an episode is not judged again.", status=409, code="cannot_judge_again", field="turn"
        )
    if result.refused is not None:
        message = f"This turn cannot be judged again: {result.refused}."
        raise RequestRejected(message, status=409, code="cannot_judge_again", field="turn")
    return result


@judging_router.post("/sessions/{session_id}/judge", status_code=202)
async def rejudge_session(request: Request, session_id: SessionReference) -> RejudgeList:
    """Have a session's turns judged again; `refused` says why one cannot be."""
    services = await admin_services(request)
    session = await services.reading.references.session(session_id)
    return RejudgeList(turns=await services.session_operations.rejudge_session(session))


@judging_router.get("/judge/precision")
async def show_precision(request: Request, policy: str = "default") -> JudgePrecision:
    """Agreement of votes on episodes' turns with the episodes' rewards, by the number of votes in a verdict."""
    services = await admin_services(request)
    return await judge_precision(services.voted_turns, policy)


@judging_router.post("/unjudged/judge", status_code=202)
async def rejudge_unjudged(request: Request) -> RejudgeList:
    """Have turns without a valid vote judged again: the oldest 1000. Those that get a vote leave the list."""
    services = await admin_services(request)
    return RejudgeList(turns=await services.session_operations.rejudge_unjudged())


# Comparison with another judge ----------------------------------------------------------------------------------------
# `POST /admin/v1/judge/history`: compares stored verdicts with those of another judge or recipe, for admins.


class CompareHistory(RequestBody):
    recipe: dict[str, Any] | None = None
    """Recipe that judges the turns; the policy's own if left out."""
    turns: Annotated[int, Field(ge=0, le=MOST_COMPARED_TURNS)] = 20
    """Number of further turns that this call judges."""
    apply: bool = False
    """Then have those turns judged again on which the verdicts differ: by the judge workers, with their own judge, so
    switch the workers first if it is not the one compared here."""


@judging_router.post("/judge/history", openapi_extra=described(CompareHistory))
async def compare_history(request: Request, policy: str = "default") -> ComparedHistory:
    """Judge further stored turns without changing anything, and compare all so far."""
    services = await admin_services(request)
    requested = check(CompareHistory, await read_json(request, services.limits))
    recipe = None if requested.recipe is None else parse_recipe(requested.recipe)
    found = await services.history.compare(policy, recipe, requested.turns)
    applied = await services.history.apply(policy, recipe) if requested.apply else []
    return found.model_copy(update={"applied": applied})


# Erasing --------------------------------------------------------------------------------------------------------------
# `DELETE /admin/v1/sessions/{session_id}` and `/turns/{turn}`: erases content for good.
#
# Needs the scope `admin`. Content is erased when the answer comes; idempotent. Not erased are turns that could never
# be stored: their session is unknown, and they stay in `spool/gateway-*/rejected/` of the data folder until an
# operator deletes them there.

log = logging.getLogger(__name__)


@router.delete("/sessions/{session_id}")
async def erase_session(request: Request, session_id: SessionReference) -> ContentGone:
    """Erase a session's content, also what is still in a spool."""
    services = await admin_services(request)
    session = await services.reading.references.session(session_id)
    applied = await services.session_operations.erase_session(session)
    assert applied is not None  # rows without content stay for good
    return _erased(applied)


@router.delete("/turns/{turn}")
async def erase_turn(request: Request, turn: TurnReference) -> ContentGone:
    """Erase a turn, by its id or its reply's (`chatcmpl-…`), other replies to its request, and what continues it."""
    services = await admin_services(request)
    turn_id = await services.reading.references.turn(turn)
    applied = await services.session_operations.erase_turn(turn_id)
    assert applied is not None  # rows without content stay for good
    return _erased(applied)


def _erased(applied: Applied[Erasure]) -> ContentGone:
    if applied.signal_error is not None:
        log.warning("signal failed: Temporal shows erased turns as they were", extra={"why": applied.signal_error})
    return ContentGone.of(applied.result, workflow_told=applied.signal_error is None)


# Export ---------------------------------------------------------------------------------------------------------------
# `GET /admin/v1/export`: recorded data, one JSON object a line.

_LINES = {"schema": {"type": "string", "description": "JSON lines."}}


@router.get("/export", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": _LINES}}})
async def export(
    request: Request,
    records: Annotated[ExportKind, Query(description="what one line is")] = ExportKind.TURNS,
    policy: str | None = None,
    session: Annotated[
        str | None, Query(description="an id or its beginning, the client's own id, a reply's id, or `last`")
    ] = None,
    since: datetime | None = None,
    until: datetime | None = None,
    after: Annotated[UUID | None, Query(description="the `id` of the last line that is there")] = None,
    files: Annotated[
        bool, Query(description="messages have their images themselves, as data URLs, in place of references")
    ] = False,
) -> StreamingResponse:
    """Records by ascending id, streamed. One that breaks off is continued with `after`."""
    services = await admin_services(request)
    of_session = None if session is None else await services.reading.references.session(session)
    wanted = ExportFilter(policy, of_session, _aware(since), _aware(until))
    pages = services.exporter.pages(records, wanted, after, with_files=files)
    # Read before the status is sent, so that a database that is away is a 503.
    first = await anext(pages, None)
    return StreamingResponse(lines_of(first, pages), media_type="application/x-ndjson")


async def lines_of(first: list[Record] | None, pages: AsyncIterator[list[Record]]) -> AsyncIterator[bytes]:
    for record in first or ():
        yield orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    async for page in pages:
        for record in page:
            yield orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _aware(moment: datetime | None) -> datetime | None:
    """A time without a zone is UTC."""
    return moment if moment is None or moment.tzinfo is not None else moment.replace(tzinfo=UTC)
