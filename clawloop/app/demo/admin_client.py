"""Reads training status, sessions, turns and episodes from the gateway's admin API, and starts rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from pydantic import TypeAdapter, ValidationError

from clawloop.app.demo.openai_client import PATIENCE_SECONDS
from clawloop.core.contracts.answers import EpisodePage, GroupPage, LessonList, PolicyList, TrainingStatus, VersionList
from clawloop.core.contracts.episodes import EpisodeView, GroupView, RolloutsView
from clawloop.core.contracts.training import CheckResult, VersionView
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.contracts.views import SessionDetail, SessionPage, SessionView, TurnView
from clawloop.core.errors import ScopeMissing, SetupError
from clawloop.core.gate.checks import PROBES
from clawloop.core.ids import SessionId

Record = TypeVar("Record")
Page = TypeVar("Page", GroupPage, EpisodePage)

# A request reads one row or one session; a gateway on a loaded machine answers within two seconds.
_TIMEOUT_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_PAGE_SIZE = 500
# Words for the state of versions that were accepted and whose learning continues.
_ACCEPTED = frozenset({"head", "on the path"})


@dataclass(frozen=True, slots=True)
class AcceptedVersion:
    """A version that was activated, and not rolled back since."""

    n: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class TrainedVersions:
    """
    Args:
        rejected: the gate found them worse than their parent.
        probed: they were asked the gate's probes.
    """

    count: int
    rejected: int
    probed: int


class AdminClient:
    """A client of the admin API. Use as an async context manager.

    Args:
        url: the gateway's, without `/v1`.
        key: an API key with the scope `admin`.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        )

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def training_status(self, policy: str) -> TrainingStatus:
        """Return the training status of a policy.

        Raises:
            SetupError: the gateway returns none.
        """
        return await self._get(TrainingStatus, "/admin/v1/training", {"policy": policy})

    async def trained_versions(self, policy: str) -> TrainedVersions:
        """Count the versions after version 0."""
        trained = [version for version in await self._versions(policy) if version.n > 0]
        return TrainedVersions(
            len(trained),
            rejected=sum(any(check.result is CheckResult.FAILED for check in version.gate) for version in trained),
            probed=sum(
                any(check.name == PROBES and check.figures.get("asked") for check in version.gate)
                for version in trained
            ),
        )

    async def accepted_versions(self, policy: str) -> list[AcceptedVersion]:
        """Return the accepted versions after version 0 whose files exist, by number."""
        found = [
            AcceptedVersion(version.n, version.created_at)
            for version in await self._versions(policy)
            if version.n > 0 and not _ACCEPTED.isdisjoint(version.state.split(", "))
            if "files removed" not in version.state
        ]
        return sorted(found, key=attrgetter("n"))

    async def _versions(self, policy: str) -> Sequence[VersionView]:
        return (await self._get(VersionList, f"/admin/v1/policies/{policy}/versions", {})).versions

    async def served_models(self) -> set[str]:
        """Return the names of all models that the key's policy can chat with now, each loaded version among them."""
        body = await self._request("GET", "/v1/models", "the models cannot be read", params={"versions": "true"})
        return {model["id"] for model in body["data"]}

    async def sessions(self, policy: str | None) -> dict[str, SessionView]:
        """Return the newest sessions that were named by their client, of one policy or of all, by that name."""
        query = {"limit": str(_PAGE_SIZE)} | ({} if policy is None else {"policy": policy})
        page = await self._get(SessionPage, "/admin/v1/sessions", query)
        newest_last = reversed(page.sessions)
        return {session.external_id: session for session in newest_last if session.external_id is not None}

    async def main_turns(self, session: SessionId) -> list[TurnView]:
        """Return the main turns of a session in order."""
        detail = await self._get(SessionDetail, f"/admin/v1/sessions/{session}", {})
        return [turn for turn in detail.turns if turn.kind is TurnKind.MAIN]

    async def roll_back(self, policy: str) -> None:
        """Activate version 0 again, which frees the policy's adapter slot on the engine."""
        path = f"/admin/v1/policies/{policy}/roll-back"
        await self._request("POST", path, f"{policy} cannot be rolled back", json={"version": 0})

    async def policies(self) -> set[str]:
        """Return the names of all policies that are not retired."""
        return {one.policy for one in (await self._get(PolicyList, "/admin/v1/policies", {})).policies}

    async def create_policy(self, name: str, like: str, recipe: dict[str, Any] | None) -> None:
        """Make a policy of `like`'s base model.

        Args:
            recipe: None: that of `like`.
        """
        wanted = {"name": name, "like": like, "recipe": recipe}
        await self._request("POST", "/admin/v1/policies", f"{name} cannot be created", json=wanted)

    async def recipe(self, policy: str) -> dict[str, Any]:
        """Return the content of a policy's recipe."""
        path = f"/admin/v1/policies/{policy}/recipe"
        content: dict[str, Any] = await self._request("GET", path, f"the recipe of {policy} cannot be read")
        return content

    async def lessons_in_prompt(self, policy: str) -> int:
        """Count the lessons that a new session of a policy gets."""
        listed = await self._get(LessonList, f"/admin/v1/policies/{policy}/lessons", {})
        return sum(lesson.in_prompt for lesson in listed.lessons)

    async def create_key(self, policy: str) -> str:
        """Return a new key for chats with a policy."""
        wanted = {"name": policy, "policy": policy}
        body = await self._request("POST", "/admin/v1/keys", f"no key for {policy} can be made", json=wanted)
        return str(body["key"])

    async def retire_policy(self, policy: str) -> None:
        """End a policy: its keys are revoked, and engines unload its versions."""
        path = f"/admin/v1/policies/{policy}/retire"
        await self._request("POST", path, f"{policy} cannot be retired")

    async def start_rollouts(self, policy: str, environment: str, *, size: int, groups: int, barren: int) -> None:
        """Start a policy's rollouts."""
        plan = {"environment": environment, "size": size, "groups": groups, "barren": barren}
        path, query = "/admin/v1/rollouts/start", {"policy": policy}
        await self._request("POST", path, f"rollouts of {policy} cannot be started", params=query, json=plan)

    async def pause_rollouts(self, policy: str, reason: str) -> None:
        path, query = "/admin/v1/rollouts/pause", {"policy": policy}
        failure = f"rollouts of {policy} cannot be paused"
        await self._request("POST", path, failure, params=query, json={"reason": reason})

    async def rollouts(self, policy: str) -> RolloutsView:
        return await self._get(RolloutsView, "/admin/v1/rollouts", {"policy": policy})

    async def groups(self, policy: str) -> list[GroupView]:
        """Return all rollout groups of a policy."""
        pages = self._pages(GroupPage, "/admin/v1/rollout-groups", policy)
        return [group async for page in pages for group in page.groups]

    async def episodes(self, policy: str) -> list[EpisodeView]:
        """Return all episodes of a policy."""
        pages = self._pages(EpisodePage, "/admin/v1/episodes", policy)
        return [episode async for page in pages for episode in page.episodes]

    async def _pages(self, kind: type[Page], path: str, policy: str) -> AsyncIterator[Page]:
        query = {"policy": policy, "limit": str(_PAGE_SIZE)}
        while True:
            page = await self._get(kind, path, query)
            yield page
            if page.next is None:
                return
            query["after"] = str(page.next)

    async def _get(self, kind: type[Record], path: str, query: dict[str, str]) -> Record:
        """The record that a route answers.

        Raises:
            SetupError: it was refused, not answered for `PATIENCE_SECONDS`, or is none of this version's records.
        """
        body = await self._request("GET", path, f"{self._url}{path} cannot be read", params=query)
        try:
            return TypeAdapter(kind).validate_python(body)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise SetupError(
                f"{self._url}{path} answers otherwise than this version: {field}: {first['msg']}"
            ) from error

    async def _request(self, method: str, path: str, failure: str, **content: Any) -> Any:
        """Send an idempotent request until it is answered; a part that is away comes back.

        Raises:
            ScopeMissing: the key has not the scope `admin`.
            SetupError: it was refused, or not answered for `PATIENCE_SECONDS`.
        """
        began = time.monotonic()
        while True:
            try:
                async with self._session.request(method, f"{self._url}{path}", **content) as answer:
                    if answer.status in (200, 201):
                        return await answer.json()
                    said = await answer.text()
                    why = f"{answer.status}: {said[:200]}"
                    if '"insufficient_scope"' in said:
                        raise ScopeMissing(f"{failure}: {why}")
                    refused = answer.status < 500
            except (aiohttp.ClientError, TimeoutError) as error:
                why, refused = " ".join(str(error).split()) or "no answer in time", False
            if refused or time.monotonic() - began > PATIENCE_SECONDS:
                raise SetupError(f"{failure}: {why}")
            await asyncio.sleep(_RETRY_SECONDS)
