"""Model names: the policy and version that each stands for, and `GET /v1/models`, whole or one.

`policy` and the policy's aliases stand for the key's policy; with `-side` appended, for its side turns. `{policy}-v{n}`
is one version, which engines load when it is asked. The base model's own name is version 0, unless it is an alias.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from api.dependencies import Services, services_of
from clawloop.core.contracts.serving import ApiKey, Policy, Scope
from clawloop.core.errors import RequestRejected
from clawloop.serving.directory import DirectoryCache

router = APIRouter(tags=["chat"])

POLICY_HEADER = "X-Clawloop-Policy"
# A version that a request names stays loaded at least so long for the next request, and its conversation.
NAMED_FOR = timedelta(minutes=10)
_SIDE = "-side"
_VERSION = re.compile(r"(?P<policy>.+)-v(?P<number>\d{1,9})")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The meaning of a model name.

    Args:
        version: the version that the name pins; None for the active one.
        side: the name is an alias for side turns.
    """

    version: int | None
    side: bool


def resolve_name(name: str, policy: Policy) -> ModelChoice:
    """The meaning of `name` with a key of this policy.

    Raises:
        RequestRejected: 404, lists the aliases.
    """
    aliases = ("policy", *policy.aliases)
    if name in aliases:
        return ModelChoice(version=None, side=False)
    if name.removesuffix(_SIDE) in aliases:
        return ModelChoice(version=None, side=True)
    if name == policy.base_model:
        return ModelChoice(version=0, side=False)
    match = _VERSION.fullmatch(name)
    if match and match["policy"] == policy.id and int(match["number"]) in policy.kept | {0, policy.active}:
        return ModelChoice(version=int(match["number"]), side=False)
    raise RequestRejected(
        f"The model {name!r} does not exist here. Use {_join_or(aliases)}; GET /v1/models lists all.",
        status=404,
        code="model_not_found",
        field="model",
    )


async def resolve_model(name: str, key: ApiKey, directory: DirectoryCache) -> tuple[Policy, ModelChoice]:
    """The key's policy, and what `name` stands for; refreshes the directory before it refuses a name.

    Raises:
        RequestRejected: 404, lists the aliases.
        StoreUnavailable: the directory lacks the key's policy or cannot be refreshed.
    """
    policy = await directory.find_policy(key.policy)
    try:
        return policy, resolve_name(name, policy)
    except RequestRejected:
        await directory.refresh()
        policy = directory.policy(key.policy)
        return policy, resolve_name(name, policy)


async def load_named(services: Services, policy: Policy, choice: ModelChoice) -> None:
    """Have an engine load the version that a request names, if none has it and it is not to be loaded anyhow.

    The request waits for it, as for the active version of an engine that restarted. The version takes a slot that is
    free, never another's; one that was named before leaves once it is idle.

    Raises:
        StoreUnavailable
    """
    if (n := choice.version) is None or n in (policy.active, policy.canary):
        return
    if not services.engines.has_version(policy.id, n):
        await services.want_versions(policy.id, [n], NAMED_FOR)


async def chat_key(services: Services, headers: Headers) -> ApiKey:
    """The key of a request under `/v1`, with the policy that the request chooses by `X-Clawloop-Policy`.

    Raises:
        RequestRejected: 401 without a valid key; 403 without the scope `chat`, or if the key may not choose the policy;
            404 if there is no such policy, or it is retired.
        StoreUnavailable: the key cannot be looked up now, or the directory cannot be refreshed.
    """
    key = await services.keys.require(headers, Scope.CHAT)
    name = headers.get(POLICY_HEADER, "").strip()
    if name in ("", key.policy):
        return key
    if not key.may_choose(name):
        raise RequestRejected(
            f"`{POLICY_HEADER}`: this key may not choose the policy {name[:100]!r}. Leave the header out, or use a key"
            " that may (`clawloop key create --policies NAMES`).",
            status=403,
            code="policy_not_allowed",
            field=POLICY_HEADER,
        )
    if not _is_there(name, services.directory):
        await services.directory.refresh()
        if not _is_there(name, services.directory):
            raise RequestRejected(
                f"`{POLICY_HEADER}`: there is no policy {name[:100]!r}, or it is retired; `clawloop status` shows all.",
                status=404,
                code="policy_not_found",
                field=POLICY_HEADER,
            )
    return replace(key, policy=name, is_chosen=True)


def _is_there(policy: str, directory: DirectoryCache) -> bool:
    return any(known.id == policy for known in directory.snapshot.policies)


class Model(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "clawloop"


class ModelList(BaseModel):
    object: str = "list"
    data: list[Model]


@router.get("/v1/models", response_model=None)
async def list_models(
    request: Request,
    versions: Annotated[bool, Query(description="list each version that can be asked too")] = False,
) -> ModelList | JSONResponse:
    """The model names this key can use; in Anthropic's form with the header `anthropic-version`."""
    services = services_of(request)
    key = await chat_key(services, request.headers)
    policy = await services.directory.find_policy(key.policy)
    aliases = ("policy", *policy.aliases)
    names = [*aliases, *(f"{alias}{_SIDE}" for alias in aliases)]
    if versions:
        names += [policy.base_model] if policy.base_model not in names else []
        names += [f"{policy.id}-v{number}" for number in sorted(policy.kept | {0, policy.active})]
    if "anthropic-version" in request.headers:
        data = [_anthropic_model(name) for name in names]
        return JSONResponse({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    now = int(time.time())
    return ModelList(data=[Model(id=name, created=now) for name in names])


@router.get("/v1/models/{model:path}", response_model=None)
async def show_model(request: Request, model: str) -> Model | JSONResponse:
    """One model name, if this key can use it."""
    services = services_of(request)
    key = await chat_key(services, request.headers)
    await resolve_model(model, key, services.directory)
    if "anthropic-version" in request.headers:
        return JSONResponse(_anthropic_model(model))
    return Model(id=model, created=int(time.time()))


# Programs look whether a server is there before they ask it anything.
router.add_api_route("/v1/models", list_models, methods=["HEAD"], response_model=None, include_in_schema=False)
router.add_api_route(
    "/v1/models/{model:path}", show_model, methods=["HEAD"], response_model=None, include_in_schema=False
)


def _anthropic_model(name: str) -> dict[str, str]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"type": "model", "id": name, "display_name": name, "created_at": now, "lifecycle": "active"}


def _join_or(names: tuple[str, ...]) -> str:
    return " or ".join(f"`{name}`" for name in names)
