"""`/admin/v1/training` and `/admin/v1/policies`: the state of training, its probes, and what operators change."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from api.chat.comparison import MOST_PROMPTS, PROMPT_CHARACTERS, compare
from api.dependencies import admin_services, services_of
from api.request_body import RequestBody, check, described, read_json
from clawloop.core.contracts.answers import (
    Comparison,
    EventList,
    LessonForgotten,
    LessonList,
    LessonView,
    Liked,
    PolicyList,
    PolicyStatus,
    Probe,
    ProbeList,
    TrainingStatus,
    VersionDetail,
    VersionList,
)
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import TrainingView
from clawloop.core.errors import RecipeRejected, RequestRejected
from clawloop.core.judging.progress import REPLIES, progress_of
from clawloop.core.recipes.recipe import Recipe, parse_recipe
from clawloop.operations.applied import Applied
from clawloop.operations.probes import MOST_PROBES, find_probe, read_probes
from clawloop.operations.training import REASON_CHARACTERS, version_detail

# Training and policies ------------------------------------------------------------------------------------------------
# `/admin/v1/training` and `/admin/v1/policies`: the state of training, and what operators change.
#
# Needs a key with the scope `admin`. A change holds in PostgreSQL when the answer comes, also while Temporal, trainer
# and engines are away.

log = logging.getLogger(__name__)

router = APIRouter(prefix="/admin/v1", tags=["training"])

# A year of daily pauses and roll-backs; a page of them is small.
MOST_EVENTS = 500
# The largest PostgreSQL integer.
_LARGEST = 2**31 - 1


class CreatePolicyRequest(RequestBody):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Small letters, digits, `.`, `_` and `-`."""
    like: Annotated[str, Field(min_length=1, max_length=250)] = "default"
    """The policy whose base model, aliases, sampling and recipe it has."""
    version: Annotated[int, Field(ge=0, le=_LARGEST)] = 0
    """Version of `like` from which the policy begins; 0 is the base model."""
    recipe: dict[str, Any] | None = None
    """The keys of a file in deploy/recipes; null takes the recipe of `like`."""


class PauseRequest(RequestBody):
    reason: Annotated[str, Field(min_length=1, max_length=REASON_CHARACTERS, pattern=r"\S")]
    """The reason, for people; shown with the state of training."""


class ResumeRequest(RequestBody):
    retry: bool = False
    """Samples that a bad step quarantined are fresh again."""


class RollBackRequest(RequestBody):
    version: Annotated[int, Field(ge=0, le=_LARGEST)]
    """Training goes on from it, and it answers."""
    recipe: dict[str, Any] | None = None
    """The keys of a file in deploy/recipes: what it learns by from then on; null: as before."""


class ReleaseRequest(RequestBody):
    version: Annotated[int, Field(ge=1, le=_LARGEST)]
    """A version that the gate rejected; training goes on from it, and it answers."""


class PinRequest(RequestBody):
    version: Annotated[int, Field(ge=0, le=_LARGEST)] | None
    """Version that answers, whatever is trained; null: the newest version answers again."""


# The recipe's JSON schema would refer to parts that the OpenAPI description does not hold.
_OBJECT = {"type": "object", "description": "The keys of a file in deploy/recipes; missing keys have their default."}
_RECIPE = {"requestBody": {"required": True, "content": {"application/json": {"schema": _OBJECT}}}}


@router.get("/training")
async def show_training(request: Request, policy: str = "default") -> TrainingStatus:
    """The state of a policy's training, and what it waits for."""
    services = await admin_services(request)
    return TrainingStatus.of(await services.training.status(policy))


@router.get("/training/liked")
async def show_liked(request: Request, policy: str = "default") -> Liked:
    """Whether the trained versions' replies are liked better than version 0's were."""
    browser = (await admin_services(request)).training_browser
    base, newest = await browser.base_replies(policy, REPLIES), await browser.replies(policy, REPLIES)
    return Liked.of(policy, progress_of(base, newest))


@router.post("/training/pause", openapi_extra=described(PauseRequest))
async def pause_training(request: Request, policy: str = "default") -> TrainingStatus:
    """Claim no batch until resumed; a running step is finished. Holds across restarts."""
    services = await admin_services(request)
    requested = check(PauseRequest, await read_json(request, services.limits))
    return _status(await services.training_operations.pause(policy, requested.reason))


@router.post("/training/resume", openapi_extra=described(ResumeRequest, required=False))
async def resume_training(request: Request, policy: str = "default") -> TrainingStatus:
    """Claim batches again."""
    services = await admin_services(request)
    requested = check(ResumeRequest, await read_json(request, services.limits, optional=True))
    return _status(await services.training_operations.resume(policy, retry=requested.retry))


@router.get("/policies")
async def list_policies(request: Request) -> PolicyList:
    """The policies, each with the state of its training."""
    services = await admin_services(request)
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


@router.post("/policies", status_code=201, openapi_extra=described(CreatePolicyRequest))
async def create_policy(request: Request) -> TrainingStatus:
    """Make a policy that begins at a base model or from a version of another policy.

    Keys for it are made with `clawloop key create --policy`.
    """
    services = await admin_services(request)
    requested = check(CreatePolicyRequest, await read_json(request, services.limits))
    operations = services.training_operations
    recipe = None if requested.recipe is None else operations.check_recipe(parse_recipe(requested.recipe))
    return _status(await operations.create_policy(requested.name, requested.like, recipe, requested.version))


@router.post("/policies/{policy}/retire")
async def retire_policy(request: Request, policy: str) -> TrainingStatus:
    """End a policy for good: its keys are revoked, it learns no more, and engines unload its versions."""
    services = await admin_services(request)
    return _status(await services.training_operations.retire_policy(policy))


@router.get("/policies/{policy}/versions")
async def list_versions(request: Request, policy: str) -> VersionList:
    """All versions, also those rejected or rolled back, each with its step's metrics, what the gate found and the
    engines that have it."""
    services = await admin_services(request)
    return VersionList(versions=await services.training.versions(policy))


@router.get("/policies/{policy}/versions/{version}")
async def show_version(
    request: Request, policy: str, version: Annotated[int, Path(ge=0, le=2**31 - 1)]
) -> VersionDetail:
    """A version, what its step was trained on, and the versions made from it."""
    services = await admin_services(request)
    return await version_detail(services.training, services.training_browser, policy, version)


@router.get("/policies/{policy}/events")
async def list_events(
    request: Request, policy: str, limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 50
) -> EventList:
    """A policy's events, by operators and Clawloop, newest first: roll-backs, pauses, recipes, rejected versions."""
    services = await admin_services(request)
    await services.training.status(policy)  # a policy that does not exist is an error, not one without events
    return EventList(events=await services.training_browser.events(policy, limit))


@router.post("/policies/{policy}/roll-back", openapi_extra=described(RollBackRequest))
async def roll_back(request: Request, policy: str) -> TrainingStatus:
    """Go on from an earlier version; a running step is abandoned, and its samples are fresh again.

    With a recipe no step by the one before begins from the version.
    """
    services = await admin_services(request)
    requested = check(RollBackRequest, await read_json(request, services.limits))
    operations = services.training_operations
    recipe = None if requested.recipe is None else operations.check_recipe(parse_recipe(requested.recipe))
    try:
        applied = await operations.roll_back(policy, requested.version, recipe)
    except RecipeRejected as error:
        raise _conflict(error) from error
    return _status(applied)


@router.post("/policies/{policy}/release", openapi_extra=described(ReleaseRequest))
async def release(request: Request, policy: str) -> TrainingStatus:
    """Accept a version that the gate rejected, and go on from it; an open step is abandoned."""
    services = await admin_services(request)
    requested = check(ReleaseRequest, await read_json(request, services.limits))
    return _status(await services.training_operations.release(policy, requested.version))


@router.post("/policies/{policy}/pin", openapi_extra=described(PinRequest))
async def pin(request: Request, policy: str) -> TrainingStatus:
    """Pin a version, so that it answers whatever is trained; null unpins it."""
    services = await admin_services(request)
    requested = check(PinRequest, await read_json(request, services.limits))
    return _status(await services.training_operations.pin(policy, requested.version))


@router.get("/policies/{policy}/recipe")
async def show_recipe(request: Request, policy: str) -> Recipe:
    """The policy's recipe with all keys, in the form that POST takes."""
    services = await admin_services(request)
    return await services.training.recipe(policy)


@router.post("/policies/{policy}/recipe", openapi_extra=_RECIPE)
async def set_recipe(request: Request, policy: str) -> TrainingStatus:
    """Use this recipe from the next step on.

    Waiting samples stay fresh while its `signal` part is the same; others expire at once, for good.
    """
    services = await admin_services(request)
    recipe = services.training_operations.check_recipe(parse_recipe(await read_json(request, services.limits)))
    try:
        applied = await services.training_operations.set_recipe(policy, recipe)
    except RecipeRejected as error:
        raise _conflict(error) from error
    return _status(applied)


def _conflict(error: RecipeRejected) -> RequestRejected:
    """The recipe is valid, but training cannot go on with it from the policy's head."""
    return RequestRejected(f"{error}.", status=409, code="recipe_conflict", field=error.field)


def _status(applied: Applied[TrainingView]) -> TrainingStatus:
    if applied.signal_error is not None:
        log.warning("signal failed: the training workflow sees the change later", extra={"why": applied.signal_error})
    return TrainingStatus.of(applied.result)


# Probes ---------------------------------------------------------------------------------------------------------------
# `/admin/v1/policies/{policy}/probes`: prompts that the gate asks of each version. Needs the scope `admin`.

# An answer of all faults of a long list would be as long as the list.
_NAMED = 20


class NewProbes(RequestBody):
    probes: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_PROBES)
    """Each has `prompt` or `messages`, may have `tools`, and the checks `contains`, `regex`, `exact`."""


@router.get("/policies/{policy}/probes")
async def list_probes(request: Request, policy: str) -> ProbeList:
    """The policy's probes, oldest first."""
    services = await admin_services(request)
    return ProbeList(probes=[Probe.of(probe) for probe in await services.probes.all(policy)])


@router.post("/policies/{policy}/probes", openapi_extra=described(NewProbes))
async def add_probes(request: Request, policy: str) -> ProbeList:
    """Add probes, all or none; the answer has those that were added."""
    services = await admin_services(request)
    requested = check(NewProbes, await read_json(request, services.limits))
    probes, faults = read_probes(requested.probes)
    if faults:
        named = "; ".join(f"`probes.{place}`: {fault}" for place, fault in list(faults.items())[:_NAMED])
        others = f" {len(faults) - _NAMED} more cannot be used either." if len(faults) > _NAMED else ""
        raise RequestRejected(
            f"{named}. None was added.{others}", code="invalid_probe", field=f"probes.{next(iter(faults))}"
        )
    return ProbeList(probes=[Probe.of(probe) for probe in await services.probes.add(policy, probes, MOST_PROBES)])


@router.delete("/policies/{policy}/probes/{probe}")
async def remove_probe(request: Request, policy: str, probe: str) -> ProbeList:
    """Remove a probe, by its id or the beginning of it; the answer has those that are left."""
    services = await admin_services(request)
    await services.probes.remove(policy, find_probe(policy, await services.probes.all(policy), probe))
    return ProbeList(probes=[Probe.of(each) for each in await services.probes.all(policy)])


# Lessons --------------------------------------------------------------------------------------------------------------
# `/admin/v1/policies/{policy}/lessons`: sentences that the policy's prompts hold. Needs the scope `admin`.

LessonReference = Annotated[str, Path(description="An id from the list of lessons, or the beginning of one.")]


class NewLesson(RequestBody):
    text: str
    """One sentence, such as a person would write on a note; 300 characters at most."""
    instead_of: str | None = None
    """A lesson that it replaces, by its id or the beginning of it."""


@router.get("/policies/{policy}/lessons")
async def list_lessons(request: Request, policy: str) -> LessonList:
    """The policy's lessons, oldest first; not those that were forgotten."""
    services = await admin_services(request)
    return await services.lesson_operations.list(policy)


@router.post("/policies/{policy}/lessons", status_code=201, openapi_extra=described(NewLesson))
async def add_lesson(request: Request, policy: str) -> LessonView:
    """Add a lesson; one with the same words that is there is turned on. New sessions get it, if the recipe has lessons
    on."""
    services = await admin_services(request)
    requested = check(NewLesson, await read_json(request, services.limits))
    return await services.lesson_operations.add(policy, requested.text, requested.instead_of)


@router.post("/policies/{policy}/lessons/{lesson}/off")
async def turn_lesson_off(request: Request, policy: str, lesson: LessonReference) -> LessonView:
    """Leave a lesson out of prompts, from the next session or compaction on."""
    services = await admin_services(request)
    return await services.lesson_operations.turn_off(policy, lesson)


@router.post("/policies/{policy}/lessons/{lesson}/on")
async def turn_lesson_on(request: Request, policy: str, lesson: LessonReference) -> LessonView:
    """Have prompts hold a lesson again, from the next session or compaction on."""
    services = await admin_services(request)
    return await services.lesson_operations.turn_on(policy, lesson)


@router.delete("/policies/{policy}/lessons/{lesson}")
async def forget_lesson(request: Request, policy: str, lesson: LessonReference) -> LessonForgotten:
    """Erase a lesson's text for good, with the tokens of all prompts that held it."""
    services = await admin_services(request)
    return await services.lesson_operations.forget(policy, lesson)


# Comparison of versions -----------------------------------------------------------------------------------------------
# `POST /admin/v1/policies/{policy}/versions/{version}/compare`: the same prompts asked of two versions.


class CompareVersion(RequestBody):
    prompts: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=PROMPT_CHARACTERS)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
        | None
    ) = None
    """Prompts for both versions; left out: the last questions before replies that the version was trained on."""
    other: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The version to compare with; left out: its parent."""


@router.post("/policies/{policy}/versions/{version}/compare", openapi_extra=described(CompareVersion, required=False))
async def compare_version(
    request: Request, policy: str, version: Annotated[int, Path(ge=0, le=2**31 - 1)]
) -> Comparison:
    """Ask a version and another, by default its parent, the same prompts at temperature 0, as side turns of the key."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.ADMIN)
    requested = check(CompareVersion, await read_json(request, services.limits, optional=True))
    return await compare(services, key, policy, version, requested.prompts, requested.other)
