"""`GET /ui/versions`: why the agent changed. The lineage, what each version was trained on, and what to do about it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.chat.comparison import compare
from api.dependencies import services_of
from api.ui.lineage import lines_of
from api.ui.now import situation_of
from api.ui.page import PageRoute, operator, policy_of, read_form, render_page, version_number, viewer
from clawloop.core.contracts.training import TrainingView
from clawloop.core.errors import RequestRejected
from clawloop.core.judging.progress import REPLIES
from clawloop.core.recipes.recipe import read_recipe
from clawloop.operations.applied import Applied
from clawloop.operations.training import version_detail

# Versions -------------------------------------------------------------------------------------------------------------
# `GET /ui/versions`: why the agent changed. The lineage, what each version was trained on, and what to do about it.

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# By which the table describes versions.
_REPLIES = 5000


@router.get("/ui/versions")
async def list_versions(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    replies = await services.training_browser.base_replies(chosen, REPLIES)
    replies += await services.training_browser.replies(chosen, _REPLIES)
    lines = lines_of(await services.training.versions(chosen), replies)
    training = await services.training.status(chosen)
    return render_page(request, login, "versions.html", chosen, "versions", lines=lines, training=training, note=None)


@router.get("/ui/versions/{version}")
async def show_version(request: Request, version: int, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    detail = await version_detail(services.training, services.training_browser, chosen, version)
    training = await services.training.status(chosen)
    others = [known.n for known in await services.training.versions(chosen) if known.n != version]
    shown = {"version": detail.version, "batch": detail.batch, "children": detail.children, "training": training}
    shown["others"] = others
    return render_page(request, login, "version.html", chosen, "versions", **shown, note=None)


@router.get("/ui/training")
async def steering(request: Request, policy: str | None = None) -> Response:
    """The part of pages that steers training."""
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    training = await services.training.status(chosen)
    return render_page(request, login, "_steering.html", chosen, "now", training=training, note=None)


@router.post("/ui/training/{action}")
async def change(request: Request, action: str, policy: str | None = None) -> Response:
    """Pause, resume, roll back, pin or release; the answer is the state of training anew."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    form = await read_form(request)
    operations = services.training_operations
    match action:
        case "pause":
            paused = await operations.pause(chosen, form.get("reason", ""))
            note = _noted(paused, "Paused: no batch is claimed until you resume.")
        case "resume":
            note = _noted(await operations.resume(chosen, retry="retry" in form), "It learns again.")
        case "unpin":
            unpinned = await operations.pin(chosen, None)
            note = _noted(unpinned, _answering(unpinned.result))
        case "roll-back" | "pin" | "release":
            version = version_number(form.get("version", ""))
            if action == "roll-back":
                written = form.get("recipe", "").strip()
                recipe = operations.check_recipe(read_recipe(written)) if written else None
                applied = await operations.roll_back(chosen, version, recipe)
                note = _noted(applied, f"Rolled back: training goes on from version {version}.")
            elif action == "pin":
                note = _noted(await operations.pin(chosen, version), f"Version {version} answers until you unpin it.")
            else:
                note = _noted(await operations.release(chosen, version), f"Version {version} is accepted.")
        case _:
            raise RequestRejected(f"There is no action {action!r}.", status=404, code="not_found")
    await services.directory.refresh()
    situation = await situation_of(services, chosen)
    return render_page(
        request, login, "_steering.html", chosen, "now", now=situation, training=situation.training, note=note
    )


def _answering(training: TrainingView) -> str:
    """A sentence about the version that answers once no version is pinned."""
    if training.canary is None:
        return "The newest version answers again."
    return (
        f"Version {training.canary} is tried by a share of the conversations again, and version "
        f"{training.canary_parent} answers the others, until verdicts decide."
    )


def _noted(applied: Applied[TrainingView], note: str) -> str:
    if applied.signal_error is None:
        return note
    return f"{note} Temporal does not answer now: the workers see the change when they look next."


# Comparison -----------------------------------------------------------------------------------------------------------
# `POST /ui/compare`: the same prompt answered by two versions, side by side, as side turns.


@router.post("/ui/compare")
async def compare_prompt(request: Request) -> Response:
    login = await operator(request)
    form = await read_form(request)
    number = version_number(form.get("version", ""))
    other = version_number(form["other"]) if form.get("other") else None
    policy = login.key.policy
    found = await compare(services_of(request), login.key, policy, number, [form.get("prompt", "")], other)
    shown = {"answers": found.prompts[0].answers, "parent": found.parent}
    return render_page(request, login, "_compared.html", policy, "versions", **shown)
