"""Operators' changes to sessions: have turns judged again, and erase content."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from clawloop.core.contracts.answers import Rejudged
from clawloop.core.contracts.notices import Notifier, SessionErased, SessionNotice
from clawloop.core.contracts.sessions import Erasure, RejudgeRequested
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.judging.plan import RejudgeFacts, why_not_rejudged
from clawloop.operations.applied import Applied, notify_best_effort

# Signals are sent one after the other, 10 ms each; the next call takes the next turns.
UNJUDGED_LIMIT = 1000


class RejudgeStore(Protocol):
    async def rejudge_facts(self, turn_id: TurnId) -> RejudgeFacts | None:
        """Facts that decide whether the turn can be judged again; None if there is no such turn."""

    async def of_session(self, session: SessionId) -> list[RejudgeFacts]:
        """The session's main turns in their order; empty if there is no such session."""

    async def unjudged(self, limit: int) -> list[RejudgeFacts]:
        """Turns without a valid vote, oldest first."""


class ErasureStore(Protocol):
    """Erases content for good."""

    async def copies_of(self, session: SessionId) -> list[SessionId]:
        """Sessions of side turns alone that quote this one, as summaries of a client do that does not name it."""

    async def erase_session(self, session: SessionId) -> Erasure | None:
        """Erase a session, including turns of it not inserted yet; None if there is no such session."""

    async def erase_turn(self, turn: TurnId) -> Erasure | None:
        """Erase a turn, other replies to its request, and all turns that continue them; None if there is none."""

    async def artifacts_of(self, session: SessionId) -> list[str]:
        """Digests of what the agents of the session's episodes left, and no other episode's agent."""


class SessionOperations:
    """
    Args:
        delete_artifact: deletes what an agent left, by its digest, if it is kept here. Idempotent.
    """

    def __init__(
        self,
        rejudging: RejudgeStore,
        erasures: ErasureStore,
        delete_artifact: Callable[[str], Awaitable[None]],
        notifier: Notifier,
    ) -> None:
        self._rejudging = rejudging
        self._erasures = erasures
        self._delete_artifact = delete_artifact
        self._notifier = notifier

    async def rejudge_turn(self, turn_id: TurnId) -> Rejudged | None:
        """Have a turn judged again, with the current recipe and without earlier votes; None: there is no such turn.

        Raises:
            SignalFailed, StoreUnavailable
        """
        facts = await self._rejudging.rejudge_facts(turn_id)
        return None if facts is None else (await self._rejudge([facts]))[0]

    async def rejudge_session(self, session: SessionId) -> list[Rejudged]:
        """Have all main turns of a session judged again that can be; empty if there is no such session.

        Raises:
            SignalFailed, StoreUnavailable
        """
        return await self._rejudge(await self._rejudging.of_session(session))

    async def rejudge_unjudged(self) -> list[Rejudged]:
        """Have turns without a valid vote judged again, at most `UNJUDGED_LIMIT`.

        Raises:
            SignalFailed, StoreUnavailable
        """
        return await self._rejudge(await self._rejudging.unjudged(UNJUDGED_LIMIT))

    async def _rejudge(self, turns: Sequence[RejudgeFacts]) -> list[Rejudged]:
        results = []
        for turn in turns:
            refused = why_not_rejudged(turn)
            if refused is None:
                request = RejudgeRequested(turn.turn_id, turn.next_revision)
                await self._notifier.notify(SessionNotice(turn.session, request))
            results.append(
                Rejudged(
                    turn_id=turn.turn_id,
                    session_id=turn.session.session_id,
                    revision=turn.next_revision,
                    refused=refused,
                )
            )
        return results

    async def erase_session(self, session: SessionId) -> Applied[Erasure] | None:
        """Erase a session's content for good, what quotes it in side turns, and what its episode's agent left; None if
        there is no such session.

        Raises:
            StoreUnavailable: call it again.
        """
        await self._delete_artifacts(session)
        # The session last: as long as it has its content, what quotes it is found again.
        copies = [await self._erasures.erase_session(copy) for copy in await self._erasures.copies_of(session)]
        for copy in copies:
            await self._notify(copy)
        applied = await self._notify(await self._erasures.erase_session(session))
        if applied is None:
            return None
        # Again: of two concurrent erasures with the same artifact, each found that the other session still had it.
        await self._delete_artifacts(session)
        turns = applied.result.turns + sum(copy.turns for copy in copies if copy is not None)
        return replace(applied, result=replace(applied.result, turns=turns))

    async def _delete_artifacts(self, session: SessionId) -> None:
        for digest in await self._erasures.artifacts_of(session):
            await self._delete_artifact(digest)

    async def erase_turn(self, turn_id: TurnId) -> Applied[Erasure] | None:
        """Erase a turn, other replies to its request, and all turns that continue them; None: there is no such turn.

        Raises:
            StoreUnavailable
        """
        return await self._notify(await self._erasures.erase_turn(turn_id))

    async def _notify(self, erasure: Erasure | None) -> Applied[Erasure] | None:
        if erasure is None:
            return None
        # Best effort: the workflow holds ids and reasons only.
        notice = SessionErased(erasure.session.session_id, erasure.message)
        return await notify_best_effort(erasure, self._notifier.notify(notice))
