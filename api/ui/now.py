"""`GET /ui`: is it getting better, is it serving, is it learning; and `GET /ui/start` for the first chat."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from fastapi import APIRouter, Request
from pydantic import JsonValue
from starlette.responses import JSONResponse, RedirectResponse, Response

from api.chat.request import prepare
from api.chat.stream import ChatExchange
from api.dependencies import Services, services_of
from api.request_body import read_json
from api.ui.lineage import is_on_the_path, lines_of
from api.ui.logins import Login
from api.ui.messages import first_words
from api.ui.page import PageRoute, operator, policy_of, read_form, render, render_page, viewer
from clawloop.core.contracts.answers import MEASURED, Counts, LessonView, PolicyEvent, ReplyFigures
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import TrainingState, TrainingView, VersionView
from clawloop.core.errors import NotFound, RequestRejected
from clawloop.core.gate.checks import PROBES
from clawloop.core.judging.progress import MIN_CHATS, REPLIES, progress_of

# The chart ------------------------------------------------------------------------------------------------------------
# The chart over time: moving means of verdicts and lengths, what probes and an evaluation measured, and where a version
# began to answer.

# Replies in a mean: few enough to show what a step of 16 samples changed.
WINDOW = 20


def chart_of(
    replies: Sequence[ReplyFigures], probes: Mapping[int, float], matches: Mapping[int, float]
) -> dict[str, JsonValue]:
    """Columns for the chart, one entry a reply, oldest first.

    Args:
        probes: by version, the share of probes with checked content that it answered right.
        matches: by version, the share of an evaluation's requests that it answered as wanted.

    Returns:
        `at`: seconds since 1970; `good`: share of good ones among the newest verdicts that are good or bad, null before
        the first; `length`: mean tokens of the newest replies; `probes`, `match`: of the version that answered, null
        where none was measured; `versions`: `[position, number]` where another version begins.
    """
    verdicts: deque[int] = deque(maxlen=WINDOW)
    lengths: deque[int] = deque(maxlen=WINDOW)
    at: list[JsonValue] = []
    good: list[JsonValue] = []
    length: list[JsonValue] = []
    versions: list[JsonValue] = []
    shown: int | None = None
    for position, reply in enumerate(replies):
        if reply.verdict:
            verdicts.append(reply.verdict)
        lengths.append(reply.tokens)
        at.append(reply.at.timestamp())
        good.append(round(verdicts.count(1) / len(verdicts), 3) if verdicts else None)
        length.append(round(sum(lengths) / len(lengths), 1))
        # Side by side for a moment while a version is published: only a later one marks a beginning, or a roll-back.
        if reply.version != shown and _stays(replies, position):
            versions.append([position, reply.version])
            shown = reply.version
    measured: dict[str, JsonValue] = {
        name: [of_version.get(reply.version) for reply in replies]
        for name, of_version in (("probes", probes), ("match", matches))
    }
    return {"at": at, "good": good, "length": length, "versions": versions} | measured


def probes_of(versions: Sequence[VersionView]) -> dict[int, float]:
    """The share of the gate's probes answered right, by version; that of a parent is measured beside its version's."""
    found: dict[int, float] = {}
    for version in versions:
        for check in version.gate:
            if check.name == PROBES:
                own, of_parent = check.figures.get("right"), check.figures.get("parent_right")
                if of_parent is not None and version.parent is not None:
                    found.setdefault(version.parent, of_parent)
                if own is not None:
                    found[version.n] = own
    return found


def _stays(replies: Sequence[ReplyFigures], position: int) -> bool:
    """True if the version of this reply also gave the next one, or if no next reply exists yet."""
    following = replies[position + 1 : position + 2]
    return all(reply.version == replies[position].version for reply in following)


def matches_of(versions: Sequence[VersionView]) -> dict[int, float]:
    """The match that an evaluation measured, by version."""
    return {version.n: version.match for version in versions if version.match is not None}


# Now ------------------------------------------------------------------------------------------------------------------
# `GET /ui`: is it getting better; what answers, what was learned last, what waits; the newest versions; what happened.

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_VERSIONS = 5
_EVENTS = 12
# Of a batch, for what was learned in words.
_LEARNED_REPLIES = 32
_LEARNED_WORDS = 2
_LEARNED_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Situation:
    """The state of a policy and of the components that it needs.

    Args:
        versions: all of them, by number.
        problems: why this gateway is not ready; empty if it is.
        temporal: the problem with Temporal; None if it answers.
    """

    training: TrainingView
    problems: list[str]
    versions: list[VersionView]
    events: list[PolicyEvent]
    counts: Counts
    healthy: int
    engines: int
    temporal: str | None

    @property
    def paused(self) -> bool:
        return self.training.state is TrainingState.PAUSED


@dataclass(frozen=True, slots=True)
class Learned:
    """What the newest version on the way to the head learned, in words.

    Args:
        at: when it was made.
        replies: that it was trained on.
        words: hints, or where there is none what users said; the first ones of the batch.
    """

    version: int
    at: datetime
    replies: int
    words: list[str]


async def learned_last(services: Services, policy: str, versions: Sequence[VersionView]) -> Learned | None:
    """None before the first step."""
    learned = [version for version in versions if version.n and is_on_the_path(version) and version.origin is None]
    if not learned:
        return None
    newest = max(learned, key=lambda version: version.n)
    batch = await services.training_browser.batch(policy, newest.n, _LEARNED_REPLIES)
    hints = [hint for reply in batch for hint in reply.hints]
    taught = sorted((hint for hint in hints if hint.share != 0), key=lambda hint: -(hint.share or 0))
    words = [first_words([{"role": "user", "content": hint.text}], _LEARNED_CHARACTERS) for hint in taught]
    words = words or [first_words(reply.reaction, _LEARNED_CHARACTERS) for reply in batch]
    samples = (newest.metrics or {}).get("samples")
    replies = samples if isinstance(samples, int) else len(batch)
    return Learned(newest.n, newest.created_at, replies, list(dict.fromkeys(filter(None, words)))[:_LEARNED_WORDS])


async def newer_lesson(services: Services, policy: str, learned: Learned | None) -> LessonView | None:
    """The newest lesson that prompts hold; None if there is none, or a newer version learned words."""
    listed = await services.lesson_operations.list(policy)
    held = [lesson for lesson in listed.lessons if lesson.in_prompt]
    newest = max(held, key=lambda lesson: lesson.changed_at, default=None)
    older = newest and learned and learned.words and newest.changed_at < learned.at
    return None if older else newest


async def situation_of(services: Services, policy: str) -> Situation:
    """
    Raises:
        NotFound: there is no such policy.
        StoreUnavailable
    """
    # The table of versions has what was measured of each, and so much would hide what was done.
    newest = await services.training_browser.events(policy, 2 * _EVENTS)
    events = [event for event in newest if event.kind != MEASURED]
    return Situation(
        training=await services.training.status(policy),
        problems=await services.not_ready(),
        versions=await services.training.versions(policy),
        events=events[:_EVENTS],
        counts=await services.training_browser.counts(policy),
        healthy=len(services.engines.healthy()),
        engines=len(services.directory.snapshot.engines),
        temporal=await services.temporal_problem(),
    )


@router.get("/")
async def front() -> Response:
    """The page: whoever opens the address that `clawloop up` printed in a browser means it."""
    return RedirectResponse("/ui", 307)


@router.get("/ui")
async def now(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    situation = await situation_of(services, chosen)
    if not situation.counts.sessions and policy is None:
        return RedirectResponse("/ui/start", 303)
    return await _page(request, login, chosen, situation, "now.html")


@router.get("/ui/now")
async def now_again(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    chosen = policy_of(services_of(request), login, policy)
    return await _page(request, login, chosen, await situation_of(services_of(request), chosen), "_now_again.html")


@router.get("/ui/chart")
async def chart(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    replies = await services.training_browser.replies(chosen, REPLIES)
    versions = await services.training.versions(chosen)
    return JSONResponse(chart_of(replies, probes_of(versions), matches_of(versions)))


async def _page(request: Request, login: Login, policy: str, situation: Situation, template: str) -> Response:
    services = services_of(request)
    newest = await services.training_browser.replies(policy, REPLIES)
    base = await services.training_browser.base_replies(policy, REPLIES)
    learned = await learned_last(services, policy, situation.versions)
    shown = {
        "now": situation,
        "progress": progress_of(base, newest),
        "fewest": MIN_CHATS,
        "votes": (await services.training.recipe(policy)).signal.verdicts,
        "learned": learned,
        "lesson": await newer_lesson(services, policy, learned),
        "lines": lines_of(situation.versions, [*base, *newest])[:_VERSIONS],
    }
    return render_page(request, login, template, policy, "now", **shown)


# The first chat -------------------------------------------------------------------------------------------------------
# `GET /ui/start`: from nothing to the first recorded chat, and a box to chat in.

_NAME_CHARACTERS = 80
_CHAT_NAME = re.compile(r"page-[0-9a-f-]{8,40}")


@router.get("/ui/start")
async def start(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    address = f"{request.url.scheme}://{request.url.netloc}/v1"
    shown = {
        "counts": await services.training_browser.counts(chosen),
        "problems": await services.not_ready(),
        "temporal": await services.temporal_problem(),
    }
    return render_page(request, login, "start.html", chosen, "start", address=address, secret=None, **shown)


@router.post("/ui/keys")
async def make_key(request: Request, policy: str | None = None) -> Response:
    """Make a key for an agent; its secret is shown only once."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    if chosen not in [known.id for known in services.directory.snapshot.policies]:
        raise NotFound(f"There is no policy {chosen!r}.", code="policy_not_found", field="policy")
    form = await read_form(request)
    name = form.get("name", "").strip()[:_NAME_CHARACTERS] or "made on the page"
    made = await services.key_operations.create(chosen, {Scope.CHAT}, name)
    address = f"{request.url.scheme}://{request.url.netloc}/v1"
    return render_page(request, login, "_key.html", chosen, "start", address=address, secret=made.key)


@router.post("/ui/chat")
async def chat(request: Request) -> Response:
    """A chat request of the box: as `POST /v1/chat/completions`, with the login for a key."""
    login = await operator(request, needs_store=False)  # chats go on without PostgreSQL
    services = services_of(request)
    body = await read_json(request, services.limits)
    key = replace(login.key, scopes=login.key.scopes | {Scope.CHAT})
    return ChatExchange(await prepare(services, key, request.headers, body), services)


@router.get("/ui/chat/{name}")
async def recorded_chat(request: Request, name: str) -> Response:
    """The recorded turns of the box's chat."""
    login = await viewer(request)
    if _CHAT_NAME.fullmatch(name) is None:
        raise RequestRejected(f"No chat of this page is called {name!r}.", status=404, code="not_found")
    reading = services_of(request).reading
    session = await reading.session_of_client(login.key.id, name)
    if session is None:
        return render(request, "_note.html", note="")
    chat = await reading.session_from(session, 0, 50)
    return render_page(request, login, "_recorded.html", login.key.policy, "start", chat=chat)
