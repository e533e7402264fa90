"""`GET /ui/rollouts` and `/ui/episodes/{episode}`: what a policy practises, and each attempt step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.page import PageRoute, integer, is_htmx, operator, policy_of, read_form, render_page, viewer
from api.ui.sessions import LARGEST_PAGE, TURNS_ON_A_PAGE, on_page
from clawloop.core.contracts.episodes import RolloutsPlan
from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.contracts.views import Exchange, Judged, TurnView
from clawloop.core.errors import NotFound, RequestRejected
from clawloop.core.ids import EpisodeId, RolloutGroupId
from clawloop.operations.file_changes import changes_in
from clawloop.operations.rollouts import EXAMPLES, episode_page, found_episode, group_page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# Rollouts -------------------------------------------------------------------------------------------------------------
# `GET /ui/rollouts`: rollout groups and episodes, and the forms that start and pause them.

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
                integer(form.get("size", ""), "size", 2, 1024),
                integer(form.get("groups", ""), "groups", 1, 1024),
                integer(form.get("barren", ""), "barren", 1, _MOST),
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


# Episodes -------------------------------------------------------------------------------------------------------------
# `GET /ui/episodes/{episode}`: each step with its reward, and the files that the agent changed.


@dataclass(frozen=True, slots=True)
class Step:
    """A reply of the agent's.

    Args:
        task: messages before its first reply; of later replies none.
        reply: what the agent did; None if it was erased.
        results: what came back: terminal output, a page, a picture.
    """

    turn: TurnView
    task: Sequence[Message]
    reply: Message | None
    results: Sequence[Message]
    judged: Judged


def steps_of(turns: Sequence[TurnView], exchanges: Sequence[Exchange]) -> list[Step]:
    """Main turns of a session in order, each with the messages that the next one answers it by."""
    followers = {turn.parent_turn_id: exchange.said for turn, exchange in zip(turns, exchanges, strict=True)}
    return [
        Step(
            turn,
            task=() if turn.parent_turn_id else exchange.said,
            reply=exchange.reply,
            results=followers.get(turn.id, ()),
            judged=exchange.judged,
        )
        for turn, exchange in zip(turns, exchanges, strict=True)
        if turn.kind is TurnKind.MAIN
    ]


@router.get("/ui/episodes/{episode}")
async def show_episode(
    request: Request, episode: str, page: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 1
) -> Response:
    """An episode: how it ended, the steps of its first session, and the files that its agent changed."""
    login = await viewer(request)
    services = services_of(request)
    found = await found_episode(services.episodes, episode)
    shown: dict[str, Any] = {"episode": found, "steps": [], "page": page, "pages": 1}
    if found.sessions:
        # One turn more: its messages are what came back to the page's last one.
        first = (page - 1) * TURNS_ON_A_PAGE
        chat = await services.reading.session_from(found.sessions[0], first, TURNS_ON_A_PAGE + 1)
        shown |= {name: value for name, value in on_page(chat, page).items() if name in ("pages", "total")}
        steps = steps_of(chat.turns, chat.conversation or ())
        shown["steps"] = [step for step in steps if step.turn in chat.turns[:TURNS_ON_A_PAGE]]
    try:
        shown |= {"changes": await changes_in(found, services.artifacts.load, services.found_by_agent), "unread": ""}
    except NotFound as error:
        shown |= {"changes": None, "unread": str(error)}
    return render_page(request, login, "episode.html", found.policy, "rollouts", **shown)
