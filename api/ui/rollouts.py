"""`GET /ui/rollouts` and `/ui/episodes/{episode}`: what a policy practises, and each attempt as a conversation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.page import PageRoute, is_htmx, operator, policy_of, read_form, render_page, viewer
from api.ui.sessions import TURNS_ON_A_PAGE, on_page
from clawloop.core.contracts.episodes import RolloutsPlan
from clawloop.core.errors import NotFound, RequestRejected
from clawloop.core.ids import EpisodeId, RolloutGroupId
from clawloop.operations.rollouts import EXAMPLES, episode_page, found_episode, group_page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST = 2**31 - 1
_GROUPS = 20
_EPISODES = 50
_ENVIRONMENT_CHARACTERS = 200


@router.get("/ui/rollouts")
async def list_rollouts(
    request: Request,
    policy: str | None = None,
    group: RolloutGroupId | None = None,
    after_group: RolloutGroupId | None = None,
    after: EpisodeId | None = None,
) -> Response:
    """Rollout groups and episodes; with `group` the episodes of that one."""
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    of_group = None if group is None else await services.episodes.find_group(str(group))
    template = "_practice.html" if is_htmx(request) and "hx-boosted" not in request.headers else "rollouts.html"
    return render_page(
        request,
        login,
        template,
        chosen,
        "rollouts",
        rollouts=await services.rollout_operations.status(chosen),
        groups=await group_page(services.episodes, policy=chosen, after=after_group, limit=_GROUPS),
        episodes=await episode_page(services.episodes, policy=chosen, group=of_group, after=after, limit=_EPISODES),
        group=of_group,
        examples=EXAMPLES,
        note=None,
    )


@router.get("/ui/episodes/{episode}")
async def show_episode(request: Request, episode: str) -> Response:
    """An episode: how it ended, its reward, and its first session as a chat."""
    login = await viewer(request)
    services = services_of(request)
    found = await found_episode(services.episodes, episode)
    shown: dict[str, Any] = {"episode": found, "chat": None, "note": None}
    if found.sessions:
        shown |= on_page(await services.reading.session_from(found.sessions[0], 0, TURNS_ON_A_PAGE), 1)
    return render_page(request, login, "episode.html", found.policy, "rollouts", **shown)


@router.post("/ui/rollouts/{action}")
async def change_rollouts(request: Request, action: str, policy: str | None = None) -> Response:
    """Start rollouts by the settings of the form, or pause them."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    form = await read_form(request)
    match action:
        case "start":
            environment = form.get("own", "").strip() or form.get("environment", "").strip()
            if not 0 < len(environment) <= _ENVIRONMENT_CHARACTERS:
                message = f"Name the environment, with {_ENVIRONMENT_CHARACTERS} characters at most."
                raise RequestRejected(message, field="environment")
            plan = RolloutsPlan(
                environment,
                _number(form, "size", 2, 1024),
                _number(form, "groups", 1, 1024),
                _number(form, "barren", 1, _MOST),
                "curriculum" in form,
            )
            applied = await services.rollout_operations.start(chosen, plan)
        case "pause":
            applied = await services.rollout_operations.pause(chosen, form.get("reason", ""))
        case _:
            raise NotFound(f"There is no action {action!r}.", code="not_found", field="action")
    note = "Started." if action == "start" else "Paused: groups in flight are finished."
    shown = {"rollouts": applied.result, "examples": EXAMPLES, "note": note}
    return render_page(request, login, "_rollouts.html", chosen, "rollouts", **shown)


def _number(form: dict[str, str], field: str, least: int, most: int) -> int:
    value = form.get(field, "")
    if not value.isascii() or not value.isdigit() or len(value) > 10 or not least <= int(value) <= most:
        raise RequestRejected(f"`{field}` is a number from {least} to {most}.", field=field)
    return int(value)
