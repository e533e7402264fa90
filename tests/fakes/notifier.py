"""Notifiers that record their calls, and can fail or hang."""

from __future__ import annotations

import asyncio

from clawloop.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnRecorded
from clawloop.contracts.training import OperatorChange
from clawloop.errors import SignalFailed
from clawloop.ids import SessionId

Message = TurnRecorded | FeedbackGiven | RejudgeRequested


class FakeNotifier:
    """Satisfies both `SessionNotifier` protocols and `clawloop.operations.ports.SessionWorkflows`.

    Attributes:
        sent: the messages, in order.
        erased: the erasures, in order.
        calls: how many sends were tried.
        available: False makes every call raise SignalFailed.
        hangs: True makes every call wait for ever.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[SessionFacts, Message | None]] = []
        self.erased: list[tuple[SessionId, ContentErased]] = []
        self.calls = 0
        self.available = True
        self.hangs = False

    async def notify_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        await self._send(session, turn)

    async def notify_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        await self._send(session, feedback)

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None:
        await self._send(session, request)

    async def content_erased(self, session: SessionId, erased: ContentErased) -> None:
        if not self.available:
            raise SignalFailed("the fake is set to be unavailable")
        self.erased.append((session, erased))

    async def wake(self, session: SessionFacts) -> None:
        await self._send(session, None)

    async def _send(self, session: SessionFacts, message: Message | None) -> None:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if not self.available:
            raise SignalFailed("the fake is set to be unavailable")
        self.sent.append((session, message))


class FakeWorkNotifier:
    """Satisfies `activities.training.ports.WorkNotifier`.

    Attributes:
        policies: those of the calls, in order.
        available: False makes every call raise SignalFailed.
    """

    def __init__(self) -> None:
        self.policies: list[str] = []
        self.available = True

    async def notify_work(self, policy: str) -> None:
        if not self.available:
            raise SignalFailed("Temporal: away")
        self.policies.append(policy)


class FakeOperatorNotifier:
    """Satisfies `clawloop.operations.ports.OperatorNotifier`.

    Attributes:
        changes: operators' changes with their policies, in order.
        woken: policies whose workflow was woken, in order.
        available: False makes every call raise SignalFailed.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[str, OperatorChange]] = []
        self.woken: list[str] = []
        self.available = True

    async def notify_work(self, policy: str) -> None:
        if not self.available:
            raise SignalFailed("Temporal: away")
        self.woken.append(policy)

    async def operator_changed(self, policy: str, change: OperatorChange) -> None:
        if not self.available:
            raise SignalFailed("Temporal: away")
        self.changes.append((policy, change))
