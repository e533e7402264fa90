"""`GET /ui`: is it serving, is it learning, and if not, why; the newest versions; what happened."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from api.dependencies import Services, services_of
from api.ui.chart import chart_of, matches_of, probes_of
from api.ui.logins import Login
from api.ui.page import PageRoute, policy_of, render_page, viewer
from clawloop.contracts.browsing import MEASURED, Counts, PolicyEvent
from clawloop.contracts.training import TrainingState, TrainingView, VersionView

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_VERSIONS = 5
_EVENTS = 12
# A screen is some 1,000 points wide.
_REPLIES = 1000


@dataclass(frozen=True, slots=True)
class Situation:
    """The state of a policy and of the components that it needs.

    Args:
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
        problems=await services.readiness.problems(),
        versions=(await services.training.versions(policy))[-_VERSIONS:][::-1],
        events=events[:_EVENTS],
        counts=await services.training_browser.counts(policy),
        healthy=len(services.engines.healthy()),
        engines=len(services.directory.snapshot.engines),
        temporal=await services.temporal.problem(),
    )


@router.get("/ui")
async def now(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    situation = await situation_of(services, chosen)
    if not situation.counts.sessions and policy is None:
        return RedirectResponse("/ui/start", 303)
    return _page(request, login, chosen, situation, "now.html")


@router.get("/ui/now")
async def now_again(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    chosen = policy_of(services_of(request), login, policy)
    return _page(request, login, chosen, await situation_of(services_of(request), chosen), "_now_again.html")


@router.get("/ui/chart")
async def chart(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    replies = await services.training_browser.replies(chosen, _REPLIES)
    versions = await services.training.versions(chosen)
    return JSONResponse(chart_of(replies, probes_of(versions), matches_of(versions)))


def _page(request: Request, login: Login, policy: str, situation: Situation, template: str) -> Response:
    return render_page(request, login, template, policy, "now", now=situation)
