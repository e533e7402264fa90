"""`POST /ui/compare`: the same prompt answered by a version and by its parent, side by side, as side turns."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.chat.comparison import compare
from api.dependencies import services_of
from api.ui.page import PageRoute, operator, read_form, render_page, version_number

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.post("/ui/compare")
async def compare_prompt(request: Request) -> Response:
    login = await operator(request)
    form = await read_form(request)
    number = version_number(form.get("version", ""))
    found = await compare(services_of(request), login.key, login.key.policy, number, [form.get("prompt", "")])
    answers = found.prompts[0].answers
    return render_page(request, login, "_compared.html", login.key.policy, "versions", answers=answers)
