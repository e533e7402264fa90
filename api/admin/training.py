"""`/admin/v1/training` and `/admin/v1/policies`: how learning stands, and what an operator does about it.

Needs a key with the scope `admin`. PostgreSQL is told first, and that is what counts: it holds while Temporal, trainer
and engines are away. Their workflow is told next, best effort, so that it need not be waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api.dependencies import Services, services_of
from api.request_body import read_json
from clawloop.contracts.serving import Scope
from clawloop.contracts.training import TrainingState, TrainingView, VersionView
from clawloop.errors import RecipeRejected, RequestRejected, SignalFailed
from clawloop.recipes.checks import require_rank
from clawloop.recipes.recipe import Recipe, parse_recipe

log = logging.getLogger(__name__)

router = APIRouter(prefix="/admin/v1")

# What a PostgreSQL integer holds.
_LARGEST = 2**31 - 1


class TrainingStatus(BaseModel):
    """
    Args:
        reason: in words: what it waits for, or why it is paused.
        ready: fresh samples; needed: a full batch; judging: turns that wait for their next state or their judge.
        step: the step that is computed, or that comes next.
        version: the one that answers; head: the newest trained one on the current path.
        pinned: the version that answers whatever is trained; None if none.
    """

    policy: str
    state: TrainingState
    reason: str
    ready: int
    needed: int
    judging: int
    step: int
    version: int
    head: int
    pinned: int | None

    @classmethod
    def of(cls, view: TrainingView) -> TrainingStatus:
        return cls(**{name: getattr(view, name) for name in cls.model_fields})


class PolicyStatus(BaseModel):
    """
    Args:
        base_model: version 0, by the name under which engines serve it.
        aliases: further names for the policy.
    """

    policy: str
    base_model: str
    aliases: list[str]
    training: TrainingStatus


class PolicyList(BaseModel):
    policies: list[PolicyStatus]


class VersionList(BaseModel):
    versions: list[VersionView]


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PauseRequest(_Said):
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=r"\S")]
    """For people; shown wherever training is."""


class ResumeRequest(_Said):
    retry: bool = False
    """Samples that a bad step set aside may be taken again."""


class RollBackRequest(_Said):
    version: Annotated[int, Field(ge=0, le=_LARGEST)]
    """Learning goes on from it, and it answers."""


class PinRequest(_Said):
    version: Annotated[int, Field(ge=0, le=_LARGEST)] | None
    """It answers whatever is trained; null lets the newest one answer again."""


Asked = TypeVar("Asked", bound=_Said)


def _described(model: type[_Said]) -> dict[str, Any]:
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"required": model is not ResumeRequest, "content": {"application/json": schema}}}


# Its own schema would refer to parts that the description does not hold.
_OBJECT = {"type": "object", "description": "The keys of a file in deploy/recipes; what is left out has its default."}
_RECIPE = {"requestBody": {"required": True, "content": {"application/json": {"schema": _OBJECT}}}}


@router.get("/training")
async def show_training(request: Request, policy: str = "default") -> TrainingStatus:
    """What learning of a policy does now, and what it waits for."""
    services = await _admitted(request)
    return TrainingStatus.of(await services.training.status(policy))


@router.post("/training/pause", openapi_extra=_described(PauseRequest))
async def pause_training(request: Request, policy: str = "default") -> TrainingStatus:
    """Claim no batch until resumed; a step that runs is finished. Holds whatever is restarted."""
    services = await _admitted(request)
    asked = _check(PauseRequest, await read_json(request, services.limits))
    view = await services.training.pause(policy, asked.reason)
    await _tell(services.operations.pause(policy, asked.reason))
    return TrainingStatus.of(view)


@router.post("/training/resume", openapi_extra=_described(ResumeRequest))
async def resume_training(request: Request, policy: str = "default") -> TrainingStatus:
    """Claim batches again."""
    services = await _admitted(request)
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    asked = ResumeRequest() if empty else _check(ResumeRequest, await read_json(request, services.limits))
    view = await services.training.resume(policy, retry_quarantined=asked.retry)
    await _tell(services.operations.resume(policy, asked.retry))
    return TrainingStatus.of(view)


@router.get("/policies")
async def list_policies(request: Request) -> PolicyList:
    """The policies, each with how its learning stands."""
    services = await _admitted(request)
    return PolicyList(
        policies=[
            PolicyStatus(
                policy=policy.id,
                base_model=policy.base_model,
                aliases=list(policy.aliases),
                training=TrainingStatus.of(await services.training.status(policy.id)),
            )
            for policy in services.directory.snapshot.policies
        ]
    )


@router.get("/policies/{policy}/versions")
async def list_versions(request: Request, policy: str) -> VersionList:
    """All versions there ever were, each with what its step measured and where it is loaded."""
    services = await _admitted(request)
    return VersionList(versions=await services.training.versions(policy))


@router.post("/policies/{policy}/roll-back", openapi_extra=_described(RollBackRequest))
async def roll_back(request: Request, policy: str) -> TrainingStatus:
    """Go on from an earlier version; a step that runs is abandoned, and its samples are free again."""
    services = await _admitted(request)
    asked = _check(RollBackRequest, await read_json(request, services.limits))
    view = await services.training.roll_back(policy, asked.version)
    await _tell(services.operations.roll_back(policy, asked.version))
    return TrainingStatus.of(view)


@router.post("/policies/{policy}/pin", openapi_extra=_described(PinRequest))
async def pin(request: Request, policy: str) -> TrainingStatus:
    """Let one version answer whatever is trained, or with null the newest again."""
    services = await _admitted(request)
    asked = _check(PinRequest, await read_json(request, services.limits))
    if asked.version is None:
        view = await services.training.unpin(policy)
    else:
        view = await services.training.pin(policy, asked.version)
    await _tell(services.operations.pin(policy, asked.version))
    return TrainingStatus.of(view)


@router.get("/policies/{policy}/recipe")
async def show_recipe(request: Request, policy: str) -> Recipe:
    """What the policy learns by, all keys filled in, as setting it takes it."""
    services = await _admitted(request)
    return await services.training.recipe(policy)


@router.post("/policies/{policy}/recipe", openapi_extra=_RECIPE)
async def set_recipe(request: Request, policy: str) -> TrainingStatus:
    """Learn by this recipe from the next step on.

    Samples that wait stay good while its `signal` part is the same; others expire at once, and for good.
    """
    services = await _admitted(request)
    asked = _read_recipe(await read_json(request, services.limits), services.max_lora_rank)
    try:
        view = await services.training.set_recipe(policy, asked)
    except RecipeRejected as error:  # a good recipe, but not from where the policy is
        raise RequestRejected(f"{error}.", status=409, code="recipe_conflict", field=error.field) from error
    await _tell(services.operations.set_recipe(policy, asked))
    return TrainingStatus.of(view)


def _read_recipe(body: dict[str, Any], max_lora_rank: int) -> Recipe:
    try:
        recipe = parse_recipe(body)
        require_rank(recipe, max_lora_rank)
    except RecipeRejected as error:
        raise RequestRejected(f"{error}.", code="invalid_recipe", field=error.field) from error
    return recipe


async def _admitted(request: Request) -> Services:
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    return services


def _check(model: type[Asked], body: dict[str, Any]) -> Asked:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        takes = ", ".join(f"`{name}`" for name in model.model_fields)
        raise RequestRejected(
            f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}. This takes {takes}.",
            code="missing_required_parameter" if first["type"] == "missing" else "invalid_value",
            field=field,
        ) from None


async def _tell(telling: Awaitable[None]) -> None:
    try:
        await telling
    except SignalFailed as error:
        log.warning("told PostgreSQL, but not the training workflow", extra={"why": str(error)})
