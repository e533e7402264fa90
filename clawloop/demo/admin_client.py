"""How learning stands, asked of the gateway's admin API as any operator would.

Knows nothing about who chats. What the API does not say is None.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from uuid import UUID

import aiohttp

from clawloop.contracts.training import TrainingState
from clawloop.errors import SetupError

# It reads one row or a session; a gateway on a loaded machine answers within a second or two.
_ANSWER_SECONDS = 30.0
_TRIES = 5
_PAUSE_SECONDS = 1.0
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Learning:
    """What `GET /admin/v1/training` says of one policy.

    Args:
        state: training while a step is computed.
        ready: samples that wait; needed: as many make a batch; judging: turns that are not decided yet.
        step: the step that is being computed, or comes next.
        version: the one that answers; head: the newest.
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
        """All that was said has been judged, every full batch trained, the newest version answers."""
        nothing_to_learn = self.state is TrainingState.WAITING and self.ready < self.needed
        return self.judging == 0 and nothing_to_learn and self.version == self.head


@dataclass(frozen=True, slots=True)
class WatchedSession:
    """A session by the name its client gave it, and how many main turns of it are stored."""

    id: UUID
    name: str
    main_turns: int


@dataclass(frozen=True, slots=True)
class WatchedTurn:
    """A main turn and what became of it."""

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


class AdminClient:
    """Use as an async context manager.

    Args:
        url: the gateway's, without `/v1`.
        key: with the scope `admin`.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        )

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def learning(self, policy: str) -> Learning:
        """
        Raises:
            SetupError: the gateway does not tell.
        """
        said = await self._get("/admin/v1/training", {"policy": policy})
        return Learning(
            state=TrainingState(said["state"]),
            reason=said["reason"],
            ready=said["ready"],
            needed=said["needed"],
            judging=said["judging"],
            step=said["step"],
            version=said["version"],
            head=said["head"],
        )

    async def versions_made(self, policy: str) -> int:
        """How many versions have been trained."""
        said = await self._get(f"/admin/v1/policies/{policy}/versions", {})
        return sum(version["n"] > 0 for version in said["versions"])

    async def sessions(self, policy: str | None) -> list[WatchedSession]:
        """The newest sessions that their client gave a name, of one policy or of all."""
        query = {"limit": str(_PAGE)} | ({} if policy is None else {"policy": policy})
        page = await self._get("/admin/v1/sessions", query)
        return [
            WatchedSession(UUID(one["id"]), one["external_id"], one["main_turns"])
            for one in page["sessions"]
            if one["external_id"] is not None
        ]

    async def main_turns(self, session: UUID) -> list[WatchedTurn]:
        """In the order in which they were asked."""
        shown = await self._get(f"/admin/v1/sessions/{session}", {})
        return [_turn(turn) for turn in shown["turns"] if turn["kind"] == "main"]

    async def roll_back(self, policy: str) -> None:
        """Let the base model answer again, so that the policy needs no place on the engine any more."""
        try:
            async with self._session.post(
                f"{self._url}/admin/v1/policies/{policy}/roll-back", json={"version": 0}
            ) as answer:
                why = "" if answer.status == 200 else f"{answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            why = " ".join(str(error).split()) or "no answer in time"
        if why:
            raise SetupError(f"{policy} cannot be rolled back: {why}")

    async def _get(self, path: str, query: dict[str, str]) -> Any:
        why = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_PAUSE_SECONDS)
            try:
                async with self._session.get(f"{self._url}{path}", params=query) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    why = f"{answer.status}: {(await answer.text())[:200]}"
                    if answer.status < 500:
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                why = " ".join(str(error).split()) or "no answer in time"
        raise SetupError(f"{self._url}{path} does not tell how things stand: {why}")


def _turn(turn: dict[str, Any]) -> WatchedTurn:
    return WatchedTurn(
        id=UUID(turn["id"]),
        version=turn["version"],
        outcome=turn["outcome"],
        why=turn["why"],
        verdict=turn["verdict"],
        hint=turn["hint"],
        step=turn["step"],
    )
