"""`GET /ui/lessons`: what the policy has been told about its user, in words, with the forms that change it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.logins import Login
from api.ui.page import PageRoute, operator, policy_of, read_form, render_page, viewer
from clawloop.core.contracts.answers import LessonList
from clawloop.core.errors import NotFound
from clawloop.operations.lessons import UNREADABLE, warnings

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/ui/lessons")
async def lessons(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    listed = await services.lesson_operations.list(chosen)
    return _page(request, login, "lessons.html", listed, None)


@router.post("/ui/lessons")
async def add_lesson(request: Request, policy: str | None = None) -> Response:
    """Add a lesson, or one in place of another (`instead_of`)."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    form = await read_form(request)
    added = await services.lesson_operations.add(chosen, form.get("text", ""), form.get("instead_of") or None)
    return await _changed(request, login, chosen, "Added." if added.in_prompt else "Added; no prompt holds it now.")


@router.post("/ui/lessons/{lesson}/{action}")
async def change_lesson(request: Request, lesson: str, action: str, policy: str | None = None) -> Response:
    """Turn a lesson off or on, or forget it."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    operations = services.lesson_operations
    match action:
        case "off":
            await operations.turn_off(chosen, lesson)
            note = "Off: new sessions do without it."
        case "on":
            await operations.turn_on(chosen, lesson)
            note = "On: new sessions get it."
        case "forget":
            forgotten = await operations.forget(chosen, lesson)
            note = f"Forgotten, with the prompts of {forgotten.turns} turns. {forgotten.what_is_left(chosen)}".strip()
        case _:
            raise NotFound(f"There is no action {action!r}.", code="not_found", field="action")
    return await _changed(request, login, chosen, note)


async def _changed(request: Request, login: Login, policy: str, note: str) -> Response:
    listed = await services_of(request).lesson_operations.list(policy)
    return _page(request, login, "_lessons.html", listed, note)


def _page(request: Request, login: Login, template: str, listed: LessonList, note: str | None) -> Response:
    told = warnings(listed) if listed.enabled else []
    shown = {"listed": listed, "warnings": told, "note": note, "unreadable": UNREADABLE}
    return render_page(request, login, template, listed.policy, "lessons", **shown)
