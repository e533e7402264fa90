"""Reads training status, sessions, turns and episodes from the gateway's admin API, and starts rollouts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from types import TracebackType
from typing import Any
from uuid import UUID

import aiohttp

from clawloop.contracts.gate_checks import CheckName, CheckResult
from clawloop.contracts.training import TrainingState
from clawloop.demo.openai_client import PATIENCE_SECONDS
from clawloop.errors import SetupError

# A request reads one row or one session; a gateway on a loaded machine answers within two seconds.
_TIMEOUT_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_PAGE_SIZE = 500
# Words for the state of versions that were accepted and whose learning continues.
_ACCEPTED = frozenset({"head", "on the path"})


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The response of `GET /admin/v1/training` for one policy.

    Args:
        ready: samples that wait for a step; needed: samples in a batch; judging: turns without a decision yet.
        step: the step in progress, or else the next one.
        version: the active version; head: the newest.
    """

    state: TrainingState
    reason: str
    ready: int
    needed: int
    judging: int
    step: int
    version: int
    head: int

    @property
    def is_done(self) -> bool:
        """True if every turn is judged, every full batch is trained and the newest version is active."""
        nothing_to_learn = self.state is TrainingState.WAITING and self.ready < self.needed
        return self.judging == 0 and nothing_to_learn and self.version == self.head


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session under the client's name for it, with its number of stored main turns."""

    id: UUID
    name: str
    main_turns: int


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """A main turn and its outcome."""

    id: UUID
    version: int
    outcome: str
    why: str | None
    verdict: int | None
    hint: str | None
    step: int | None

    @property
    def is_decided(self) -> bool:
        return self.outcome != "waiting"


@dataclass(frozen=True, slots=True)
class RolloutsStatus:
    """The response of `GET /admin/v1/rollouts` for one policy.

    Args:
        reason: why they are paused, or what they wait for.
        in_flight: open groups.
    """

    paused: bool
    reason: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A rollout group."""

    id: str
    state: str


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """
    Args:
        ending, ended_at: None while it runs.
        reward: None if it has none.
    """

    group: str
    state: str
    ending: str | None
    reward: float | None
    ended_at: datetime | None = None


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
        body = await self._get("/admin/v1/training", {"policy": policy})
        return TrainingStatus(
            state=TrainingState(body["state"]),
            reason=body["reason"],
            ready=body["ready"],
            needed=body["needed"],
            judging=body["judging"],
            step=body["step"],
            version=body["version"],
            head=body["head"],
        )

    async def trained_versions(self, policy: str) -> TrainedVersions:
        """Count the versions after version 0."""
        body = await self._get(f"/admin/v1/policies/{policy}/versions", {})
        trained = [version for version in body["versions"] if version["n"] > 0]
        checks = [{check["name"]: check for check in version.get("gate", [])} for version in trained]
        return TrainedVersions(
            len(trained),
            rejected=sum(any(check["result"] == CheckResult.FAILED for check in each.values()) for each in checks),
            probed=sum(bool(each.get(CheckName.PROBES, {}).get("figures", {}).get("asked")) for each in checks),
        )

    async def accepted_versions(self, policy: str) -> list[AcceptedVersion]:
        """Accepted versions after version 0 that have files, in order."""
        body = await self._get(f"/admin/v1/policies/{policy}/versions", {})
        found = [
            AcceptedVersion(version["n"], datetime.fromisoformat(version["created_at"]))
            for version in body["versions"]
            if version["n"] > 0 and not _ACCEPTED.isdisjoint(version["state"].split(", "))
            if "files removed" not in version["state"]
        ]
        return sorted(found, key=attrgetter("n"))

    async def served_models(self) -> set[str]:
        """Return the names of all models that the key's policy can chat with now, each loaded version among them."""
        body = await self._get("/v1/models", {"versions": "true"})
        return {model["id"] for model in body["data"]}

    async def sessions(self, policy: str | None) -> list[SessionSummary]:
        """Return the newest sessions that were named by their client, of one policy or of all."""
        query = {"limit": str(_PAGE_SIZE)} | ({} if policy is None else {"policy": policy})
        page = await self._get("/admin/v1/sessions", query)
        return [
            SessionSummary(UUID(session["id"]), session["external_id"], session["main_turns"])
            for session in page["sessions"]
            if session["external_id"] is not None
        ]

    async def main_turns(self, session: UUID) -> list[TurnSummary]:
        """Return the main turns of a session in order."""
        body = await self._get(f"/admin/v1/sessions/{session}", {})
        return [_turn(turn) for turn in body["turns"] if turn["kind"] == "main"]

    async def roll_back(self, policy: str) -> None:
        """Activate version 0 again, which frees the policy's adapter slot on the engine."""
        path = f"/admin/v1/policies/{policy}/roll-back"
        await self._request("POST", path, f"{policy} cannot be rolled back", json={"version": 0})

    async def start_rollouts(self, policy: str, environment: str, *, size: int, groups: int, barren: int) -> None:
        """Start a policy's rollouts."""
        plan = {"environment": environment, "size": size, "groups": groups, "barren": barren}
        path, query = "/admin/v1/rollouts/start", {"policy": policy}
        await self._request("POST", path, f"rollouts of {policy} cannot be started", params=query, json=plan)

    async def pause_rollouts(self, policy: str, reason: str) -> None:
        path, query = "/admin/v1/rollouts/pause", {"policy": policy}
        failure = f"rollouts of {policy} cannot be paused"
        await self._request("POST", path, failure, params=query, json={"reason": reason})

    async def rollouts(self, policy: str) -> RolloutsStatus:
        body = await self._get("/admin/v1/rollouts", {"policy": policy})
        return RolloutsStatus(body["state"] == "paused", body["reason"], body["in_flight"])

    async def groups(self, policy: str) -> list[GroupSummary]:
        """Return all rollout groups of a policy."""
        found = await self._all("/admin/v1/rollout-groups", "groups", policy)
        return [GroupSummary(group["id"], group["state"]) for group in found]

    async def episodes(self, policy: str) -> list[EpisodeSummary]:
        """Return all episodes of a policy."""
        return [
            EpisodeSummary(
                episode["group"],
                episode["state"],
                episode["ending"],
                episode["reward"],
                None if episode["ended_at"] is None else datetime.fromisoformat(episode["ended_at"]),
            )
            for episode in await self._all("/admin/v1/episodes", "episodes", policy)
        ]

    async def _all(self, path: str, name: str, policy: str) -> list[Any]:
        """The items of all pages of a list."""
        found: list[Any] = []
        query = {"policy": policy, "limit": str(_PAGE_SIZE)}
        while True:
            page = await self._get(path, query)
            found += page[name]
            if page["next"] is None:
                return found
            query["after"] = page["next"]

    async def _get(self, path: str, query: dict[str, str]) -> Any:
        return await self._request("GET", path, f"{self._url}{path} cannot be read", params=query)

    async def _request(self, method: str, path: str, failure: str, **content: Any) -> Any:
        """Send an idempotent request until it is answered; a part that is away comes back.

        Raises:
            SetupError: it was refused, or not answered for `PATIENCE_SECONDS`.
        """
        began = time.monotonic()
        while True:
            try:
                async with self._session.request(method, f"{self._url}{path}", **content) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    why = f"{answer.status}: {(await answer.text())[:200]}"
                    refused = answer.status < 500
            except (aiohttp.ClientError, TimeoutError) as error:
                why, refused = " ".join(str(error).split()) or "no answer in time", False
            if refused or time.monotonic() - began > PATIENCE_SECONDS:
                raise SetupError(f"{failure}: {why}")
            await asyncio.sleep(_RETRY_SECONDS)


def _turn(turn: dict[str, Any]) -> TurnSummary:
    return TurnSummary(
        id=UUID(turn["id"]),
        version=turn["version"],
        outcome=turn["outcome"],
        why=turn["why"],
        verdict=turn["verdict"],
        hint=turn["hint"],
        step=turn["step"],
    )
