"""`GET /ui/engines`: engines with their versions, queues, and problems with their remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import Services, services_of
from api.ui.now import Situation, situation_of
from api.ui.page import PageRoute, operator, policy_of, read_form, render_page, viewer
from api.ui.wording import plural, sentence
from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.training import TrainingState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound, RequestRejected, SetupError
from clawloop.operations.overview import NO_TEMPORAL

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_URL_CHARACTERS = 1000
_RESTARTED = (
    "`clawloop up`, Compose and Kubernetes restart what they started, within a minute or a few. "
    "What was started by hand must be started again by hand."
)


@dataclass(frozen=True, slots=True)
class EngineLine:
    """
    Args:
        healthy: it answers this gateway.
        lacks_active: the active version is not loaded.
    """

    engine: Engine
    healthy: bool
    versions: Sequence[int]
    lacks_active: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """A problem, and its remedy."""

    problem: str
    remedy: str


@router.get("/ui/engines")
async def engines(request: Request, policy: str | None = None) -> Response:
    return await _page(request, policy, "engines.html")


@router.get("/ui/engines/now")
async def engines_again(request: Request, policy: str | None = None) -> Response:
    return await _page(request, policy, "_engines.html")


@router.post("/ui/engines")
async def add_engine(request: Request, policy: str | None = None) -> Response:
    """Let gateways use one more engine."""
    await operator(request)
    form = await read_form(request)
    if not 0 < len(url := form.get("url", "").strip()) <= _URL_CHARACTERS:
        raise RequestRejected("Give the engine's address, e.g. http://127.0.0.1:8101.", field="url")
    try:
        added = await services_of(request).engine_operations.add(url, require_guard="require_guard" in form)
    except SetupError as error:
        raise RequestRejected(f"{error}.", code="invalid_value", field="url") from error
    note = " ".join([f"Engine {added.engine.id} is added.", *added.warnings])
    return await _page(request, policy, "_engines.html", note)


@router.post("/ui/engines/{engine}/{action}")
async def change_engine(request: Request, engine: str, action: str, policy: str | None = None) -> Response:
    """Drain an engine, let it take requests again, or forget it; `force` also if it is the only one."""
    await operator(request)
    operations = services_of(request).engine_operations
    force = "force" in await read_form(request)
    match action:
        case "drain" | "undrain":
            await operations.drain(engine, undo=action == "undrain", force=force)
            note = f"Engine {engine} gets no new chats." if action == "drain" else f"Engine {engine} takes chats again."
        case "remove":
            await operations.remove(engine, force=force)
            note = f"Engine {engine} is forgotten."
        case _:
            raise NotFound(f"There is no action {action!r}.", code="not_found", field="action")
    return await _page(request, policy, "_engines.html", f"{note} Gateways follow within a second.")


async def _page(request: Request, policy: str | None, template: str, note: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    situation = await situation_of(services, chosen)
    lines = _lines(services, chosen, situation.training.version)
    advice = _advice(situation, lines)
    shown = {"now": situation, "engines": lines, "advice": advice, "note": note}
    return render_page(request, login, template, chosen, "engines", **shown)


def _lines(services: Services, policy: str, active: int) -> list[EngineLine]:
    healthy = services.engines.healthy()
    return [
        EngineLine(
            engine,
            engine.id in healthy,
            sorted(engine.versions.get(policy, frozenset())),
            active != 0 and active not in engine.versions.get(policy, frozenset()),
        )
        for engine in services.directory.snapshot.engines
    ]


def _advice(now: Situation, engines: Sequence[EngineLine]) -> list[Advice]:
    found = [Advice(sentence(problem), "Chats wait or fail until this is gone.") for problem in now.problems]
    if now.temporal is not None:
        missing = "Start one, and this gateway with its address; `clawloop up` starts both."
        found.append(Advice(sentence(now.temporal), missing if now.temporal == NO_TEMPORAL else _RESTARTED))
    for line in engines:
        if line.engine.problem is not None:
            problem = sentence(f"engine {line.engine.id}: {line.engine.problem}")
            found.append(Advice(problem, "It may still start; its agent tries again by itself."))
        elif not line.healthy:
            found.append(Advice(f"Engine {line.engine.id} does not answer.", _RESTARTED))
        elif line.engine.draining:
            found.append(
                Advice(
                    f"Engine {line.engine.id} drains and takes no chats.",
                    "`clawloop engine drain --undo` lets it take chats again.",
                )
            )
    if now.counts.quarantined:
        found.append(
            Advice(
                f"Left out of training (quarantined): {plural(now.counts.quarantined, 'reply', 'replies')}. "
                "A step with them failed or was rejected.",
                "Look at the version that was rejected; resume with them to try again.",
            )
        )
    if unjudged := now.counts.outcomes.get(TurnOutcome.UNJUDGED, 0):
        found.append(
            Advice(f"{unjudged} turns got no valid vote.", "`clawloop judge again --unjudged` has them judged again.")
        )
    if now.training.state is TrainingState.PAUSED:
        found.append(Advice(f"Training is paused. {now.training.reason}.", "Resume it on the first page."))
    return found
